"""The page of `manyheads inspect`: the model, its heads, sinks, dead and duplicate heads."""

from typing import Any

from rich.console import Console

from manyheads.console import Ink, visible
from manyheads.formatting import pluralise, percent
from manyheads.lens.inspection import Inspection
from manyheads.lens.measure.watcher import Activation

MOST = 10
NARROWEST = 120


def show(console: Console, name: str, inspection: Inspection, tokenizer: Any) -> None:
    """Print an inspection."""
    # The table of measures needs more room than prose, and a file has no width.
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    width = console.width
    ink = Ink(console)
    console.width = width
    ink.title(visible(name))
    facts = inspection.statistics.facts
    own = " that come with manyheads" if inspection.facts["own_texts"] else ""
    ink.say(
        f"{inspection.model} Measured on {pluralise(facts['texts'], 'text')}{own}, "
        f"{pluralise(facts['tokens'], 'token')}."
    )
    if inspection.kinds is not None:
        ink.say(str(inspection.kinds).splitlines()[0].capitalize() + ".")
    ink.heading("Heads")
    console.print(inspection.table(max_rows=None))
    ink.heading("Sinks and largest activations")
    _sinks(ink, inspection)
    for each in inspection.activations:
        ink.say(_activation(each, tokenizer))
    ink.heading("Dead")
    for line in str(inspection.dead).splitlines():
        ink.say(line)
    ink.say(
        "Judged by entropy and norm; manyheads ablate measures the loss without each head.", "dim"
    )
    ink.heading("Duplicate")
    _duplicates(ink, inspection)
    if not inspection.complete:
        ink.say("Interrupted: what is missing was not measured.", "bold red")


def _sinks(ink: Ink, inspection: Inspection) -> None:
    above = inspection.statistics.facts["sink_above"]
    sinks = inspection.sinks
    if not sinks:
        ink.say(
            f"No head puts more than {percent(above)} of its weight on the first token of a text."
        )
        return
    heads = ", ".join(f"{head} {percent(weight)}" for head, weight in sinks[:MOST])
    more = f" and {len(sinks) - MOST} more" if len(sinks) > MOST else ""
    ink.say(
        f"Heads with more than {percent(above)} of the weight on the first token of some text, "
        f"with their mean over all texts: {heads}{more}."
    )


def _activation(each: Activation, tokenizer: Any) -> str:
    stack = "" if each.stack == "main" else f"{each.stack} "
    token = ""
    if each.token is not None and tokenizer is not None:
        token = f" ({visible(repr(tokenizer.decode([each.token], skip_special_tokens=False)))})"
    massive = ", massive" if each.massive else ""
    return (
        f"after {stack}layer {each.layer}: {each.largest:.1f} in channel {each.channel} at "
        f"position {each.position}{token} of text {each.text}, median {each.median:.2g}{massive}"
    )


def _duplicates(ink: Ink, inspection: Inspection) -> None:
    if not inspection.redundancy:
        ink.say("Not measured.")
    for each in inspection.redundancy:
        for line in str(each).splitlines():
            ink.say(line)
