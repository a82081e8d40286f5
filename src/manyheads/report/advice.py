"""What to try next with a model, from what was found, each with its command."""

import shlex
from dataclasses import dataclass

from manyheads.lens.dead import LOSS_BELOW
from manyheads.lens.measures import SINK_ABOVE
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.report.examine import Findings
from manyheads.wording import counted

__all__ = ["Advice", "advise"]

# Gates are worth a trial where this share of the heads has a sink.
MANY_SINKS = 0.15


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, why, and how."""

    title: str
    why: str
    command: str


def advise(found: Findings, *, where: str, file: str) -> list[Advice]:
    """Most promising first; the command to look further comes always."""
    model, text = shlex.quote(where), shlex.quote(file)
    return [
        *_prune(found, model, text),
        *_gate(found, model, text),
        *_merge(found, model, text),
        Advice(
            "Switch heads off yourself",
            "The studio shows this model in the browser: type any text, switch heads off, and "
            "watch what it says change.",
            f"manyheads studio {model}",
        ),
    ]


def _prune(found: Findings, model: str, text: str) -> list[Advice]:
    worth, heads = found.worth, found.heads
    if worth is None:
        return []
    least = LOSS_BELOW if worth.metric == "loss" else 1e-3
    idle = int((worth.loses < least).sum())
    if not idle:
        return []
    unit = "loss" if worth.metric == "loss" else "likeness"
    told = "costs" if worth.by == "ablation" else "would cost, by its gradient,"
    return [
        Advice(
            "Prune what does nothing",
            f"Each of {idle} of {heads} heads alone {told} less than {least:g} of {unit}. Together "
            "they may cost more: the command takes heads away one after another, as long as the "
            f"{unit} stays within the budget, and leaves a smaller model.",
            f"manyheads prune {model} --file {text} --loss-budget 0.01 -o pruned/",
        )
    ]


def _gate(found: Findings, model: str, text: str) -> list[Advice]:
    writes = isinstance(found.model, Decoder)
    writes = writes and isinstance(found.model.config.readout, LanguageHead)
    gated = any(name.startswith("gate_") for name in found.seen.names)
    if not writes or gated:
        return []
    sinks = int((found.seen["first_token"].means > SINK_ABOVE).sum())
    massive = sum(each.massive for each in found.seen.activations)
    if sinks < MANY_SINKS * found.heads and not massive:
        return []
    return [
        Advice(
            "Give the heads a gate",
            f"{sinks} of {found.heads} heads rest on the first token, and massive activations "
            f"stand in {counted(massive, 'layer')}. A gate after the output lets a head say "
            "nothing without a sink (Qiu et al., arXiv 2505.06708).",
            f"manyheads gate {model} --file {text} -o gated/ --at output --per head",
        )
    ]


def _merge(found: Findings, model: str, text: str) -> list[Advice]:
    doubles = found.alike.doubles
    # Pruning reads texts.
    if not doubles or found.reading.picture is not None:
        return []
    pair = doubles[0]
    return [
        Advice(
            "Keep one of two",
            f"In {counted(len(doubles), 'pair')} both heads look at the same and write the same, "
            f"{pair.one} and {pair.other} first of all. Prune by redundancy to keep one of each.",
            f"manyheads prune {model} --file {text} --by redundancy --fraction 0.1 -o pruned/",
        )
    ]
