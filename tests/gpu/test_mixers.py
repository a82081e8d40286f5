"""Every mixer on CUDA: what it gives on the CPU, step by step too, and gradients."""

import sys
from pathlib import Path

import pytest
import torch

from manyheads import Ragged
from manyheads.mixers.recurrent.lstm import Lstm, LstmLayer

# By its folder, as ours here: a `tests` of the machine's own packages would hide it.
sys.path.insert(0, str(Path(__file__).parents[1] / "mixers"))

import mixer_configs  # type: ignore[import-not-found]

CAUSAL, BOTH_WAYS = mixer_configs.CAUSAL, mixer_configs.BOTH_WAYS
LENGTHS = (150, 1, 70)


def texts(*lengths: int) -> Ragged:
    draw = torch.Generator().manual_seed(1)
    return Ragged.from_list(
        [
            torch.randint(0, mixer_configs.VOCABULARY, (length,), generator=draw)
            for length in lengths
        ]
    )


@pytest.mark.parametrize(
    "config",
    [*CAUSAL.values(), *BOTH_WAYS.values()],
    ids=[*CAUSAL, *(f"{each}2" for each in BOTH_WAYS)],
)
def test_outputs_and_gradients_are_those_of_the_cpu(config: object, device: str) -> None:
    model, batch = mixer_configs.small_model(config, config), texts(*LENGTHS)
    result = []
    for place in ("cpu", device):
        model.to(place).zero_grad(set_to_none=True)
        logits = model(batch.to(place)).logits.values
        logits.square().mean().backward()
        # Copies: moving a model moves its gradients in place.
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        gradients = [each.cpu().clone() for each in grads]
        result.append((logits.detach().cpu(), gradients))
    torch.testing.assert_close(result[1][0], result[0][0], atol=1e-4, rtol=1e-3)
    for one, other in zip(result[1][1], result[0][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_a_cache_continues_the_text(name: str, device: str) -> None:
    model = mixer_configs.small_model(CAUSAL[name], CAUSAL[name]).to(device)
    ids = texts(80, 80).to_padded().to(device)
    expected, cache = model(ids).logits, model.new_cache()
    parts = [model(part, cache=cache).logits for part in ids.split((70, 9, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("config", CAUSAL.values(), ids=list(CAUSAL))
def test_half_precision_stays_close(config: object, device: str) -> None:
    model, batch = mixer_configs.small_model(config).to(device), texts(*LENGTHS).to(device)
    with torch.no_grad():
        wide = model(batch).logits.values
        half = model.to(torch.bfloat16)(batch).logits.values
    torch.testing.assert_close(half.float(), wide, atol=0.05, rtol=0.1)


def test_a_training_step_of_an_lstm_can_be_recorded(device: str) -> None:
    """As a CUDA graph, also under autocast, without a warning that cuDNN copies its weights."""
    if device == "cpu":
        pytest.skip("only CUDA has graphs")
    layer = LstmLayer(Lstm(width=16, inner=24)).to(device)
    batch = Ragged.from_list([torch.randn(9, 16) for _ in range(4)]).to(device)

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = layer(batch).values.square().sum()
        return torch.autograd.grad(loss, list(layer.parameters()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [gradients() for _ in range(3)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            recorded = gradients()
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(recorded, expected)
