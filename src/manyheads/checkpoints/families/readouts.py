"""The heads of published models as config.json describes them: their kind, classes and labels."""

from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.models.provenance import NAMELESS
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, Readout, TokenHead

# How the name of a decoder's class ends; GPT-2 has another name for its language head.
CAUSAL_HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForCausalLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
}


def causal_readout(theirs: Mapping[str, Any], language_head: LanguageHead) -> Readout:
    """The readout that the first of `architectures` names; a language head where it names none.

    A sequence is classified by its last token. A bare model with a tied language head keeps it, as
    `transformers` does when such a model generates text.
    """
    name = str((theirs.get("architectures") or [""])[0])
    if name.endswith(CAUSAL_HEADS[ClassHead]):
        return ClassHead(classes=class_count(theirs), pool="last", bias=False)
    if name.endswith(CAUSAL_HEADS[TokenHead]):
        return TokenHead(classes=class_count(theirs))
    bare = name.endswith(CAUSAL_HEADS[NoReadout]) and not name.endswith("LMHeadModel")
    return NoReadout() if bare and not language_head.tied else language_head


def class_count(theirs: Mapping[str, Any]) -> int:
    """The number of classes; `transformers` leaves it out where it is two."""
    labels = theirs.get("id2label")
    return len(labels) if labels else int(theirs.get("num_labels", 2))


def label_maps(names: Sequence[str]) -> dict[str, Any]:
    """The names of classes as config.json has them, in both directions."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def default_labels(readout: Readout) -> dict[str, Any]:
    """What `transformers` calls classes that have no names."""
    if not isinstance(readout, ClassHead | TokenHead):
        return {}
    return label_maps(unnamed(readout.classes))


def unnamed(count: int) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(f"{NAMELESS}{index}" for index in range(count))
