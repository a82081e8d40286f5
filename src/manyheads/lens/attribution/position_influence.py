"""How much every position of a text affects every other: norms of Jacobians."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, check_int
from manyheads.lens.inputs.cached_run import layer_input_site
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap

# Tokens of all copies of a text that run side by side, and the longest text.
BATCH_TOKENS = 4096
MAX_TOKENS = 512


@wrapping_models
def influence(
    model: Model,
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
    with eval_mode(model), torch.enable_grad(), bar:
        for text in range(len(inputs)):
            jacobians = _Jacobians(model, inputs.select([text]), start, end)
            norms.append(jacobians.norms(directions, seed))
            bar.advance()
    return tuple(norms)


class _Jacobians:
    """The Jacobians of one text between two sites."""

    def __init__(self, model: Model, inputs: ModelInputs, start: Site, end: Site) -> None:
        self.model, self.inputs, self.start, self.end = model, inputs, start, end

    def norms(self, directions: int, seed: int) -> Float[Tensor, "t t"]:
        _, output = self._run(1)
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
            rows, numbers = group.unbind(1)
            gradients = self._gradients(rows, orthogonal[numbers])
            squares.index_add_(0, rows, gradients.double().square().sum(-1))
        return (squares * (width / count)).sqrt().float()

    def _gradients(
        self, rows: Tensor, towards: Float[Tensor, "copies c"]
    ) -> Float[Tensor, "copies t c"]:
        """Of one output position in one direction, in each copy of the text."""
        copies = len(rows)
        entered, output = self._run(copies)
        values = output.values.unflatten(0, (copies, -1))
        along = (values[torch.arange(copies, device=rows.device), rows] * towards).sum()
        [gradient] = torch.autograd.grad(along, entered)
        return gradient.unflatten(0, (copies, -1))

    def _run(self, copies: int) -> tuple[Tensor, Ragged]:
        watcher = _Ends(self.start, self.end)
        self.model.run_hidden(self.inputs.repeat(copies), watcher)
        if watcher.entered is None or watcher.output is None:
            raise InputError(
                f"the model shows no {self.start if watcher.entered is None else self.end}",
                "choose a layer that has attention or a mixer",
            )
        return watcher.entered, watcher.output


class _Ends:
    """A watcher that starts a graph at one site and takes its end at another."""

    def __init__(self, start: Site, end: Site) -> None:
        self._start, self._end = start, end
        self.entered: Tensor | None = None
        self.output: Ragged | None = None

    def wants(self, site: Site) -> bool:
        return site in (self._start, self._end)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged), "no pattern is requested"
        if site == self._end:
            self.output = value
            return None
        self.entered = value.values.detach().requires_grad_()
        return value.with_values(self.entered)
