"""A model with attention in some layers and mixers in the others: the lens and surgery on it."""

import copy

import numpy as np
import pytest
import torch

from manyheads import AttentionConfig, lens, surgery
from manyheads.errors import InputError
from manyheads.mixers import performer
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import Causal, SwiGLU
from manyheads.taps import Head, Record, Site, Tap
from tests.mixers.mixer_configs import CAUSAL, VOCABULARY, WIDTH, small_model

TEXTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    feedforward = Branch(SwiGLU(width=WIDTH, hidden=20))
    attends = LayerConfig(
        attention=Branch(AttentionConfig(width=WIDTH, heads=2, mask=Causal())),
        feedforward=feedforward,
    )
    mixes = [
        LayerConfig(attention=None, mixer=Branch(CAUSAL[name]), feedforward=feedforward)
        for name in ("delta", "mamba2")
    ]
    config = DecoderConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH),
        stack=StackConfig(width=WIDTH, layers=(mixes[0], attends, mixes[1])),
        readout=LanguageHead(),
    )
    made = build(config, seed=0)
    assert isinstance(made, Decoder)
    return made.eval()


def test_statistics_are_those_of_attention_and_mixers(model: Decoder) -> None:
    record = Record([Site(layer, Tap.PATTERN) for layer in range(3)])
    with torch.no_grad():
        model(torch.tensor([TEXTS[0]]), watch=record)
    alone = lens.statistics(model, TEXTS[:1], progress=False)
    assert [str(block.addresses[-1]) for block in alone.blocks] == ["L0H3", "L1H1", "L2H3"]
    for address in alone.addresses:
        weights = record[Site(address.head.layer, Tap.PATTERN)].of(0)[address.head.head].abs()
        expected = (weights.diagonal() / weights.sum(1)).mean()
        assert alone["self"].of(address) == pytest.approx(float(expected), abs=1e-5)


def test_patterns_are_shares_of_absolute_weights(model: Decoder) -> None:
    result = lens.patterns(model, TEXTS[:1], [Head(2, 1)]).of(Head(2, 1)).weights
    torch.testing.assert_close(result.sum(1), torch.ones(8))
    assert result.triu(1).abs().max() == 0


def test_mixers_are_compared_with_attention(model: Decoder) -> None:
    result = lens.redundancy(model, TEXTS, progress=False)
    assert len(result.addresses) == 10
    assert not np.isnan(result.similarity["patterns"]).any()
    assert result.similarity["outputs"].diagonal() == pytest.approx(1.0, abs=1e-5)


def test_logits_are_the_sum_of_all_parts(model: Decoder) -> None:
    assert lens.attribute_logits(model, TEXTS, [5, 6]).completeness < 1e-4


def test_ablation_resumes_through_mixers(model: Decoder) -> None:
    result = lens.ablate(model, TEXTS, replace_with="zero", progress=False)
    pruned = surgery.prune(model, [Head(1, 0)])
    expected = lens.ablate(pruned, TEXTS, progress=False).baseline
    assert result["metric"].of(Head(1, 0)) == pytest.approx(expected, abs=1e-5)
    assert [str(old) for old in surgery.origins(pruned).values()][3:6] == ["L0H3", "L1H1", "L2H0"]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_head_of_a_mixer_is_ablated_in_its_output_projection(model: Decoder, layer: int) -> None:
    result = lens.ablate(model, TEXTS, replace_with="zero", progress=False)
    without = copy.deepcopy(model)
    mixer = without.stack.layers[layer].mixer
    with torch.no_grad():
        mixer.output.weight[:, 8:16] = 0
    expected = lens.ablate(without, TEXTS, [Head(1, 0)], progress=False).baseline
    assert result["metric"].of(Head(layer, 1)) == pytest.approx(expected, abs=1e-5)


def test_layers_and_neurons_are_pruned_around_mixers(model: Decoder) -> None:
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        fewer = surgery.prune_layers(model, [1])(ids).logits
        assert fewer.isfinite().all()
        smaller = surgery.prune_neurons(model, {0: [1, 2]})
    assert torch.equal(
        smaller.state_dict()["stack.layers.2.mixer.A_log"],
        model.state_dict()["stack.layers.2.mixer.A_log"],
    )


def test_rollout_takes_shares_and_needs_a_pattern_in_every_layer(model: Decoder) -> None:
    rolled, _ = lens.attention_rollout(model, TEXTS)
    torch.testing.assert_close(rolled.sum(1), torch.ones(8))
    with pytest.raises(InputError, match="Mamba, which has no pattern"):
        lens.attention_rollout(small_model(CAUSAL["delta"], CAUSAL["mamba"]), TEXTS)


def test_unsupported_operations_on_mixers_are_refused_with_the_reason(model: Decoder) -> None:
    with pytest.raises(InputError, match="L0H1 is a head of a mixer, GatedDelta"):
        surgery.prune(model, ["L0H1"])
    headless = small_model(CAUSAL["mamba"])
    for measure in (lens.statistics, lens.ablate, lens.inspect):
        with pytest.raises(InputError, match=r"mixe?s? tokens by Mamba: .*influence"):
            measure(headless, TEXTS, progress=False)


def test_mixers_are_adapted_whole(model: Decoder) -> None:
    adapted, ids = copy.deepcopy(model), torch.tensor([TEXTS[0]])
    surgery.adapt(adapted, surgery.LoraConfig(targets=("*.mixer.project", "*.mixer.output")))
    adapted(ids).logits.square().mean().backward()
    trained = [each for each in adapted.parameters() if each.requires_grad]
    assert len(trained) == 8
    with torch.no_grad():
        for each in trained:
            each.add_(0.1)
        expected = adapted(ids).logits
        surgery.merge(adapted)
    torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_heads_without_a_pattern_are_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Performer heads that hide their own; the kinds of the others are decided as ever."""
    monkeypatch.setattr(performer.PerformerLayer, "has_pattern", False)
    model = small_model(CAUSAL["performer"], CAUSAL["linear"])
    result = lens.inspect(model, TEXTS, sequences=4, progress=False)
    distance = result.statistics["distance"]
    assert np.isnan(distance.means[:2]).all()
    assert not np.isnan(distance.means[2:]).any()
    assert not np.isnan(result.statistics["output_share"].means).any()
    assert len(result.rows()) == 4


@torch.no_grad()
def test_a_state_of_another_shape_or_mixer_is_refused(model: Decoder) -> None:
    ids, cache = torch.tensor([TEXTS[0]]), model.new_cache()
    model(ids, cache=cache)
    cache.states[2].tensors = tuple(each[:, :2] for each in cache.states[2].tensors)
    with pytest.raises(InputError, match=r"\(2, 6, 8\).*\(4, 6, 8\)"):
        model(ids, cache=cache)
    one, other = small_model(CAUSAL["delta"]), small_model(CAUSAL["mamba2"])
    cache = one.new_cache()
    one(ids, cache=cache)
    with pytest.raises(InputError, match=r"GatedDelta.*this layer is Mamba2"):
        other(ids, cache=cache)
    with pytest.raises(InputError, match="new_cache"):
        model(ids, cache=cache)
