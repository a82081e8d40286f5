"""What to try next with a model, each suggestion with its reason and its command."""

import shlex
from dataclasses import dataclass

from manyheads.formatting import pluralise
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.redundant.dead_heads import LOSS_BELOW
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.report.data import ReportData

# Gates are suggested where at least this fraction of the heads has a sink.
MANY_SINKS = 0.15


@dataclass(frozen=True, slots=True)
class Advice:
    """One suggestion: its title, the reason and the command."""

    title: str
    why: str
    command: str


def advise(report: ReportData, *, where: str, file: str) -> list[Advice]:
    """Suggest commands, the most promising first; the studio always comes last."""
    model, text = shlex.quote(where), shlex.quote(file)
    return [
        *_prune(report, model, text),
        *_gate(report, model, text),
        *_merge(report, model, text),
        Advice(
            "Switch heads off yourself",
            "The studio shows this model in the browser: type any text, switch heads off, and "
            "see how its answers change.",
            f"manyheads studio {model}",
        ),
    ]


def _prune(report: ReportData, model: str, text: str) -> list[Advice]:
    importance, heads = report.importance, report.heads
    if importance is None:
        return []
    least = LOSS_BELOW if importance.metric == "loss" else 1e-3
    idle = int((importance.change < least).sum())
    if not idle:
        return []
    unit = importance.metric
    cost = "costs" if importance.by == "ablation" else "would cost, by its gradient,"
    return [
        Advice(
            "Prune heads that do nothing",
            f"Each of {idle} of {heads} heads {cost} less than {least:g} of {unit} on its own. "
            "Together they may cost more: the command removes heads one by one while the "
            f"{unit} stays within the budget, and saves a smaller model.",
            f"manyheads prune {model} --file {text} --loss-budget 0.01 -o pruned/",
        )
    ]


def _gate(report: ReportData, model: str, text: str) -> list[Advice]:
    writes = isinstance(report.model, Decoder)
    writes = writes and isinstance(report.model.config.readout, LanguageHead)
    gated = any(name.startswith("gate_") for name in report.statistics.names)
    if not writes or gated:
        return []
    sinks = int((report.statistics["first_token"].means > SINK_ABOVE).sum())
    massive = sum(each.massive for each in report.statistics.activations)
    if sinks < MANY_SINKS * report.heads and not massive:
        return []
    return [
        Advice(
            "Give the heads a gate",
            f"{sinks} of {report.heads} heads have a sink at the first token, and there are "
            f"massive activations in {pluralise(massive, 'layer')}. With a gate after its output a "
            "head can write nothing without a sink (Qiu et al., arXiv 2505.06708).",
            f"manyheads gate {model} --file {text} -o gated/ --at output --per head",
        )
    ]


def _merge(report: ReportData, model: str, text: str) -> list[Advice]:
    doubles = report.inspection.doubles
    # Pruning needs texts.
    if not doubles or report.input.picture is not None:
        return []
    pair = doubles[0]
    return [
        Advice(
            "Remove duplicate heads",
            f"In {pluralise(len(doubles), 'pair')} both heads have the same pattern and output, "
            f"above all {pair.one} and {pair.other}. Prune by redundancy to keep one of each pair.",
            f"manyheads prune {model} --file {text} --by redundancy --fraction 0.1 -o pruned/",
        )
    ]
