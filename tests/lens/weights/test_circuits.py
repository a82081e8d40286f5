"""Weights alone: planted heads score as planted, and factors as the whole matrices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.weights.circuits import (
    FactoredMatrix,
    TokenVectors,
    circuits,
    copying_score,
    eigenvalue_score,
    score_circuits,
    score_copying,
)
from manyheads.lens.weights.composition import composition_scores, weight_similarity
from manyheads.models.build import build
from manyheads.models.readout import LanguageHead
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, NoNorm, OutputNorm, PreNorm, RMSNorm, SandwichNorm
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    SEQ2SEQS,
    VISIONS,
    VOCABULARY,
    WIDTH,
    decoder,
    layer,
    own,
    small,
)

PLAIN_LAYER = layer(own(mask=Causal()), None, norm=PreNorm(NoNorm()))


def plant(config: Any, heads: dict[Head, tuple[Tensor, Tensor]]) -> Any:
    """A model whose named heads read by the first matrix (d c) and write by the second (c d)."""
    model = build(config, seed=0)
    with torch.no_grad():
        for head, (reads, writes) in heads.items():
            attention = model.stack.layers[head.layer].attention
            rows = slice(8 * head.head, 8 * head.head + 8)
            attention.projections()["value"][rows] = reads
            attention.output.weight[:, rows] = writes
    return model


def orthonormal(model: Any) -> None:
    """Words on axes of their own, entering and leaving alike."""
    with torch.no_grad():
        model.embedding.tokens.weight.copy_(torch.eye(VOCABULARY, WIDTH))


def plain(layers: int = 2) -> Any:
    config = decoder(*[PLAIN_LAYER] * layers)
    return replace(config, stack=replace(config.stack, final_norm=NoNorm()))


def spread(seed: int, rows: int = 8) -> Tensor:
    """Rows of length one at right angles."""
    drawn = torch.randn(WIDTH, rows, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q.T


def test_a_planted_copying_head_copies_and_its_opposite_does_not() -> None:
    subspace = spread(0)
    dead = torch.zeros(8, WIDTH), torch.zeros(WIDTH, 8)
    heads = {
        Head(0, 0): (subspace, subspace.T),
        Head(0, 1): (subspace, -subspace.T),
        Head(0, 2): dead,
    }
    model = plant(plain(1), heads)
    orthonormal(model)
    result = score_circuits(model, top_k=1, sample=None, progress=False)
    for name in ("copying_eigenvalues", "ov_eigenvalues"):
        values = [result[name].of(Head(0, head)) for head in range(3)]
        assert values == pytest.approx([1.0, -1.0, 0.0])
    ranks = [result["ov_rank"].of(Head(0, head)) for head in range(3)]
    assert ranks == [8, 8, 0]
    assert result["ov_stable_rank"].of(Head(0, 0)) == pytest.approx(8)
    assert result["ov_stable_rank"].of(Head(0, 2)) == 0
    assert result["copying"].of(Head(0, 2)) == 0
    assert result["copying"].of(Head(0, 1)) == 0
    # A head of size 8 cannot tell 29 words apart, but raises most of them itself.
    assert result["copying"].of(Head(0, 0)) > 0.5


def test_a_head_as_wide_as_the_words_copies_every_one() -> None:
    ov = FactoredMatrix(torch.eye(WIDTH).double(), torch.eye(WIDTH).double())
    words = TokenVectors(torch.eye(VOCABULARY, WIDTH), torch.eye(VOCABULARY, WIDTH))
    assert copying_score(ov, words, range(VOCABULARY), top_k=1) == 1.0
    shifted = TokenVectors(words.embed, words.unembed.roll(1, 0))
    assert copying_score(ov, shifted, range(VOCABULARY), top_k=1) == 0.0


@pytest.mark.parametrize("top", [1, 5, 40])
@pytest.mark.parametrize(("first", "most"), [(3, 7), (64, 64), (256, 2048)])
def test_copying_is_the_same_however_many_words_are_met_at_once(
    top: int, first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyheads.lens.weights.circuits.FIRST_TOKENS", first)
    monkeypatch.setattr("manyheads.lens.weights.circuits.TOKENS_AT_ONCE", most)
    draw = torch.Generator().manual_seed(top)
    table = torch.randn(301, WIDTH, generator=draw)
    both = torch.randn(WIDTH, 8, generator=draw).double(), torch.randn(8, WIDTH, generator=draw)
    drawn = torch.randperm(301, generator=draw)[:90]
    for right in (both[0].T, both[1].double()):
        ov = FactoredMatrix(both[0], right)
        whole = table.double()[drawn] @ ov.matrix.T @ table.double().T
        own = whole.gather(1, drawn[:, None])
        expected = ((whole > own).sum(1) < top).double().mean()
        assert copying_score(ov, TokenVectors(table, table), drawn, top) == pytest.approx(
            float(expected)
        )


def test_words_that_are_level_copy_none() -> None:
    table = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)).expand(50, WIDTH)
    both = torch.eye(WIDTH).double()
    assert (
        copying_score(FactoredMatrix(both, both), TokenVectors(table, table), range(50), top_k=5)
        == 0.0
    )
    assert (
        copying_score(FactoredMatrix(both, both), TokenVectors(table, table), range(50), top_k=50)
        == 1.0
    )


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gates", "one key head", "sinks", "normed heads"]
)
def test_scores_are_those_of_the_whole_matrices(name: str) -> None:
    model = small(DECODERS[name])
    result = score_circuits(model, top_k=3, sample=None, progress=False)
    words = TokenVectors.of(model)
    enter, leave = words.embed.double(), words.unembed.double()
    for head in (Head(0, 1), Head(1, 3)):
        ov = circuits(model).ov(head).matrix
        whole = leave @ ov @ enter.T
        score = eigenvalue_score(torch.linalg.eigvals(whole))
        assert result["copying_eigenvalues"].of(head) == pytest.approx(score, abs=1e-4)
        assert result["ov_rank"].of(head) == torch.linalg.matrix_rank(ov.float())
        sizes = torch.linalg.svdvals(ov)
        stable = float(sizes.square().sum() / sizes[0].square())
        assert result["ov_stable_rank"].of(head) == pytest.approx(stable)
        own_first = (whole > whole.diag()[None]).sum(0) < 3
        assert result["copying"].of(head) == pytest.approx(float(own_first.double().mean()))
        qk = circuits(model).qk(head).matrix
        matching = eigenvalue_score(torch.linalg.eigvals(enter @ qk @ enter.T))
        assert result["matching_eigenvalues"].of(head) == pytest.approx(matching, abs=1e-4)


def test_a_norm_of_head_outputs_is_folded_into_what_a_head_writes() -> None:
    model = build(DECODERS["control gates"], seed=0)
    attention = model.stack.layers[0].attention
    torch.nn.init.normal_(attention.output_norm.weight)
    size = attention.config.size
    columns = attention.output.weight[:, size : 2 * size] * attention.output_norm.weight
    torch.testing.assert_close(circuits(model).writes(Head(0, 1)), columns.double())


@pytest.mark.parametrize("name", ["gpt2", "one key head", "llama"])
def test_circuits_are_what_the_layer_computes(name: str) -> None:
    """The value and the score of a token, biases aside, from the residual stream itself."""
    model = small(DECODERS[name])
    module = model.stack.layers[1]
    config = module.attention.config
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)).double()
    norm = module.attention_residual.norm
    scale = (x - x.mean()).square().mean().add(norm.config.eps).sqrt()
    normed = (x - x.mean()) / scale * norm.weight.detach().double()
    parts = {k: (v.detach().double() @ normed) for k, v in module.attention.projections().items()}
    for head in range(config.heads):
        group = head // (config.heads // config.key_heads)
        value = parts["value"].view(-1, 8)[group]
        written = module.attention.output.weight.detach().double()[:, 8 * head : 8 * head + 8]
        result = circuits(model).ov(Head(1, head)).matrix @ x / scale
        torch.testing.assert_close(result, written @ value)
        score = parts["query"].view(-1, 8)[head] @ parts["key"].view(-1, 8)[group]
        scored = x @ circuits(model).qk(Head(1, head)).matrix @ x / scale**2
        torch.testing.assert_close(scored, score)


@pytest.mark.parametrize("norm", [OutputNorm(RMSNorm()), SandwichNorm(LayerNorm(bias=False))])
def test_heads_write_through_a_norm_behind_the_attention(norm: Any) -> None:
    """Up to the divisor of the norm, what the heads write is what the sublayer adds."""
    model = build(decoder(layer(own(mask=Causal()), norm=norm)), seed=0)
    residual = model.stack.layers[0].attention_residual
    sites = (Site(0, Tap.HEAD_OUTPUT), Site(0, Tap.OUTPUT))
    record = Record(sites)
    with torch.no_grad():
        residual.second_norm.weight.normal_()
        model(torch.tensor([[3, 1, 4]]), watch=record)
    heads, added = (record[site].of(0).double() for site in sites)
    every = circuits(model)
    written = sum(heads[:, h] @ every.writes(Head(0, h)).T for h in range(heads.shape[1]))
    cosine = torch.nn.functional.cosine_similarity(written, added, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), atol=1e-6, rtol=0)


def test_a_sample_of_words_is_drawn_once_for_all_heads() -> None:
    model = small(DECODERS["llama"])
    one, two = (score_circuits(model, sample=10, seed=1, progress=False) for _ in range(2))
    np.testing.assert_array_equal(one["copying"].means, two["copying"].means)
    assert one.metadata["tokens"] == 10
    tenths = one["copying"].means * 10
    np.testing.assert_allclose(tenths, tenths.round(), atol=1e-9)


def test_copying_alone_is_that_of_all_scores() -> None:
    model = small(DECODERS["llama"])
    every, alone = (score(model, progress=False) for score in (score_circuits, score_copying))
    assert set(alone.names) == {"copying", "copying_eigenvalues"}
    assert alone.metadata == every.metadata
    for name in alone.names:
        np.testing.assert_array_equal(alone[name].means, every[name].means)


def test_models_without_words_have_the_rest() -> None:
    result = score_circuits(small(VISIONS["vit"]), progress=False)
    assert "copying" not in result
    assert "ov_rank" in result
    tags = score_circuits(small(ENCODERS["tags"]), progress=False)
    assert "copying" not in tags
    cross = score_circuits(small(SEQ2SEQS["window"]), sublayer=Sublayer.CROSS, progress=False)
    assert str(cross.addresses[0]) == "decoder L0H0 cross"
    with refuses(
        InputError,
        "Vision",
        "language head",
    ):
        TokenVectors.of(small(VISIONS["vit"]))


def test_an_untied_readout_scores_with_its_own_vectors() -> None:
    model = build(replace(DECODERS["llama"], readout=LanguageHead(tied=False)), seed=0)
    assert not torch.allclose(TokenVectors.of(model).unembed, TokenVectors.of(model).embed)


@pytest.mark.parametrize("name", ["gpt2", "llama", "uneven", "windows and whole"])
@pytest.mark.parametrize("through", ["query", "key", "value"])
def test_composition_is_the_ratio_of_whole_matrices(name: str, through: Any) -> None:
    model = small(DECODERS[name])
    result, every = composition_scores(model, through), circuits(model)
    for early in every.scope.heads:
        for late in every.scope.heads:
            value = result.of(early, late)
            if late.layer <= early.layer:
                assert np.isnan(value)
                continue
            ov = every.ov(early).matrix
            reads = every.ov(late).matrix if through == "value" else every.qk(late).matrix
            reads = reads.T if through == "query" else reads
            expected = (reads @ ov).norm() / (reads.norm() * ov.norm())
            assert value == pytest.approx(float(expected), rel=1e-6)


def test_a_head_that_reads_what_another_writes_composes_with_it_alone() -> None:
    one, other = spread(1, 16).split(8)
    heads = {
        Head(0, 0): (one, one.T),
        Head(0, 1): (other, other.T),
        Head(1, 0): (one, one.T),
    }
    result = composition_scores(plant(plain(), heads), "value")
    assert result.of(Head(0, 0), Head(1, 0)) == pytest.approx(8**-0.5)
    assert result.of(Head(0, 1), Head(1, 0)) == pytest.approx(0, abs=1e-6)
    assert result.ranked(1)[0][:2] == (result.addresses[0], result.addresses[4])


def test_a_planted_pair_of_doubles_is_the_most_alike() -> None:
    one, other = spread(1, 16).split(8)
    turned = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3))).Q
    heads = {
        Head(0, 0): (one, one.T),
        # The same circuit from other factors: only products of weights mean anything.
        Head(1, 2): (turned @ one, one.T @ turned.T),
        Head(0, 3): (other, other.T),
        Head(0, 1): (one, -one.T),
    }
    model = plant(plain(), heads)
    for trait in ("writes", "value", "ov"):
        result = weight_similarity(model, trait)
        assert result.of(Head(0, 0), Head(1, 2)) == pytest.approx(1.0, abs=1e-6)
        assert result.of(Head(0, 0), Head(0, 3)) == pytest.approx(0.0, abs=1e-6)
        assert result.of(Head(1, 1), Head(1, 1)) == pytest.approx(1.0, abs=1e-6)
        np.testing.assert_allclose(result.values, result.values.T, atol=1e-9)
    assert weight_similarity(model, "writes").of(Head(0, 0), Head(0, 1)) == pytest.approx(1.0)
    assert weight_similarity(model, "ov").of(Head(0, 0), Head(0, 1)) == pytest.approx(-1.0)


def test_circuit_cosines_are_those_of_whole_matrices() -> None:
    model = small(DECODERS["uneven"])
    result, every = weight_similarity(model, "qk"), circuits(model)
    one, other = every.qk(Head(0, 3)).matrix, every.qk(Head(2, 1)).matrix
    expected = float((one * other).sum() / (one.norm() * other.norm()))
    assert result.of(Head(0, 3), Head(2, 1)) == pytest.approx(expected, abs=1e-9)


def test_pairs_are_saved_and_opened_again(tmp_path: Any) -> None:
    result = composition_scores(small(DECODERS["llama"]), "key")
    result.save(tmp_path / "pairs.json")
    again = lens.load(tmp_path / "pairs.json")
    np.testing.assert_allclose(again.values, result.values)
    assert again.blocks == result.blocks
    assert len(result.rows()) == 16
    assert str(result).startswith("key composition (by weights alone) of 8 heads")
    with refuses(InputError, "there is no head L9H0: use L0H0 to L1H3."):
        result.of(Head(9, 0), Head(0, 0))
