"""Models that do not dispatch are read through the weights that they return."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from manyheads import lens
from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.errors import InputError, WrappedModelWarning
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap
from tests.bridge.zoo import PAIR, SPECIAL, TEXT
from tests.messages import refuses

pytestmark = pytest.mark.filterwarnings("ignore::manyheads.errors.WrappedModelWarning")

XLNET = {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
LAYOUT = {
    **dict.fromkeys(("shape_size", "patch_size"), 4),
    **TEXT,
    "coordinate_size": 6,
    "input_size": 16,
    "max_2d_position_embeddings": 64,
}
SPEECH = {
    **{key: value for key, value in PAIR.items() if key != "d_model"},
    "hidden_size": 32,
    **dict.fromkeys(("conv_dim", "conv_stride"), (16, 16)),
    "conv_kernel": (16, 16),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("max_speech_positions", "max_text_positions"), 64),
}
LATENT = {
    "vocab_size": 60,
    "num_latents": 6,
    "d_model": 24,
    "max_position_embeddings": 64,
    **dict.fromkeys(("d_latents", "qk_channels", "v_channels"), 32),
    **dict.fromkeys(("num_self_attention_heads", "num_cross_attention_heads"), 4),
    "num_self_attends_per_block": 2,
}
BLOOM = {**SPECIAL, "vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}
GPTJ = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", XLNET),
    "layoutlmv3": ("LayoutLMv3ForTokenClassification", "LayoutLMv3Config", LAYOUT),
    "speecht5": ("SpeechT5ForSpeechToText", "SpeechT5Config", SPEECH),
    "perceiver": ("PerceiverForMaskedLM", "PerceiverConfig", LATENT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPTJ, "rotary_dim": 4}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", TEXT),
}
TEXTS = [[5, 6, 7, 8, 5, 6, 9, 3, 4], [11, 12, 11, 12, 13]]


@cache
def wrapped(name: str) -> WrappedModel:
    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    return wrap(model)


def inputs_of(name: str) -> tuple[list[dict[str, Tensor]], ModelInputs]:
    """Two texts of different lengths, each alone and together."""
    if name == "speecht5":
        sound = torch.randn(2, 1, 8000, generator=torch.Generator().manual_seed(1))
        ids = torch.tensor([[1, 7, 8, 7]])
        alone = [{"input_values": part, "decoder_input_ids": ids} for part in sound]
        return alone, ModelInputs(examples=tuple(alone))
    batch = Ragged.from_list([torch.tensor(text) for text in TEXTS])
    return [{"input_ids": torch.tensor([text])} for text in TEXTS], ModelInputs(ids=batch)


@pytest.mark.parametrize("name", MODELS)
def test_patterns_are_the_weights_that_the_model_returns(name: str) -> None:
    model = wrapped(name)
    sites = [
        Site(layer, Tap.PATTERN, Sublayer.CROSS if facts.cross else Sublayer.ATTENTION, stack.name)
        for stack in model.structure.stacks.values()
        for facts, layer in stack.attentions
    ]
    alone, together = inputs_of(name)
    record = Record(sites)
    with torch.no_grad():
        output = model.run_inputs(together, record)
    patterns = [record[site] for site in sites]
    for index, arguments in enumerate(alone):
        with torch.no_grad():
            plain = model.inner(**arguments, output_attentions=True)
        names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        weights = [layer[0] for key in names for layer in plain.get(key) or ()]
        assert len(weights) == len(sites)
        for pattern in patterns:
            assert isinstance(pattern, Patterns)
            # Keys of padding, if any, have no weight.
            own = pattern.of(index)
            padded = (nn.functional.pad(w, (0, own.shape[2] - w.shape[2])) for w in weights)
            same = [float((w - own).abs().max()) for w in padded if w.shape == own.shape]
            assert min(same) < 1e-5
        if isinstance(output.logits, Ragged):
            logits = output.logits.to_list()[index]
            torch.testing.assert_close(logits, plain.logits[0], rtol=1e-4, atol=1e-4)
    assert not model.inner.config.output_attentions


def test_returned_weights_have_no_scores_to_measure_or_cut() -> None:
    model, inputs = wrapped("bloom"), inputs_of("bloom")[1]
    assert "largest_logit" not in lens.statistics(model, inputs, progress=False)
    with refuses(InputError, "L1H0", "ablate"):
        lens.cut(model, inputs, [("L1H0", 2, 1)], progress=False)


@pytest.mark.parametrize("name", ["layoutlmv3", "bloom", "gptj", "mpnet", "speecht5"])
def test_a_head_without_its_output_is_one_without_its_columns(name: str) -> None:
    model, inputs = wrapped(name), inputs_of(name)[1]
    facts, layer = model.main_stack.facts.attentions[-1]
    sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
    site = Site(layer, Tap.HEAD_OUTPUT, sublayer, model.readout_stack)

    def silence(values: Tensor) -> Tensor:
        return values * (torch.arange(4) != 1)[:, None]

    def hook(_: nn.Module, args: Any) -> Any:
        return (silence(args[0].unflatten(-1, (4, -1))).flatten(-2),)

    with torch.no_grad():
        result = model.run_inputs(inputs, ActivationEditor({site: silence})).hidden
        untouched = model.run_inputs(inputs).hidden
        assert facts.projection is not None
        handle = facts.projection.register_forward_pre_hook(hook)
        expected = model.run_inputs(inputs).hidden
        handle.remove()
    assert isinstance(result, Ragged)
    assert isinstance(expected, Ragged)
    assert isinstance(untouched, Ragged)
    assert float((untouched.values - expected.values).abs().max()) > 1e-3
    torch.testing.assert_close(result.values, expected.values)


def test_the_lens_reads_them_as_any_model() -> None:
    model = wrapped("bloom")
    assert lens.inspect(model, TEXTS, sequences=4, progress=False).complete
    assert len(lens.ablate(model, TEXTS, progress=False).addresses) == 8
    assert "entropy" in lens.statistics(wrapped("xlnet"), TEXTS, progress=False)


def test_what_the_slower_way_costs_is_said() -> None:
    with pytest.warns(WrappedModelWarning, match="8 heads: 32 MiB for a text of 1,024 tokens"):
        wrap(wrapped("bloom").inner)
    with pytest.warns(WrappedModelWarning, match="head outputs are not seen"):
        wrap(wrapped("xlnet").inner)


def test_weights_that_were_used_already_cannot_be_changed() -> None:
    model = wrapped("bloom")
    query = Site(0, Tap.QUERY)
    with refuses(InputError, "query", "cannot be changed", "head outputs"):
        model.run_inputs(inputs_of("bloom")[1], ActivationEditor({query: lambda x: x + 1}))
    with refuses(InputError, "no gradient", "lens.importance"):
        lens.gradient_times_attention(model, TEXTS)


def test_a_model_without_weights_is_refused() -> None:
    config = transformers.FNetConfig(
        **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}
    )
    with refuses(InputError, "FNetForMaskedLM", "output_attentions", "manyheads.load"):
        wrap(transformers.FNetForMaskedLM(config).eval())
