"""Words as tokens, keys mixed with those before them, and when heads form."""

import torch

from manyheads.ragged import Lengths
from studies.byte_texts import BYTES, read_bytes
from studies.induction_bump.formation import log_spaced, observe_model, share_in_window
from studies.induction_bump.smeared_keys import attention_only, previous
from studies.induction_bump.words import read_words, repeated_blocks

SHAPE = {"width": 16, "layers": 1, "heads": 2, "vocabulary": 300, "seed": 0}


def test_words_and_bytes_spell_the_text() -> None:
    ids, table = read_words("topics", 5000, 300)
    assert b"".join(table[token] for token in ids.tolist()) == read_bytes("topics", 5000)
    assert int(ids.max()) == len(table) - 1 == 299


def test_a_block_comes_twice_and_has_no_word_twice() -> None:
    for block in repeated_blocks(3, 8, 300).tolist():
        assert block[:8] == block[8:]
        assert len(set(block)) == 8
        assert min(block) >= BYTES


def test_the_first_token_of_a_text_has_no_key_before_it() -> None:
    keys = torch.arange(5.0)[:, None]
    assert previous(keys, Lengths.of([3, 2])).squeeze(1).tolist() == [0, 0, 1, 3, 3]


def test_keys_that_are_not_smeared_are_those_of_plain_attention() -> None:
    plain, smeared = (attention_only(**SHAPE, smeared=flag) for flag in (False, True))
    ids = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(plain(ids).logits, smeared(ids).logits)
    with torch.no_grad():
        smeared.stack.layers[0].attention.smear.fill_(50)
    torch.testing.assert_close(plain(ids).logits, smeared(ids).logits)


def test_one_layer_whose_keys_are_the_token_before_does_induction() -> None:
    """Queries read a token, keys the one before: the cause that the study tests."""
    model = attention_only(width=64, layers=1, heads=1, vocabulary=300, smeared=True, seed=0)
    attention = model.stack.layers[0].attention
    # Without positions, equal queries and keys compare tokens.
    with torch.no_grad():
        rows = attention.projections()
        rows["query"].copy_(8 * torch.eye(64))
        rows["key"].copy_(8 * torch.eye(64))
        attention.smear.fill_(-50)
    blocks = repeated_blocks(2, 8, 300)
    settings = {"around": 2, "early": 4, "late": 12}
    values = observe_model(blocks, blocks, settings, model.eval())
    assert values["induction"] > 0.5


def test_moments_begin_with_the_start_and_end_with_the_last_step() -> None:
    steps = log_spaced(4000, 20)
    assert (steps[0], steps[-1], len(steps)) == (0, 4000, 20)
    assert log_spaced(5, 3) == [0, 5]


def test_a_score_that_moves_with_the_heads_lies_in_their_window() -> None:
    heads = [0.0, 0.0, 0.4, 0.5, 0.5]
    assert share_in_window(heads, [0.0, 0.0, -0.4, -0.5, -0.5]) == 1
    assert share_in_window(heads, [0.0, -0.5, -0.5, -0.5, -0.5]) == 0
