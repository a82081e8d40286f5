"""The kernels of Mamba's scan: outputs, states and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_scan_kernels.py --on cpu`.
"""

import pytest
import torch
from torch import Tensor

from manyheads.mixers.recurrent.mamba import scan_channels
from manyheads.ragged import Lengths

LENGTHS = (150, 0, 1, 64, 67)
CHANNELS = 40


def inputs(lengths: Lengths, states: int, channels: int = CHANNELS) -> dict[str, Tensor]:
    """Inputs of a scan, with paces and rates as in a new layer and beyond."""
    draw, device = torch.Generator().manual_seed(3), lengths.offsets.device

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device)

    # As parts of a wider projection: tokens are further apart than their channels.
    x, joined = normal(lengths.total, 2 * channels), normal(lengths.total, 2 * states)
    return {
        "x": x[:, :channels],
        "dt": normal(lengths.total, channels).exp() / 10,
        "rate": -normal(channels, states).exp(),
        "b": joined[:, :states],
        "c": joined[:, states:],
        "state": normal(lengths.count, channels, states),
    }


def scan(
    arguments: dict[str, Tensor], lengths: Lengths, pulls: tuple[Tensor, Tensor], *, by_triton: bool
) -> dict[str, Tensor]:
    """The outputs, the last states and the gradients of all inputs, by name."""
    learned = {name: each.detach().requires_grad_() for name, each in arguments.items()}
    x, dt, rate, b, c = (learned[name] for name in ("x", "dt", "rate", "b", "c"))
    state = learned.get("state")
    result = scan_channels(x, dt, rate, b, c, lengths, state, by_triton=by_triton)
    gradients = torch.autograd.grad(result, list(learned.values()), pulls)
    return dict(zip(("output", "last", *learned), (*result, *gradients), strict=True))


def pulls_of(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = arguments["dt"].shape, arguments["state"].shape
    output, last = (torch.randn(shape, generator=draw).to(arguments["dt"]) for shape in shapes)
    return output, last


@pytest.mark.parametrize("states", [16, 5])
@pytest.mark.parametrize("continued", [False, True])
def test_outputs_states_and_gradients(states: int, continued: bool, device: str) -> None:
    lengths = Lengths.of(LENGTHS, device)
    arguments = inputs(lengths, states)
    pulls = pulls_of(arguments)
    if not continued:
        del arguments["state"]
    ours, plain = (scan(arguments, lengths, pulls, by_triton=each) for each in (True, False))
    for name, other in plain.items():
        assert (ours[name] - other).norm() < 1e-5 * other.norm(), name


@pytest.mark.parametrize(("states", "channels"), [(16, 130), (64, 33), (1, 1)])
def test_any_number_of_channels_and_states(states: int, channels: int, device: str) -> None:
    lengths = Lengths.of((35, 9), device)
    arguments = inputs(lengths, states, channels)
    pulls = pulls_of(arguments)
    ours, plain = (scan(arguments, lengths, pulls, by_triton=each) for each in (True, False))
    for name, other in plain.items():
        assert (ours[name] - other).norm() < 1e-5 * other.norm(), name


def test_results_are_reproducible(device: str) -> None:
    lengths = Lengths.of((35, 9), device)
    arguments = inputs(lengths, 16)
    one, other = (scan(arguments, lengths, pulls_of(arguments), by_triton=True) for _ in range(2))
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_not_a_number_in_one_sequence_touches_no_other(device: str) -> None:
    lengths = Lengths.of((35, 0, 40, 9), device)
    arguments = inputs(lengths, 16)
    healthy = scan(arguments, lengths, pulls_of(arguments), by_triton=True)
    bad = {name: each.clone() for name, each in arguments.items()}
    bad["x"][35:75] = torch.nan
    result = scan(bad, lengths, pulls_of(arguments), by_triton=True)
    tokens = torch.ones(lengths.total, dtype=torch.bool, device=device)
    tokens[35:75] = False
    others = torch.tensor([0, 1, 3], device=device)
    for name in ("output", "x", "dt", "b", "c"):
        assert torch.equal(result[name][tokens], healthy[name][tokens]), name
    for name in ("last", "state"):
        assert torch.equal(result[name][others], healthy[name][others]), name
    assert result["output"][35:75].isnan().all()


def test_fast_decay_does_not_overflow(device: str) -> None:
    lengths = Lengths.of((40, 9), device)
    arguments = inputs(lengths, 16)
    arguments["dt"] = 1000 * arguments["dt"]
    result = scan(arguments, lengths, pulls_of(arguments), by_triton=True)
    for name, each in result.items():
        assert each.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, device: str) -> None:
    lengths = Lengths.of((35, 9), device)
    arguments = inputs(lengths, 16)
    for name in ("x", "b", "c"):
        arguments[name] = arguments[name].to(dtype)
    pulls = pulls_of(arguments)
    ours, plain = (scan(arguments, lengths, pulls, by_triton=each) for each in (True, False))
    for name, other in plain.items():
        assert ours[name].dtype == other.dtype, name
        error = 1e-2 if name in ("x", "b", "c") else 1e-5
        assert (ours[name] - other).float().norm() < error * other.float().norm(), name
