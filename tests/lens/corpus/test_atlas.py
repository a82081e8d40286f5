"""An atlas of any model: each head has measures, distances, tokens and examples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.lens.corpus.atlas import Atlas, place_heads
from manyheads.models.build import build

SIZES = {"layers": 2, "width": 32, "heads": 2}
TEXTS = [[5, 6, 7, 5, 6, 9, 11, 7], [8, 9, 10], [12, 5, 6, 7, 5, 6, 30, 31, 32, 8, 9, 10]]


def make(model: Any, texts: Any, **options: Any) -> Atlas:
    return lens.atlas(model, texts, kinds=False, progress=False, **options)


def of_transformers() -> Atlas:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=60, bos_token_id=0, eos_token_id=0
    )
    return make(GPT2LMHeadModel(config).eval(), TEXTS)


CASES: dict[str, Callable[[], Atlas]] = {
    "decoder": lambda: make(build("gpt2", **SIZES, vocabulary=60, seed=0), TEXTS),
    "encoder": lambda: make(build("bert-base", **SIZES, vocabulary=60, seed=0), TEXTS, by="none"),
    "encoder-decoder": lambda: make(
        build("transformer-base", **SIZES, vocabulary=60, seed=0),
        [(text, text[::-1]) for text in TEXTS],
    ),
    "images": lambda: make(
        build("vit-b16", **SIZES, seed=0), [torch.rand(3, 32, 32) for _ in range(2)]
    ),
    "transformers": of_transformers,
}


@pytest.mark.parametrize("case", CASES)
def test_every_head_has_an_entry(case: str) -> None:
    atlas = CASES[case]()
    assert set(atlas.entries) == set(atlas.addresses)
    assert len(atlas.positions) == len(atlas.addresses)
    for address, entry in atlas.entries.items():
        cross = str(address).endswith("cross")
        assert np.isclose((entry.earlier + entry.later).sum(), 0 if cross else 1, atol=1e-4)
        assert entry.examples
        assert all(example.query > 0 for example in entry.sharpest if example.activation > 0)
        stored = {example.text for example in entry.examples}
        assert stored <= set(atlas.passages)
    assert len(atlas.rows()) == len(atlas.addresses)
    assert "<td" in atlas._repr_html_()


def test_heads_are_as_important_as_gradients_say() -> None:
    model = build("gpt2", **SIZES, vocabulary=60, seed=0)
    atlas = make(model, TEXTS)
    importance = atlas.inspection.importance
    assert importance is not None
    expected = lens.importance(model, TEXTS, progress=False)["predicted"].means
    assert np.allclose(importance.change, expected, atol=1e-6)


def test_heads_of_an_encoder_decoder_are_ranked_too() -> None:
    importance = CASES["encoder-decoder"]().inspection.importance
    assert importance is not None
    assert np.isfinite(importance.change).all()


def test_words_of_examples_are_those_of_the_corpus() -> None:
    atlas = CASES["decoder"]()
    example = atlas.of("L1H1").sharpest[0]
    assert atlas.words(example.text) == list(map(str, TEXTS[example.text]))
    assert "3 passages" in str(atlas)


def test_only_what_examples_and_lists_of_tokens_show_is_stored() -> None:
    model = build("gpt2", **SIZES, vocabulary=999, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            # Sharp heads, so that the passages differ more than tenths of them do.
            weight.mul_(8 if weight.dim() > 1 else 1)
    draw = np.random.default_rng(0)
    texts = draw.integers(0, 999, (60, 12)).tolist()
    atlas = make(model, texts, by="none", sharpest=1, per_decile=1)
    entries = atlas.entries.values()
    assert set(atlas.passages) == {example.text for entry in entries for example in entry.examples}
    used = {token for stacks in atlas.passages.values() for token in stacks["main"].tolist()}
    used |= {lift.token for entry in entries for lift in (*entry.looks_at, *entry.looks_from)}
    assert set(atlas.tokens) == used


def test_heads_alike_are_near_each_other_on_the_map() -> None:
    model = build("gpt2", **SIZES, vocabulary=60, seed=0)
    measured = lens.statistics(model, TEXTS, progress=False)
    places = place_heads(measured)
    assert places.shape == (4, 2)
    # The first direction is the one along which heads differ most.
    assert places[:, 0].std() >= places[:, 1].std()
    assert np.allclose(places.mean(0), 0, atol=1e-6)


def test_kinds_are_those_of_the_corpus() -> None:
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    atlas = lens.atlas(model, TEXTS, by="none", progress=False)
    assert atlas.inspection.kinds is not None
    assert atlas.inspection.kinds.metadata["texts"] == 3


def test_a_model_without_a_mask_token_has_an_atlas_all_the_same() -> None:
    atlas = make(build("bert-base", **SIZES, vocabulary=60, seed=0), TEXTS)
    assert atlas.inspection.importance is None
    assert atlas.inspection.metadata["unknown_importance"]
