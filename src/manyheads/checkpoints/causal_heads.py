"""The heads that decoders are published with: next words, classes of a text or a token, or none."""

from collections.abc import Mapping
from typing import Any

from manyheads.checkpoints.bert import class_count
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, Readout, TokenHead

__all__ = ["HEADS", "head_of"]

# How a class ends there that has such a head; GPT-2's next words have a name of their own.
HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForCausalLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
}


def head_of(theirs: Mapping[str, Any], words: LanguageHead) -> Readout:
    """What the first of `architectures` asks for, and next words where it is none of these.

    A text's class is read off its last token. A bare model whose words are tied still names them
    by their own table, as `transformers` does when asked to write with it.
    """
    asked = str((theirs.get("architectures") or [""])[0])
    if asked.endswith(HEADS[ClassHead]):
        return ClassHead(classes=class_count(theirs), pool="last", bias=False)
    if asked.endswith(HEADS[TokenHead]):
        return TokenHead(classes=class_count(theirs))
    if asked.endswith(HEADS[NoReadout]) and not asked.endswith("LMHeadModel") and not words.tied:
        return NoReadout()
    return words
