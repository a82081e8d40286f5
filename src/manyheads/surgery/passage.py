"""Where parts of a layer can be seen: what enters and leaves the whole of it, and its neurons."""

from manyheads.lens.trunk import entry
from manyheads.models.stack import Stack
from manyheads.taps import Site, Sublayer, Tap

__all__ = ["neuron_site", "passage"]


def passage(stack: Stack, layer: int) -> tuple[Site, Site] | None:
    """Where the residual stream that enters a layer is seen, and where the one that leaves it.

    A layer without any sublayer lets everything through and has neither.

    >>> from manyheads.models.build import build
    >>> passage(build("gpt2", layers=1, width=32, heads=2, vocabulary=50).stack, 0)
    (Site(0, BEFORE), Site(0, AFTER, FEEDFORWARD))
    """
    config = stack.config.layers[layer]
    if config.feedforward is not None:
        last = Sublayer.FEEDFORWARD
    elif config.cross is not None or config.cross_rest is not None:
        last = Sublayer.CROSS
    elif config.attention is not None or config.attention_rest is not None:
        last = Sublayer.ATTENTION
    else:
        return None
    return entry(stack, layer), Site(layer, Tap.AFTER, last, stack.name)


def neuron_site(stack: Stack, layer: int) -> Site:
    """Where the neurons of a layer's feed-forward are seen."""
    return Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack.name)
