"""The sites of a layer: its input and output, and its neurons."""

from manyheads.lens.inputs.cached_run import entry
from manyheads.models.stack import Stack
from manyheads.taps import Site, Sublayer, Tap


def layer_ends(stack: Stack, layer: int) -> tuple[Site, Site] | None:
    """The sites of the residual stream before and after a layer.

    A layer without any sublayer changes nothing and has neither.

    >>> from manyheads.models.build import build
    >>> layer_ends(build("gpt2", layers=1, width=32, heads=2, vocabulary=50).stack, 0)
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
    """The site of the neurons of a layer's feed-forward."""
    return Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack.name)
