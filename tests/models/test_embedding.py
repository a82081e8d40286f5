"""Tokens become vectors: words, positions and types are added, and mistakes are named."""

import pytest
import torch
from torch import Tensor

from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.models.embedding import Embedding, TokenEmbedding
from manyheads.parts.masks import Causal, Prefix, Window
from manyheads.parts.norms import LayerNorm
from manyheads.parts.positions import Learned, Sinusoidal
from manyheads.ragged import Ragged
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    HEADS,
    POSITIONS,
    SEQ2SEQS,
    VOCABULARY,
    WIDTH,
    decoder,
    ids,
    layer,
    own,
    small,
)


def embed(config: Embedding, batch: Ragged, **more: Ragged) -> tuple[TokenEmbedding, Tensor]:
    embedding = TokenEmbedding(config).eval()
    return embedding, embedding(batch, batch.lengths.positions, **more).values


def test_a_vector_is_word_plus_position_plus_type_then_normed() -> None:
    config = Embedding(
        vocabulary=VOCABULARY,
        width=WIDTH,
        position=Learned(count=9, offset=2),
        types=2,
        norm=LayerNorm(),
        scale=3.0,
    )
    batch = Ragged.from_list([torch.tensor([4, 7]), torch.tensor([1])])
    types = Ragged.from_list([torch.tensor([0, 1]), torch.tensor([1])])
    embedding, result = embed(config, batch, types=types)
    words, places, kinds = (
        table.weight for table in (embedding.tokens, embedding.positions, embedding.types)
    )
    summed = torch.stack(
        [
            3 * words[4] + places[2] + kinds[0],
            3 * words[7] + places[3] + kinds[1],
            3 * words[1] + places[2] + kinds[1],
        ]
    )
    torch.testing.assert_close(result, torch.nn.functional.layer_norm(summed, (WIDTH,)))


def test_every_sequence_starts_at_position_zero() -> None:
    batch = Ragged.from_list([torch.tensor([3, 3]), torch.tensor([3, 3, 3])])
    for position in (Sinusoidal(), Learned(count=3)):
        _, result = embed(Embedding(vocabulary=5, width=8, position=position), batch)
        assert torch.equal(result[:2], result[2:4])
        assert not torch.allclose(result[0], result[1])


def test_types_left_out_are_zeros() -> None:
    config = Embedding(vocabulary=5, width=8, types=2)
    batch = Ragged.from_list([torch.tensor([3, 1])])
    embedding, result = embed(config, batch)
    assert torch.equal(
        result, embedding(batch, batch.lengths.positions, batch.map(torch.zeros_like)).values
    )


@pytest.mark.parametrize("wrong", [-1, -100, VOCABULARY, VOCABULARY + 7])
@pytest.mark.parametrize("model", [ENCODERS["bert"], DECODERS["llama"]])
def test_a_token_outside_the_vocabulary_is_named(model: object, wrong: int) -> None:
    with pytest.raises(InputError) as caught:
        small(model)(torch.tensor([[0, VOCABULARY - 1, wrong]]))
    assert caught.value.problem == f"token id {wrong} is outside vocabulary={VOCABULARY}"
    assert caught.value.remedy == f"use ids of 0 to {VOCABULARY - 1}"


def test_a_target_outside_the_vocabulary_is_named() -> None:
    model, good, bad = small(SEQ2SEQS["2017"]), torch.tensor([[0]]), torch.tensor([[VOCABULARY]])
    for source, target in ((good, bad), (bad, good)):
        with pytest.raises(InputError, match=f"token id {VOCABULARY} is outside vocabulary"):
            model(source, target)


def test_both_ends_of_the_vocabulary_are_words() -> None:
    with torch.no_grad():
        hidden = small(ENCODERS["bert"])(torch.tensor([[0, VOCABULARY - 1]])).hidden
    assert hidden.isfinite().all()


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    model = small(ENCODERS["bert"])
    with torch.no_grad():
        assert model(ids((POSITIONS, 3))).hidden.values.isfinite().all()
    with pytest.raises(InputError) as caught:
        model(ids((3, POSITIONS + 1)))
    assert f"{POSITIONS + 1} tokens is longer" in caught.value.problem
    assert f"truncate it to {POSITIONS}" in caught.value.remedy


def test_a_cache_that_outgrows_the_positions_is_refused() -> None:
    model = small(DECODERS["gpt2"])
    cache = model.new_cache()
    with torch.no_grad():
        model(ids((POSITIONS, 3)), cache=cache)
        with pytest.raises(InputError, match=f"a sequence of {POSITIONS + 1} tokens is longer"):
            model(ids((1, 1)), cache=cache)
        model(ids((0, 1)), cache=cache)
    assert cache.seen == (POSITIONS, 4)


def test_an_offset_leaves_fewer_positions() -> None:
    model = small(decoder(layer(own(mask=Causal())), position=Learned(count=10, offset=2)))
    with pytest.raises(InputError, match="a sequence of 9 tokens is longer than the model's 8 pos"):
        model(ids((9,)))


@pytest.mark.parametrize(
    ("mask", "looks"),
    [
        (Window(8), "8 tokens back"),
        (Window(1, 9), "9 tokens ahead"),
        (Causal() & Window(20), "20 tokens back"),
        (Prefix(9), "8 tokens ahead"),
    ],
)
def test_a_window_longer_than_the_positions_is_refused(mask: object, looks: str) -> None:
    far = int(looks.split()[0])
    with pytest.raises(ConfigError) as caught:
        decoder(layer(own()), layer(own(mask=mask)), position=Learned(count=8))
    assert caught.value.problem == f"layer 1 looks {looks}, and the model has only 8 positions"
    assert caught.value.remedy == f"use a window shorter than 8, or Learned(count={far + 1})"


def test_the_longest_window_that_fits_is_taken_and_so_is_none() -> None:
    for mask in (Window(7), Window(7, 7), Causal()):
        decoder(layer(own(mask=mask)), layer(None), position=Learned(count=8))
    decoder(layer(own(mask=Window(100))), position=Sinusoidal())


def test_types_of_a_model_without_types_are_refused() -> None:
    batch = ids((2, 3))
    with pytest.raises(InputError) as caught:
        small(ENCODERS["modernbert"])(batch, types=batch.map(torch.zeros_like))
    assert str(caught.value) == "type 0 is outside types=0: leave them out, the model has no types."


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_type_outside_the_types_is_named(wrong: int) -> None:
    with pytest.raises(InputError, match=f"type {wrong} is outside types=2: use ids of 0 to 1"):
        small(ENCODERS["bert"])(torch.tensor([[1, 2]]), types=torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("lengths", [(1,), (4,), (2, 3), (5, 0)])
def test_types_of_other_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    types = ids(lengths).map(torch.zeros_like)
    with pytest.raises(ShapeError) as caught:
        small(ENCODERS["bert"])(ids((5,)), types=types)
    assert caught.value.problem == f"types have lengths {lengths}, and ids (5,)"
    assert caught.value.remedy == "give one type per token"


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary must be at least 1, got 0"):
        Embedding(vocabulary=0, width=8)


def test_dropout_acts_only_in_training() -> None:
    embedding = TokenEmbedding(Embedding(vocabulary=5, width=WIDTH * HEADS, dropout=0.5))
    batch = Ragged.from_list([torch.tensor([3, 1])])
    zeros = (embedding.train()(batch, batch.lengths.positions).values == 0).float().mean()
    assert 0.3 < zeros < 0.7
    assert (embedding.eval()(batch, batch.lengths.positions).values != 0).all()
