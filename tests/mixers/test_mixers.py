"""Every mixer in a decoder: packing, generation, saving, gradients."""

from pathlib import Path

import pytest
import torch

from manyheads import BeamSearch, Ragged, generate, load, save
from manyheads.cache import StateCache, StateSlot, StaticCache
from manyheads.errors import ConfigError, InputError
from manyheads.mixers.build import make_mixer
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.encoder import Encoder, EncoderConfig
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL, GROWING, VOCABULARY, small_model


@pytest.fixture(params=CAUSAL)
def model(request: pytest.FixtureRequest) -> Decoder:
    mixer = CAUSAL[request.param]
    made = small_model(mixer, mixer)
    assert isinstance(made, Decoder)
    return made


@pytest.fixture(params=[*CAUSAL.values(), *BOTH_WAYS.values()], ids=[*CAUSAL, *BOTH_WAYS])
def any_model(request: pytest.FixtureRequest) -> Decoder | Encoder:
    return small_model(request.param, request.param)


def texts(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged.from_list(
        [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    )


@torch.no_grad()
def test_texts_of_a_batch_never_meet(any_model: Decoder | Encoder) -> None:
    batch = texts(70, 1, 9)
    together = any_model(batch).logits
    for where in batch.lengths.slices():
        alone = any_model(Ragged.from_list([batch.values[where]])).logits.values
        torch.testing.assert_close(together.values[where], alone, atol=1e-5, rtol=1e-5)
    changed = batch.values.clone()
    changed[:70] = 3
    again = any_model(batch.with_values(changed)).logits
    assert torch.equal(again.values[70:], together.values[70:])


@torch.no_grad()
@pytest.mark.parametrize("cut", [(1, 1), (66, 1), (30, 40)])
def test_a_cache_continues_the_text(model: Decoder, cut: tuple[int, int]) -> None:
    whole = texts(sum(cut), sum(cut))
    expected = model(whole).logits.to_padded()
    cache, result = model.new_cache(), []
    for piece in whole.to_padded().split(cut, dim=1):
        result.append(model(piece, cache=cache).logits)
    torch.testing.assert_close(torch.cat(result, 1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("model", [name for name in CAUSAL if name not in GROWING], indirect=True)
def test_the_state_does_not_grow(model: Decoder) -> None:
    cache = model.new_cache(StaticCache(size=500))
    model(texts(3).to_padded(), cache=cache)
    before = cache.nbytes
    model(texts(200).to_padded(), cache=cache)
    assert cache.nbytes == before > 0


@torch.no_grad()
def test_generation_and_beams_use_the_state(model: Decoder) -> None:
    prompt = texts(5)
    tokens = prompt.values.tolist()
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    [made] = generate(model, [tokens[:5]], max_new_tokens=6, progress=False)
    assert list(made.ids) == tokens[-6:]
    [beam] = generate(
        model, [tokens[:5]], max_new_tokens=6, sampling=BeamSearch(num_beams=3), progress=False
    )
    assert len(beam.ids) == 6


def test_it_is_saved_and_learns(any_model: Decoder | Encoder, tmp_path: Path) -> None:
    save(any_model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == any_model.config
    batch = texts(20, 7)
    torch.testing.assert_close(again(batch).logits.values, any_model(batch).logits.values)
    any_model.train()(batch).logits.values.square().mean().backward()
    assert all(each.grad is not None for each in any_model.parameters())


def test_half_precision_stays_close(any_model: Decoder | Encoder) -> None:
    batch = texts(40)
    with torch.no_grad():
        wide = any_model(batch).logits.values
        half = any_model.to(torch.bfloat16)(batch).logits.values
    torch.testing.assert_close(half.float(), wide, atol=0.05, rtol=0.1)


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups"):
        Mamba2(width=8, heads=4, head_size=2, state_size=2, groups=3)
    with pytest.raises(ConfigError, match="key_heads"):
        GatedDelta(width=8, heads=4, head_size=2, key_heads=3, key_size=2)
    with pytest.raises(ConfigError, match="order"):
        LinearAttention(width=8, heads=2, causal=False, decay="heads")
    mixer = make_mixer(LinearAttention(width=8, heads=2, causal=False))
    with pytest.raises(InputError, match="bidirectional"):
        mixer(Ragged.from_list([torch.randn(3, 8)]), cache=StateSlot(StateCache()))


def test_a_model_reads_in_the_direction_of_its_mixers() -> None:
    causal, both = small_model(CAUSAL["linear"]), small_model(BOTH_WAYS["linear"])
    parts = {name: getattr(causal.config, name) for name in ("embedding", "stack", "readout")}
    with pytest.raises(ConfigError, match=r"layer 0, LinearAttention, .*causal=False"):
        EncoderConfig(**parts)
    parts["stack"] = both.config.stack
    decoder = build(DecoderConfig(**parts), seed=0)
    assert isinstance(decoder, Decoder)
    with pytest.raises(ConfigError, match="layer 0, LinearAttention, sees later"):
        decoder.new_cache()
