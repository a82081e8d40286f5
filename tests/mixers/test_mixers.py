"""Every mixer in a decoder: packing, generation, saving, gradients."""

from pathlib import Path

import pytest
import torch

from manyheads import BeamSearch, Ragged, generate, load, save
from manyheads.cache import StateCache, StateSlot, StaticCache
from manyheads.errors import ConfigError, InputError
from manyheads.mixers.build import MixerConfig, make_mixer
from manyheads.mixers.gated_delta import GatedDelta
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.mamba2 import Mamba2
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import SwiGLU

WIDTH, VOCABULARY = 16, 50
MIXERS: dict[str, MixerConfig] = {
    "linear": LinearAttention(width=WIDTH, heads=2),
    "retention": LinearAttention(width=WIDTH, heads=2, decay="heads"),
    "mamba2": Mamba2(width=WIDTH, heads=4, head_size=8, state_size=6, groups=2),
    "delta": GatedDelta(width=WIDTH, heads=4, head_size=8, key_heads=2, key_size=6),
}


@pytest.fixture(params=MIXERS)
def model(request: pytest.FixtureRequest) -> Decoder:
    layer = LayerConfig(
        attention=None,
        mixer=Branch(MIXERS[request.param]),
        feedforward=Branch(SwiGLU(width=WIDTH, hidden=20)),
    )
    config = DecoderConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH),
        stack=StackConfig(width=WIDTH, layers=(layer, layer)),
        readout=LanguageHead(),
    )
    made = build(config, seed=0)
    assert isinstance(made, Decoder)
    return made.eval()


def texts(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged.from_list(
        [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    )


@torch.no_grad()
def test_texts_of_a_batch_never_meet(model: Decoder) -> None:
    batch = texts(70, 1, 9)
    together = model(batch).logits
    for where in batch.lengths.slices():
        alone = model(Ragged.from_list([batch.values[where]])).logits.values
        torch.testing.assert_close(together.values[where], alone, atol=1e-5, rtol=1e-5)
    changed = batch.values.clone()
    changed[:70] = 3
    again = model(batch.with_values(changed)).logits
    assert torch.equal(again.values[70:], together.values[70:])


@torch.no_grad()
@pytest.mark.parametrize("cut", [(1, 1), (66, 1), (30, 40)])
def test_a_cache_continues_the_text(model: Decoder, cut: tuple[int, int]) -> None:
    whole = texts(sum(cut), sum(cut))
    expected = model(whole).logits.to_padded()
    cache, found = model.new_cache(), []
    for piece in whole.to_padded().split(cut, dim=1):
        found.append(model(piece, cache=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
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


def test_it_is_saved_and_learns(model: Decoder, tmp_path: Path) -> None:
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == model.config
    batch = texts(20, 7)
    torch.testing.assert_close(again(batch).logits.values, model(batch).logits.values)
    model.train()(batch).logits.values.square().mean().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_half_precision_stays_close(model: Decoder) -> None:
    batch = texts(40)
    with torch.no_grad():
        wide = model(batch).logits.values
        half = model.to(torch.bfloat16)(batch).logits.values
    torch.testing.assert_close(half.float(), wide, atol=0.05, rtol=0.1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups"):
        Mamba2(width=8, heads=4, head_size=2, state_size=2, groups=3)
    with pytest.raises(ConfigError, match="key_heads"):
        GatedDelta(width=8, heads=4, head_size=2, key_heads=3, key_size=2)
    with pytest.raises(ConfigError, match="order"):
        LinearAttention(width=8, heads=2, causal=False, decay="heads")
    mixer = make_mixer(LinearAttention(width=8, heads=2, causal=False))
    with pytest.raises(InputError, match="bidirectional"):
        mixer(Ragged.from_list([torch.randn(3, 8)]), cache=StateSlot(StateCache()))
