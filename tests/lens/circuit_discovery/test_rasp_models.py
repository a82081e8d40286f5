import numpy as np
import pytest
import torch

pytest.importorskip("tracr")

from manyheads.lens.circuit_discovery.rasp_models import Disguise, assemble
from manyheads.lens.circuit_discovery.rasp_programs import (
    ProgramWeights,
    compile_program,
    library_programs,
)
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder


@pytest.fixture(scope="module")
def weights() -> ProgramWeights:
    entry = next(program for program in library_programs() if program.name == "sort_unique")
    return compile_program(entry.program, entry.vocabulary, entry.max_length)


def draw(
    weights: ProgramWeights, *, rotate: bool = True, idle: int = 1, noise: int = 2, seed: int = 0
) -> Disguise:
    return Disguise.draw(
        weights,
        idle_heads=idle,
        noise_heads=noise,
        rotate=rotate,
        generator=np.random.default_rng(seed),
    )


def build(weights: ProgramWeights, **options: int) -> tuple[Encoder | Decoder, Disguise]:
    disguise = draw(weights, **options)
    return assemble(weights, disguise, causal=False), disguise


def test_disguise_changes_no_output(weights: ProgramWeights) -> None:
    ids = torch.tensor([[weights.tokens.index("compiler_bos"), 3, 1, 0, 2]])
    plain, _ = build(weights, rotate=False, idle=0, noise=0)
    outputs = len(weights.outputs or ())
    for seed in range(3):
        hidden, _ = build(weights, seed=seed)
        torch.testing.assert_close(
            hidden(ids).logits[..., :outputs], plain(ids).logits[..., :outputs], atol=1e-4, rtol=0
        )


def test_idle_heads_write_nothing_and_noise_heads_write_something(weights: ProgramWeights) -> None:
    model, disguise = build(weights)
    assert disguise.slots == 4
    for layer, places in zip(model.stack.layers, disguise.places, strict=True):
        written = layer.attention.output.weight.unflatten(1, (4, -1)).abs().sum((0, 2))
        assert int((written == 0).sum()) == 1
        assert len(places) == 1
        assert written[places[0]] > 0


def test_no_coordinate_of_the_weights_stands_out(weights: ProgramWeights) -> None:
    model, disguise = build(weights)
    size = model.config.stack.layers[0].attention.inner.size
    rows = model.stack.layers[0].attention.project.weight
    own = rows[disguise.places[0][0] * size :][:size]
    for weight in (own, model.embedding.tokens.weight, model.readout.weight[:5]):
        assert (weight != 0).all()


def test_without_rotation_the_program_has_the_first_heads(weights: ProgramWeights) -> None:
    disguise = draw(weights, rotate=False)
    assert disguise.places == ((0,), (0,))


def test_seeds_put_heads_in_different_places(weights: ProgramWeights) -> None:
    assert len({draw(weights, seed=seed).places for seed in range(6)}) > 1


def test_causal_model_is_a_decoder(weights: ProgramWeights) -> None:
    assert isinstance(assemble(weights, draw(weights), causal=True), Decoder)
