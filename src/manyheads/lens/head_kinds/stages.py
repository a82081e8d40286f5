"""The four stages of the survey of heads, by the kinds that are evidence for them.

Zheng et al. (arXiv 2409.03752) order published heads by what they do on the way to an answer. A
head is in a stage where one of its labels is evidence for it, in several if it has such labels.
"""

from collections.abc import Mapping, Sequence

from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.results.addresses import Address

# The kinds of each stage, and which heads of the survey they stand for. Kinds that only say where
# weight ends up (self, sink, broad, context-blind, those of images) are evidence for none.
STAGES: dict[str, dict[str, str]] = {
    "recalling knowledge": {
        "recall": "associative memories",
        "bias-gap": "as negative heads, prefers what training made likely to what the text says",
    },
    "identifying context": {
        "previous-token": "previous heads",
        "next-token": "positional heads",
        "positional": "positional heads",
        "duplicate-token": "duplicate heads",
        "retrieval": "retrieval heads",
        "syntactic": "syntactic heads",
        "coreference": "syntactic heads, of pronouns",
        "tense": "syntactic heads, of verbs",
        "acronym": "letter mover heads",
        "bracket": "structure of the text",
        "numbering": "structure of the text",
        "sentence-start": "structure of the text",
        "punctuation": "structure of the text",
        "capitals": "structure of the text",
    },
    "reasoning": {"induction": "induction heads"},
    "expressing": {
        "repetition": "amplification heads: raises what is said next",
        "copying": "amplification heads: raises what it attends to",
    },
}


def stage_of(kind: str) -> str:
    """The stage that a kind is evidence for, or an empty string.

    >>> stage_of("induction"), stage_of("sink")
    ('reasoning', '')
    """
    return next((stage for stage, kinds in STAGES.items() if kind in kinds), "")


def group_by_stage(
    labels: Mapping[Address, Sequence[Label]],
) -> dict[str, dict[Address, tuple[Label, ...]]]:
    """The heads of every stage, each with the labels that are evidence for it."""
    return {
        stage: {
            address: evidence
            for address, own in labels.items()
            if (evidence := tuple(label for label in own if label.kind in kinds))
        }
        for stage, kinds in STAGES.items()
    }
