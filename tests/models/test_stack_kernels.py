"""What is said about kernels is what runs."""

from typing import Any

import pytest
import torch

from manyheads.kernels.choose import KERNELS
from manyheads.models.build import build
from manyheads.parts.masks import Causal, GlobalTokens, Window
from manyheads.parts.positions import Alibi, T5Buckets
from tests.models.zoo import (
    ENCODERS,
    SEQ2SEQS,
    decoder,
    encoder,
    ids,
    images,
    layer,
    own,
    small,
    vision,
)


def record_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels as they really run."""
    ran: list[str] = []
    for name, kernel in KERNELS.items():

        def spy(*arguments: Any, name: str = name, attend: Any = kernel.attend) -> Any:
            ran.append(name)
            return attend(*arguments)

        monkeypatch.setattr(kernel, "attend", spy)
    return ran


MIXED_KERNELS = {
    "windows and whole": encoder(
        layer(own(mask=Window(2, 2))),
        layer(),
        layer(None),
        layer(own(mask=Window(2, 2) | GlobalTokens((0,)))),
        layer(own(position=Alibi(), mask=Window(3, 1), dropout=0.1)),
        layer(own(position=T5Buckets(buckets=8, reach=9))),
        layer(own(sink="learned")),
    ),
    "causal": decoder(layer(own(mask=Causal(), dropout=0.5)), layer(own(mask=Window(30)))),
}


@pytest.mark.parametrize("lengths", [(40, 3, 0, 17), (3, 2), (40, 40), (0,)], ids=str)
@pytest.mark.parametrize("mode", ["eval", "train", "no_grad"])
@pytest.mark.parametrize("name", MIXED_KERNELS)
def test_explained_kernels_are_those_that_run(
    name: str, mode: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(MIXED_KERNELS[name], seed=0).train(mode == "train")
    batch = ids(lengths)
    with torch.set_grad_enabled(mode != "no_grad"):
        explained = model.explain_kernels(batch)
        ran = record_kernels(monkeypatch)
        model(batch)
    assert [choice.kernel for _, choice in explained.choices] == ran
    with_attention = [
        index
        for index, config in enumerate(model.config.stack.layers)
        if config.attention is not None
    ]
    assert [name for name, _ in explained.choices] == [f"main layer {at}" for at in with_attention]


def test_a_mixed_batch_meets_all_kernels_of_the_cpu() -> None:
    model = build(MIXED_KERNELS["windows and whole"], seed=0).train()
    kernels = {choice.kernel for _, choice in model.explain_kernels(ids((140, 3))).choices}
    assert kernels == {"banded", "fused", "batched"}


def test_explaining_gives_reasons_in_words() -> None:
    text = str(small(MIXED_KERNELS["windows and whole"]).explain_kernels(ids((140, 3))))
    lines = text.splitlines()
    assert lines[0] == "main layer 0: banded"
    assert lines[1].startswith("main layer 1: fused (not banded: the mask is not limited")
    assert "carries no gradient" in lines[-1]


def test_explaining_takes_padded_batches() -> None:
    model, mask = small(ENCODERS["modernbert"]), torch.tensor([[1] * 30, [0] * 25 + [1] * 5])
    padded = model.explain_kernels(torch.zeros(2, 30, dtype=torch.long), mask)
    assert str(padded) == str(model.explain_kernels(ids((30, 5))))


def test_explaining_a_translator_names_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(SEQ2SEQS["window"])
    explained = model.explain_kernels(ids((30, 5)), ids((9, 20)))
    assert [name for name, _ in explained.choices] == [
        "encoder layer 0",
        "encoder layer 1",
        "decoder layer 0",
        "decoder layer 0 cross",
        "decoder layer 1",
        "decoder layer 1 cross",
    ]
    ran = record_kernels(monkeypatch)
    model(ids((30, 5)), ids((9, 20)))
    assert [choice.kernel for _, choice in explained.choices] == ran


def test_explaining_images_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(vision(layer(), layer(own(mask=Window(1, 1)))))
    explained = model.explain_kernels(images())
    ran = record_kernels(monkeypatch)
    model(images())
    assert [choice.kernel for _, choice in explained.choices] == ran


@pytest.mark.parametrize("kernel", ["reference", "fused", "banded", "batched"])
def test_a_kernel_requested_by_name_is_the_one_that_is_explained(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(encoder(layer(own(mask=Window(2, 2), kernel=kernel))))
    explained = model.explain_kernels(ids((40, 3)))
    ran = record_kernels(monkeypatch)
    model(ids((40, 3)))
    assert ran == [kernel]
    assert [choice.kernel for _, choice in explained.choices] == ran
