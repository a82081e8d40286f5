"""Tokenizers of one's own: byte-level pairs, or WordPiece as BERT has it."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from manyheads.data.eos import END
from manyheads.data.sources.texts import TextSource
from manyheads.errors import ConfigError, InputError, MissingExtraError
from manyheads.progress import Progress

Kind = Literal["bytes", "wordpiece"]

BYTES = 256
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MEGABYTE = 1_000_000


def train_tokenizer(
    source: TextSource,
    size: int = 4096,
    kind: Kind = "bytes",
    *,
    lowercase: bool = True,
    least: int = 2,
    specials: Sequence[str] = (),
    shown: bool = True,
) -> Any:
    """A `tokenizers.Tokenizer` of at most `size` entries, learnt from texts.

    "bytes" is byte-level BPE: it can write any text, gives every byte back, and ends documents with
    <|end|>. "wordpiece" has BERT's special tokens and puts [CLS] and [SEP] around a text;
    `lowercase` is for it alone, and the library breaks ties between its rare entries by chance, so
    that learning twice may give two of them; "bytes" are always the same. `specials` come after
    those that a kind has, such as a [MASK] for bytes. A pair must occur `least` times to become an
    entry.
    """
    _check_specials(kind, specials)
    _check_size(size, kind, len(specials))
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "training a tokenizer needs the package tokenizers", "pip install tokenizers"
        ) from None
    if kind == "bytes":
        tokenizer, trainer = _bytes(size, least, specials)
    else:
        tokenizer, trainer = _wordpiece(size, least, lowercase, specials)
    read = _Read(source, shown)
    tokenizer.train_from_iterator(read, trainer=trainer)
    if read.error is not None:
        raise read.error
    if not read.passages:
        raise InputError("there is no text to learn from", "give a source with text in it")
    if kind == "wordpiece":
        _frame(tokenizer)
    return tokenizer


def _check_specials(kind: Kind, specials: Sequence[str]) -> None:
    own = (END,) if kind == "bytes" else BERT
    for place, name in enumerate(specials):
        if not name.strip():
            raise ConfigError(
                f"special token {place} is {name!r}", "give it a name, such as [MASK]"
            )
        if name in own or name in specials[:place]:
            raise ConfigError(f"the special token {name!r} is there already", "name it once")


def _check_size(size: int, kind: Kind, specials: int) -> None:
    least = specials + (BYTES + 1 if kind == "bytes" else len(BERT) + 1)
    if size < least:
        what = (
            f"{BYTES} bytes and {END}"
            if kind == "bytes"
            else f"{len(BERT) + specials} special tokens"
        )
        raise ConfigError(f"size={size} has no room beside {what}", f"use {least} or more")


class _Read:
    """The texts of a source, counted; an error is kept, since the trainer would swallow it."""

    def __init__(self, source: TextSource, shown: bool) -> None:
        self._source, self._shown = source, shown
        self.passages = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        expected = self._source.expected_bytes()
        total = None if expected is None else expected / MEGABYTE
        with Progress("reading", total=total, unit="MB", shown=self._shown) as bar:
            try:
                for passage in self._source.read():
                    self.passages += 1
                    yield passage.text
                    bar.advance(len(passage.text.encode()) / MEGABYTE)
            except Exception as error:
                self.error = error


def _bytes(size: int, least: int, specials: Sequence[str]) -> tuple[Any, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=least,
        special_tokens=[END, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return tokenizer, trainer


def _wordpiece(size: int, least: int, lowercase: bool, specials: Sequence[str]) -> tuple[Any, Any]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=least,
        special_tokens=[*BERT, *specials],
        show_progress=False,
    )
    return tokenizer, trainer


def _frame(tokenizer: Any) -> None:
    """[CLS] and [SEP] around a text, and [SEP] behind the second of a pair."""
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
