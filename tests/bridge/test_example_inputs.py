"""Inputs that are made up for the probing forward, and models that cannot run on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from manyheads import lens
from manyheads.bridge.example_inputs import example_inputs
from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import InputError, WrappedModelWarning
from tests.bridge.zoo import GROUPED, IMAGE, LATENT, PAIR, T5, TEXT
from tests.messages import refuses

CLIP = {**IMAGE, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**IMAGE, "model_type": "siglip_vision_model", "projection_dim": 32}
LLAMA = {**GROUPED, "model_type": "llama"}


def llava() -> Any:
    config = transformers.LlavaConfig(text_config=LLAMA, vision_config=CLIP, image_token_index=59)
    return transformers.LlavaForConditionalGeneration(config)


def paligemma() -> Any:
    text = {**GROUPED, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=SIGLIP, image_token_index=59, projection_dim=32
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=GROUPED, vision_config=SIGLIP, image_token_index=59, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mllama() -> Any:
    text = {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    image = {
        **{key: value for key, value in IMAGE.items() if key != "num_attention_heads"},
        "attention_heads": 4,
        "num_global_layers": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=image, image_token_index=59)
    return transformers.MllamaForConditionalGeneration(config)


def idefics3() -> Any:
    config = transformers.Idefics3Config(
        text_config=LLAMA, vision_config=IMAGE, image_token_id=59, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def spectrogram() -> Any:
    shape = {key: value for key, value in IMAGE.items() if key != "image_size"}
    config = transformers.ASTConfig(**shape, max_length=32, num_mel_bins=16)
    return transformers.ASTForAudioClassification(config)


def speech_to_text() -> Any:
    config = transformers.Speech2TextConfig(
        **PAIR,
        max_source_positions=64,
        max_target_positions=32,
        conv_channels=16,
        input_feat_per_channel=16,
    )
    return transformers.Speech2TextForConditionalGeneration(config)


def t5gemma() -> Any:
    # Its own size of the vocabulary is the default, not that of its two sides.
    config = transformers.T5GemmaConfig(encoder=GROUPED, decoder=GROUPED)
    return transformers.T5GemmaForConditionalGeneration(config)


def video() -> Any:
    config = transformers.VideoMAEConfig(**IMAGE, num_frames=4, tubelet_size=2)
    return transformers.VideoMAEForVideoClassification(config)


def musicgen() -> Any:
    audio = transformers.EncodecConfig(
        hidden_size=16,
        num_filters=4,
        codebook_size=64,
        num_lstm_layers=1,
        upsampling_ratios=[2, 2],
        target_bandwidths=[1.5],
    )
    decoder = transformers.MusicgenDecoderConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    )
    config = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(**T5).to_dict(),
        audio_encoder=audio.to_dict(),
        decoder=decoder.to_dict(),
    )
    return transformers.MusicgenForConditionalGeneration(config)


def clap() -> Any:
    audio = {
        **{key: [2, 2] for key in ("depths", "num_attention_heads")},
        **dict.fromkeys(("window_size", "patch_size"), 4),
        **dict.fromkeys(("hidden_size", "num_mel_bins"), 16),
        "patch_embeds_hidden_size": 8,
        "spec_size": 64,
        "patch_stride": [4, 4],
    }
    config = transformers.ClapConfig(text_config=TEXT, audio_config=audio, projection_dim=16)
    return transformers.ClapModel(config)


STACKS: list[tuple[Callable[[], Any], set[str]]] = [
    (llava, {"vision", "text"}),
    (paligemma, {"vision", "text"}),
    (gemma3, {"vision", "text"}),
    (mllama, {"vision0", "vision1", "text"}),
    (idefics3, {"vision", "text"}),
    (spectrogram, {"main"}),
    (speech_to_text, {"encoder", "decoder"}),
    (t5gemma, {"encoder", "decoder"}),
    (video, {"main"}),
    (musicgen, {"encoder", "decoder"}),
    (clap, {"main"}),
]


@pytest.mark.parametrize(("build", "stacks"), STACKS)
def test_images_and_sounds_are_made_up_from_the_config(
    build: Callable[[], Any], stacks: set[str]
) -> None:
    torch.manual_seed(0)
    assert set(wrap(build().eval()).structure.stacks) == stacks


@pytest.mark.parametrize("build", [llava, gemma3, mllama])
def test_a_model_of_images_reads_texts_alone(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, texts = wrap(build().eval()), [[5, 6, 7, 5, 6]]
    assert lens.inspect(model, texts, sequences=4, progress=False).complete
    assert len(lens.ablate(model, texts, progress=False).addresses) in (8, 12)


def test_a_model_may_have_several_ends() -> None:
    config = transformers.LlamaConfig(**{**GROUPED, "eos_token_id": [2, 3]})
    model = transformers.LlamaForCausalLM(config).eval()
    ids = example_inputs(model)["input_ids"]
    assert not set(ids.flatten().tolist()) & {2, 3}
    assert wrap(model).structure.stacks["main"].depth == 2


def test_the_error_on_made_up_inputs_lists_what_the_model_reads() -> None:
    model = llava().eval()
    model.config.image_token_id = None
    with refuses(InputError, "LlavaForConditionalGeneration", "example=", "pixel_values"):
        wrap(model)
    with refuses(InputError, "input_ids 1x3", "example=", "pixel_values"):
        ids = torch.tensor([[5, 6, 7]])
        wrap(llava().eval(), example={"input_ids": ids, "pixel_values": torch.ones(1, 3, 16, 16)})


def gemma3n() -> Any:
    config = transformers.Gemma3nTextConfig(
        **GROUPED,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        sliding_window=5,
    )
    return transformers.Gemma3nForCausalLM(config)


def longcat() -> Any:
    config = transformers.LongcatFlashConfig(
        **{**LATENT, "qk_rope_head_dim": 8, "head_dim": 8},
        num_layers=2,
        ffn_hidden_size=48,
        zero_expert_num=2,
        expert_ffn_hidden_size=16,
        moe_topk=2,
    )
    return transformers.LongcatFlashForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "reason"), [(gemma3n, "one residual stream"), (longcat, "2 attentions")]
)
def test_what_will_not_work_is_said_when_a_model_is_wrapped(
    build: Callable[[], Any], reason: str
) -> None:
    with pytest.warns(WrappedModelWarning, match=f"ablation, patching.*{reason}"):
        model = wrap(build().eval())
    assert lens.inspect(model, [[5, 6, 7, 5, 6]], sequences=4, progress=False).complete
    with refuses(InputError, reason, "statistics"):
        lens.ablate(model, [[5, 6, 7, 5, 6]], progress=False)
