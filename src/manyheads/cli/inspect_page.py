"""The page of `manyheads inspect`: the model, its heads, sinks, the dead and the doubled."""

from typing import Any

from rich.console import Console

from manyheads.cli.ink import Ink, visible
from manyheads.lens.inspection import Inspection
from manyheads.lens.observer import Activation
from manyheads.wording import counted

__all__ = ["show"]

MOST = 10
NARROWEST = 120


def show(console: Console, name: str, found: Inspection, tokenizer: Any) -> None:
    """Print what was found."""
    # A table of measures needs more room than prose, and a file has no edge.
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    width = console.width
    ink = Ink(console)
    console.width = width
    ink.title(visible(name))
    facts = found.statistics.facts
    own = " of our own" if found.facts["own_texts"] else ""
    ink.say(
        f"{found.model} Read: {counted(facts['texts'], 'text')}{own}, {facts['tokens']:,} tokens."
    )
    if found.kinds is not None:
        ink.say(str(found.kinds).splitlines()[0].capitalize() + ".")
    ink.heading("Heads")
    console.print(found.table(max_rows=None))
    ink.heading("Sinks and largest activations")
    _sinks(ink, found)
    for each in found.activations:
        ink.say(_activation(each, tokenizer))
    ink.heading("Dead")
    for line in str(found.dead).splitlines():
        ink.say(line)
    ink.say("This goes by entropy and norm; manyheads ablate says what the loss does.", "dim")
    ink.heading("Doubled")
    _doubled(ink, found)
    if not found.complete:
        ink.say("Broken off: what is missing was not measured.", "bold red")


def _sinks(ink: Ink, found: Inspection) -> None:
    above = found.statistics.facts["sink_above"]
    sinks = found.sinks
    if not sinks:
        ink.say(f"No head puts more than {above:g} of its weight on the first token of a text.")
        return
    told = ", ".join(f"{head} {weight:.2f}" for head, weight in sinks[:MOST])
    more = f" and {len(sinks) - MOST} more" if len(sinks) > MOST else ""
    ink.say(
        f"More than {above:g} of the weight on the first token in some text, and on average: "
        f"{told}{more}."
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


def _doubled(ink: Ink, found: Inspection) -> None:
    if not found.redundancy:
        ink.say("Not measured.")
    for each in found.redundancy:
        for line in str(each).splitlines():
            ink.say(line)
