"""What the fused kernel asks of PyTorch: one call a length, nothing written out without need."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.kernels import fused, reference
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Causal, Full, Mask, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.ragged import Lengths


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every call of the flash kernel."""
    seen: list[tuple[Any, ...]] = []
    flash = fused.flash_cpu

    def spy(*arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append(arguments)
        return flash(*arguments)

    monkeypatch.setattr(fused, "flash_cpu", spy)
    return seen


def attend(mask: Mask, queries: Lengths, keys: Lengths, **more: Any) -> Tensor:
    q, k = torch.randn(queries.total, 4, 8), torch.randn(keys.total, 2, 8)
    request = Request(queries=queries, keys=keys, mask=mask, scale=0.5, **more)
    return fused.attend(q, k, k, request).output


def test_sequences_of_one_length_share_a_call(calls: list[tuple[Any, ...]]) -> None:
    lengths = Lengths.of([3, 7, 0, 3, 7, 3])
    attend(Causal(), lengths, lengths)
    assert sorted(tuple(q.shape) for q, *_ in calls) == [(2, 4, 7, 8), (3, 4, 3, 8)]


def test_keys_are_never_repeated_for_heads_that_share_them(calls: list[tuple[Any, ...]]) -> None:
    lengths = Lengths.of([5, 5])
    attend(Window(2), lengths, lengths)
    assert [(k.shape[1], v.shape[1]) for _, k, v, *_ in calls] == [(2, 2)]


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "causal"),
    [
        (Full(), 5, 5, False),
        (Full(), 7, 5, False),
        (Causal(), 5, 5, True),
        (Causal(), 1, 5, False),
        (Window(4, 4), 5, 5, False),
        (Window(4), 5, 5, True),
        (Window(6) & Causal(), 5, 5, True),
    ],
)
def test_a_mask_that_is_full_or_causal_is_not_written_out(
    mask: Mask, queries: int, keys: int, causal: bool, calls: list[tuple[Any, ...]]
) -> None:
    attend(mask, Lengths.of([queries]), Lengths.of([keys]))
    ((*_, is_causal, added, _),) = calls
    assert (is_causal, added) == (causal, None)


@pytest.mark.parametrize(
    ("mask", "queries"), [(Window(3), 5), (Window(4, 3), 5), (Causal(), 2), (Window(3), 1)]
)
def test_any_other_mask_is_written_out(
    mask: Mask, queries: int, calls: list[tuple[Any, ...]]
) -> None:
    attend(mask, Lengths.of([queries]), Lengths.of([5]))
    ((*_, is_causal, added, _),) = calls
    assert not is_causal
    assert added.shape == (1, 1, queries, 5)


def test_a_written_out_bias_comes_in_chunks(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "LARGEST_CHUNK", 4 * 2 * 10 * 3)
    lengths = Lengths.of([10, 10])
    attend(Full(), lengths, lengths, bias=Alibi().bias(4, torch.device("cpu")))
    assert [tuple(added.shape) for *_, added, _ in calls] == [(2, 4, 3, 10)] * 3 + [(2, 4, 1, 10)]


def test_a_sink_takes_its_share_of_the_mass() -> None:
    scores, values = torch.randn(3, 2, 5), torch.randn(5, 2, 4)
    sink = torch.randn(2)
    output = torch.einsum("nhs,she->nhe", scores.softmax(-1), values)
    scaled, lse = fused.scale_by_sink(output, scores.logsumexp(-1), sink)
    joined = torch.cat((scores, sink.expand(3, 2).unsqueeze(-1)), -1)
    expected = torch.einsum("nhs,she->nhe", joined.softmax(-1)[..., :-1], values)
    torch.testing.assert_close(scaled, expected)
    torch.testing.assert_close(lse, joined.logsumexp(-1))


def test_a_sink_alone_leaves_a_blind_row_at_zero() -> None:
    output, lse = fused.scale_by_sink(
        torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf), torch.tensor([0.5, -1.0])
    )
    assert not output.any()
    assert torch.equal(lse, torch.tensor([[0.5, -1.0]]))


def test_what_cuda_cannot_do_is_refused_by_reason() -> None:
    facts = TensorFacts(
        device="cuda",
        dtype=torch.bfloat16,
        heads=4,
        kv_heads=2,
        size=8,
        value_size=8,
        grad=False,
    )
    lengths = Lengths.of([5, 3])
    request = Request(queries=lengths, keys=lengths, mask=Causal(), scale=1.0)
    bias = Alibi().bias(4, torch.device("cpu"))
    assert fused.cannot(request, facts) is None
    assert fused.cannot(replace(request, mask=Window(9)), facts) is None
    assert "only full and causal" in str(fused.cannot(replace(request, mask=Window(2)), facts))
    assert "no bias" in str(fused.cannot(replace(request, bias=bias), facts))
    dropping = replace(request, dropout=0.1)
    assert fused.cannot(dropping, facts) is None
    assert "log-sum-exp" in str(fused.cannot(replace(dropping, want=Want(lse=True)), facts))
