"""How much every position of a text affects every other: norms of Jacobians."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, check_int
from manyheads.lens.inputs.cached_run import layer_input_site
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.models import build, model_interface
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap

# Tokens of all copies of a text that run side by side, and the longest text.
BATCH_TOKENS = 4096
MAX_TOKENS = 512


@wrapping_models
def influence(
    model: build.Model,
    texts: Inputs,
    *,
    layer: int | None = None,
    directions: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> tuple[Float[Tensor, "_ _"], ...]:
    """For each text how much every output position (row) depends on every input position (column).

    It is the Frobenius norm of the Jacobian of a position's final vector by what enters the first
    layer at another; with `layer`, of what the attention or mixer of that layer adds by the
    residual stream that enters it. It needs no heads and no pattern, so that it also shows Fourier
    and MLP mixers and Mamba.

    The norm is estimated from random orthogonal `directions` of the output, without bias, and exact
    if they are as many as the model has channels. Each costs a backward pass per position: texts
    have at most 512 tokens.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> norms, = influence(model, [[5, 6, 7]])
    >>> norms.shape, bool((norms.triu(1) == 0).all())
    (torch.Size([3, 3]), True)
    """
    check_int("directions", directions, minimum=1)
    stack = model.stacks()[model.readout_stack]
    start, end = Site(-1, Tap.EMBEDDINGS, stack=stack.name), Site(-1, Tap.FINAL, stack=stack.name)
    if layer is not None:
        if not 0 <= layer < len(stack.layers):
            raise InputError(f"there is no layer {layer}", f"use 0 to {len(stack.layers) - 1}")
        start = layer_input_site(stack, layer)
        end = Site(layer, Tap.OUTPUT, start.sublayer, stack.name)
    inputs = read_inputs(model, texts)
    norms = []
    bar = Progress("influence of positions", total=len(inputs), unit="texts", enabled=progress)
    with build.eval_mode(model), torch.enable_grad(), bar:
        for text in range(len(inputs)):
            norms.append(
                _jacobian_norms(_Ends(model, start, end), inputs.select([text]), directions, seed)
            )
            bar.advance()
    return tuple(norms)


def _jacobian_norms(
    ends: "_Ends", inputs: model_interface.ModelInputs, directions: int, seed: int
) -> Float[Tensor, "t t"]:
    """The norms of the Jacobians of one text."""
    _, output = ends.run(inputs)
    length, width = output.values.shape
    if length > MAX_TOKENS:
        raise InputError(
            f"a text has {length:,} tokens, and each costs backward passes of its own",
            f"use texts of at most {MAX_TOKENS} tokens",
        )
    count = min(directions, width)
    normal = torch.randn(width, count, generator=torch.Generator().manual_seed(seed))
    orthogonal = torch.linalg.qr(normal).Q.T.to(output.values)
    squares = torch.zeros(length, length, dtype=torch.float64, device=output.device)
    pairs = torch.cartesian_prod(torch.arange(length), torch.arange(count)).to(output.device)
    for group in pairs.split(max(1, BATCH_TOKENS // max(1, length))):
        # Each copy of the text gives one output position in one direction.
        rows, numbers = group.unbind(1)
        copies = len(group)
        entered, output = ends.run(inputs.repeat(copies))
        values = output.values.unflatten(0, (copies, -1))
        own = values[torch.arange(copies, device=rows.device), rows]
        [gradient] = torch.autograd.grad((own * orthogonal[numbers]).sum(), entered)
        squares.index_add_(0, rows, gradient.unflatten(0, (copies, -1)).double().square().sum(-1))
    return (squares * (width / count)).sqrt().float()


class _Ends:
    """A watcher that starts a graph at one site and takes its end at another."""

    def __init__(self, model: build.Model, start: Site, end: Site) -> None:
        self._model, self._start, self._end = model, start, end
        self._values: dict[Site, Ragged] = {}

    def run(self, inputs: model_interface.ModelInputs) -> tuple[Tensor, Ragged]:
        """What entered at the start, and the output at the end."""
        self._values.clear()
        self._model.run_hidden(inputs, self)
        for site in (self._start, self._end):
            if site not in self._values:
                raise InputError(
                    f"the model shows no {site}", "choose a layer that has attention or a mixer"
                )
        return self._values[self._start].values, self._values[self._end]

    def wants(self, site: Site) -> bool:
        return site in (self._start, self._end)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged), "no pattern is requested"
        if site == self._start:
            value = value.with_values(value.values.detach().requires_grad_())
        self._values[site] = value
        return value
