"""Answers from documents: find passages, and let a decoder answer from them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from manyheads.argument_checks import checked
from manyheads.decoding import chat, generation_config, request
from manyheads.decoding.generation import generate
from manyheads.decoding.guard import sentence_spans
from manyheads.encoding.text_reader import resolve_max_length
from manyheads.errors import InputError, check_int
from manyheads.formatting import pluralise
from manyheads.tasks.search.highlights import content_words, highlight
from manyheads.tokenizers import surrogates_refused

if TYPE_CHECKING:
    from manyheads.tasks.search.index import Hit, Index

INSTRUCTIONS = (
    "Answer the question from the numbered passages below. Name the passages that you use by "
    "their numbers, as in [1]. If the passages do not answer the question, say so."
)
# The fraction of the words that a sentence adds to the question which its passage must have.
SUPPORT = 0.5
UNSUPPORTED = "No passage supports this answer."
CITATION = re.compile(r"\s?\[(\d+)\]")
# Of a passage that does not fit, fewer tokens than these are left out altogether.
SHORTEST_PASSAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A passage that the reader was given, under its number in the prompt.

    It is `cited` if a sentence of the answer came from it.
    """

    number: int
    hit: "Hit"
    text: str
    """What the reader was given of the passage: the beginning, if it was too long."""
    cited: bool = False

    @property
    def cut(self) -> bool:
        """Whether the end of the passage did not fit."""
        return len(self.text) < len(self.hit.text)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        own = {"text": self.text, "cut": self.cut, "cited": self.cited}
        return {"number": self.number} | self.hit.as_dict() | own


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderPrompt:
    """The token ids of a question with its passages, and what was left out to fit the reader."""

    ids: tuple[int, ...]
    sources: tuple[Source, ...]
    left_out: int
    context: int | None
    is_chat: bool

    @property
    def truncation(self) -> str:
        """A sentence about what did not fit; empty if everything did."""
        cut = sum(source.cut for source in self.sources)
        parts = [f"cut {pluralise(cut, 'passage')}"] if cut else []
        parts += [f"left out {pluralise(self.left_out, 'passage')}"] if self.left_out else []
        if not parts:
            return ""
        return f"{' and '.join(parts)} to fit the reader's {self.context:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the reader wrote, with the numbers of the passages that its sentences came from.

    `sources` are all passages that it was given, and `cited` those that support the answer.
    `truncation` says what of the passages did not fit the reader's context, if anything.
    """

    question: str
    text: str
    sources: tuple[Source, ...]
    finish_reason: generation_config.FinishReason
    truncation: str = ""

    @property
    def cited(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.cited)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "question": self.question,
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "truncation": self.truncation,
            "supported": bool(self.cited),
            "sources": [source.as_dict() for source in self.sources],
        }

    def __str__(self) -> str:
        rows = [f"[{source.number}] {source.hit.title or source.hit.id}" for source in self.cited]
        return "\n".join([self.text, "", *(rows or [UNSUPPORTED])])


@checked
def answer(
    index: "Index",
    question: str,
    reader: Any,
    *,
    top_k: int = 5,
    where: str | Mapping[str, Any] | None = None,
    instructions: str = INSTRUCTIONS,
    config: generation_config.GenerationConfig | None = None,
    progress: bool = True,
    **options: Unpack[generation_config.GenerationOptions],
) -> Answer:
    """Answer a question from the `top_k` best documents of an index.

    `reader` is a decoder or an encoder-decoder. It receives the instructions, numbered passages and
    the question, by its chat template if it has one. Passages that do not fit its context beside
    the new tokens are cut, the worst first. `config` and the options are those of `generate`.
    """
    check_int("top_k", top_k, minimum=1)
    config = generation_config.with_options(config, options)
    has_template = _has_template(request.check_generates(reader))
    if not config.stop_strings and not config.uses_beams and not has_template:
        # A model that only continues text would go on with questions of its own.
        config = replace(config, stop_strings=("\nQuestion:",))
    hits = index.search(question, top_k=top_k, where=where)
    prompt = reader_prompt(
        reader, question, hits, instructions=instructions, max_new_tokens=config.max_new_tokens
    )
    [generation] = generate(reader, [list(prompt.ids)], config, progress=progress)
    return finish_answer(question, str(generation), generation.finish_reason, prompt)


def finish_answer(
    question: str, text: str, finish_reason: generation_config.FinishReason, prompt: ReaderPrompt
) -> Answer:
    """The answer with a citation behind each sentence that comes from a passage.

    A sentence comes from the passage with most of the words that it adds to the question, if these
    are at least half of them and all its numbers. A passage that the reader names itself needs only
    one of them; otherwise its number is removed.
    """
    text, parts, cited = text.strip(), [], set[int]()
    numbers = {source.number for source in prompt.sources}
    for start, end in sentence_spans(text, 0, complete=True):
        sentence = text[start:end]
        shares = {
            source.number: _support(sentence, question, f"{source.hit.title} {source.text}")
            for source in prompt.sources
        }
        named = {int(number) for number in CITATION.findall(sentence)} & numbers
        support = {number for number in named if shares[number] > 0}
        for number in named - support:
            sentence = re.sub(rf"\s?\[{number}\]", "", sentence)
        best = max(shares, key=lambda number: shares[number], default=0)
        if not support and shares.get(best, 0) >= SUPPORT:
            support = {best}
            words = sentence.rstrip()
            body = words.rstrip(".!?…\"'”»")
            sentence = f"{body} [{best}]{words[len(body) :]}{sentence[len(words) :]}"
        parts.append(sentence)
        cited |= support
    return Answer(
        question=question,
        text="".join(parts),
        sources=tuple(replace(source, cited=source.number in cited) for source in prompt.sources),
        finish_reason=finish_reason,
        truncation=prompt.truncation,
    )


def _support(sentence: str, question: str, passage: str) -> float:
    """The fraction of the words of a sentence, beyond those of the question, that a passage has.

    It is 0 where the passage lacks a number of the sentence. Every word of the question that both
    have adds a little, so that of two passages the one about the same subject comes first.

    >>> _support("It was finished in 1894.", "When was it finished?", "Finished in 1894.")
    1.001
    """
    words = set(content_words(CITATION.sub("", sentence)))
    shared = {word for word in words if highlight(word, passage)}
    if any(word.isdecimal() for word in words - shared):
        return 0.0
    own = {word for word in words if not highlight(word, question)} or words
    if not own & shared:
        return 0.0
    return len(own & shared) / len(own) + len(shared - own) / 1000


def reader_prompt(
    reader: Any,
    question: str,
    hits: "Sequence[Hit]",
    *,
    instructions: str = INSTRUCTIONS,
    max_new_tokens: int = 128,
) -> ReaderPrompt:
    """The prompt of a question and its passages, of which the best are kept whole if they fit."""
    model = request.check_generates(reader)
    tokenizer = request.tokenizer_of(model, "a question")
    if not question.strip():
        raise InputError("the question is empty", "ask something")
    if not hits:
        raise InputError(
            "the index has no passage for this question", "loosen where, or add documents"
        )
    is_chat = _has_template(model)
    # How many tokens the reader was made for, or trained on.
    bounds = (resolve_max_length(model, None), model.trained_length)
    context = min((bound for bound in bounds if bound is not None), default=None)
    # An encoder-decoder writes beside the prompt, not after it.
    room = context if context is None or model.reads_pairs else context - max_new_tokens
    # By its special tokens a passage could pass for another speaker.
    added = tokenizer.get_added_tokens_decoder().values()
    special = [re.escape(token.content) for token in added if token.special and token.content]
    blanked = re.compile("|".join(sorted(special, key=len, reverse=True)) or "(?!)")

    def encode(sources: Sequence[Source]) -> list[int]:
        passages = []
        for source in sources:
            title = f"{source.hit.title}\n" if source.hit.title else ""
            passages.append(f"[{source.number}] {blanked.sub(' ', title + source.text)}")
        text = "\n\n".join([instructions, *passages, f"Question: {question.strip()}"])
        if is_chat:
            return chat.chat_prompt(model, [{"role": "user", "content": text}])
        with surrogates_refused([text]):
            ids: list[int] = tokenizer.encode(f"{text}\nAnswer:").ids
        return ids

    sources: list[Source] = []
    ids = encode(sources)
    if room is not None and len(ids) + SHORTEST_PASSAGE > room:
        raise InputError(
            f"the question takes {len(ids):,} tokens and max_new_tokens {max_new_tokens:,} of the "
            f"reader's {context:,}, which leaves no room for passages",
            "lower max_new_tokens, or use a reader with a longer context",
        )
    for hit in hits:
        whole = Source(number=len(sources) + 1, hit=hit, text=hit.text)
        longer = encode([*sources, whole])
        if room is not None and len(longer) > room:
            shortened = _cut(tokenizer, whole, sources, encode, room)
            if shortened is not None:
                sources.append(shortened)
                ids = encode(sources)
            break
        sources.append(whole)
        ids = longer
    return ReaderPrompt(
        ids=tuple(ids),
        sources=tuple(sources),
        left_out=len(hits) - len(sources),
        context=context,
        is_chat=is_chat,
    )


def _cut(
    tokenizer: Any,
    source: Source,
    before: Sequence[Source],
    encode: Callable[[Sequence[Source]], list[int]],
    room: int,
) -> Source | None:
    """As much of a passage as fits after others, or None if it is hardly any."""
    with surrogates_refused([source.text]):
        offsets = tokenizer.encode(source.text, add_special_tokens=False).offsets
    count = len(offsets)
    while True:
        # Tokens at the borders may merge, so that the prompt itself is counted.
        cut = replace(source, text=source.text[: offsets[count - 1][1]]) if count else source
        excess = len(encode([*before, cut])) - room
        if count < SHORTEST_PASSAGE:
            return None
        if excess <= 0:
            return cut
        count -= excess


def _has_template(model: Any) -> bool:
    return bool(chat.tokenizer_config_of(model).get("chat_template"))
