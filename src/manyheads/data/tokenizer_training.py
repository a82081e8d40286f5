"""Training of tokenizers: byte-level BPE, or WordPiece as for BERT."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from manyheads.data.sources.texts import TextSource
from manyheads.errors import ConfigError, InputError, import_package
from manyheads.progress import Progress
from manyheads.tokenizers import plain_copy

EOS = "<|end|>"
# Ours; then those of GPT-2, of T5 and Llama, of Gemma, and the separator of BERT.
KNOWN_EOS = (EOS, "<|endoftext|>", "</s>", "<eos>", "[SEP]")


def appended_eos(tokenizer: Any) -> int | None:
    """The id of the token that the tokenizer itself appends to a text, if any."""
    bare, whole = (
        tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    return None if bare[-1:] == whole[-1:] else int(whole[-1])


def appending(tokenizer: Any, token: int) -> Any:
    """A copy of the tokenizer that appends a token to every text, after what it adds itself."""
    from tokenizers import processors

    copy = plain_copy(tokenizer)
    bare, whole = (copy.encode("a", add_special_tokens=added).ids for added in (False, True))
    start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
    before, after = whole[:start], [*whole[start + len(bare) :], token]
    names = {token: copy.id_to_token(token) for token in (*before, *after)}
    opening, closing = ([names[id_] for id_ in ids] for ids in (before, after))
    template = processors.TemplateProcessing(
        single=[*opening, "$A", *closing],
        pair=[*opening, "$A", *closing, "$B:1", *(f"{name}:1" for name in closing)],
        special_tokens=[(name, token) for token, name in names.items()],
    )
    # Templates cannot follow one another; what adds no tokens can stay.
    stays = copy.post_processor is not None and bare == whole
    copy.post_processor = (
        processors.Sequence([copy.post_processor, template]) if stays else template
    )
    return copy


def find_eos(tokenizer: Any) -> str | None:
    """The first known end-of-sequence token that the tokenizer has."""
    return next((name for name in KNOWN_EOS if tokenizer.token_to_id(name) is not None), None)


TokenizerKind = Literal["bytes", "wordpiece"]

BYTES = 256
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MEGABYTE = 1_000_000


def train_tokenizer(
    source: TextSource,
    size: int = 4096,
    kind: TokenizerKind = "bytes",
    *,
    lowercase: bool = True,
    least: int = 2,
    specials: Sequence[str] = (),
    progress: bool = True,
) -> Any:
    """Train a `tokenizers.Tokenizer` of at most `size` entries.

    "bytes" is byte-level BPE: it encodes any text without loss, and has <|end|> to end documents.
    "wordpiece" has BERT's special tokens and adds [CLS] and [SEP] around a text; `lowercase` is for
    it only. Training "wordpiece" twice may give different rare entries, since the library breaks
    ties at random; "bytes" is deterministic. `specials` are further special tokens, such as [MASK]
    for "bytes". A pair must occur `least` times to become an entry.
    """
    own = (EOS,) if kind == "bytes" else BERT
    for place, name in enumerate(specials):
        if not name.strip():
            raise ConfigError(f"special token {place} is {name!r}", "use a name such as [MASK]")
        if name in own or name in specials[:place]:
            raise ConfigError(f"the special token {name!r} occurs twice", "remove one")
    smallest = len(specials) + (BYTES + 1 if kind == "bytes" else len(BERT) + 1)
    if size < smallest:
        bert = f"{len(BERT) + len(specials)} special tokens"
        what = f"{BYTES} bytes and {EOS}" if kind == "bytes" else bert
        raise ConfigError(f"size={size} is too small for {what}", f"use {smallest} or more")
    library = import_package("tokenizers", "training a tokenizer", "tokenizers")
    trained: dict[str, Any] = {
        "vocab_size": size,
        "min_frequency": least,
        "special_tokens": [*own, *specials],
        "show_progress": False,
    }
    if kind == "bytes":
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(initial_alphabet=alphabet, **trained)
    else:
        tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = library.decoders.WordPiece()
        trainer = library.trainers.WordPieceTrainer(**trained)
    read = _Read(source, progress)
    tokenizer.train_from_iterator(read, trainer=trainer)
    if read.error is not None:
        raise read.error
    if not read.passages:
        raise InputError("there is no text to train on", "use a source that has text")
    if kind == "wordpiece":
        # [CLS] and [SEP] around a text, and [SEP] after the second text of a pair.
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
        )
    return tokenizer


class _Read:
    """The texts of a source, counted; an error is kept, since the trainer swallows it."""

    def __init__(self, source: TextSource, progress: bool) -> None:
        self._source, self._progress = source, progress
        self.passages = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        expected = self._source.expected_bytes()
        total = None if expected is None else expected / MEGABYTE
        with Progress("reading", total=total, unit="MB", enabled=self._progress) as bar:
            try:
                for passage in self._source.read():
                    self.passages += 1
                    yield passage.text
                    bar.advance(len(passage.text.encode()) / MEGABYTE)
            except Exception as error:
                self.error = error
