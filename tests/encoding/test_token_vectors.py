"""One vector per token: order, roles, expansion, truncation, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyheads import Ragged, build, encode_tokens
from manyheads.encoding.token_vectors import role_batch, token_vectors
from manyheads.errors import ConfigError, InputError, TruncationWarning
from manyheads.mixers.fourier import Fourier
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.provenance import DenseProjection, LateInteractionConfig, QueryExpansion
from manyheads.models.stack import StackConfig
from tests.encoding.tiny import as_ids, plain_hidden, small
from tests.messages import refuses

TEXTS = ["the cat sat", "a", "on the mat by the door", "", "sun"]


def late(**settings: Any) -> Any:
    model = small()
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    model.late = LateInteractionConfig(
        projection=(DenseProjection(weight, None, "none"),), **settings
    )
    return model


def test_without_settings_they_are_the_last_states_of_length_one() -> None:
    model = small()
    result = encode_tokens(model, TEXTS, batch_tokens=16)
    for text, each in zip(TEXTS, result.to_list(), strict=True):
        torch.testing.assert_close(each, F.normalize(plain_hidden(model, as_ids(text)), dim=-1))
    as_tokens = Ragged.from_list([torch.tensor(as_ids(text)) for text in TEXTS])
    torch.testing.assert_close(encode_tokens(model, as_tokens).values, result.values)
    assert encode_tokens(model, []).values.shape == (0, 32)


def test_documents_lose_skipped_tokens_and_queries_keep_them() -> None:
    space, model = as_ids(" ", special=False)[0], late(skipped=(as_ids(" ", special=False)[0],))
    every = encode_tokens(model, TEXTS, role="query")
    some = encode_tokens(model, TEXTS)
    kept = torch.tensor([token != space for text in TEXTS for token in as_ids(text)])
    torch.testing.assert_close(some.values, every.values[kept])
    assert some.lengths.each == tuple(len(as_ids(text.replace(" ", ""))) for text in TEXTS)


def test_hidden_expansion_changes_no_other_token_and_reads_only_them() -> None:
    plain = encode_tokens(late(), TEXTS, role="query")
    hidden = late(expansion=QueryExpansion(length=30, token=2))
    result = encode_tokens(hidden, TEXTS, role="query")
    assert set(result.lengths.each) == {30}
    for alone, each in zip(plain.to_list(), result.to_list(), strict=True):
        torch.testing.assert_close(each[: len(alone)], alone)
    shorter = encode_tokens(late(expansion=QueryExpansion(length=25, token=2)), TEXTS, role="query")
    torch.testing.assert_close(result.of(1)[:25], shorter.of(1))
    attended = late(expansion=QueryExpansion(length=30, token=2, attend=True))
    other = encode_tokens(attended, TEXTS, role="query")
    assert not torch.allclose(other.of(1)[:3], plain.of(1), atol=1e-3)
    assert encode_tokens(attended, TEXTS).lengths.each == plain.lengths.each


def test_gradients_reach_the_model_and_the_projection() -> None:
    model = late(expansion=QueryExpansion(length=6, token=2))
    weight = model.late.projection[0].weight.requires_grad_()
    batch = role_batch(model, [np.array(as_ids("cat")), np.array(as_ids("a"))], "query")
    result = token_vectors(model, batch)
    assert result.lengths.each == (6, 6)
    result.values[:, 0].sum().backward()
    assert weight.grad is not None
    assert model.embedding.tokens.weight.grad is not None


def test_long_texts_are_truncated_to_the_length_of_their_role() -> None:
    model = late(document_length=5, query_length=4)
    with pytest.warns(TruncationWarning, match="3 of 5 texts were truncated to 5 tokens"):
        assert encode_tokens(model, [*TEXTS[:3], "sunny", ""]).lengths.each == (5, 3, 5, 5, 2)
    with pytest.warns(TruncationWarning, match="1 of 1 texts were truncated to 4 tokens"):
        encode_tokens(model, "the cat", role="query")
    with pytest.warns(TruncationWarning, match="1 of 1 texts were truncated to 7 tokens"):
        encode_tokens(model, "the cat", max_length=7)


def test_what_cannot_be_done_is_refused() -> None:
    model: Any = late()
    with refuses(InputError, "query", "document", "'passage'"):
        encode_tokens(model, TEXTS, role="passage")  # type: ignore[arg-type]
    with refuses(InputError, "batch_tokens must be at least 1, got 0"):
        encode_tokens(model, TEXTS, batch_tokens=0)
    with refuses(ConfigError, "at least 1, got 0"):
        QueryExpansion(length=0, token=1)
    with refuses(ConfigError, "document_length", "got -1"):
        LateInteractionConfig(document_length=-1)
    layer = LayerConfig(attention=None, mixer=Branch(Fourier(width=32)), feedforward=None)
    mixed: Any = build(replace(model.config, stack=StackConfig(width=32, layers=(layer,))), seed=0)
    mixed.late = LateInteractionConfig(expansion=QueryExpansion(length=6, token=2))
    with refuses(InputError, "mixers", "attend=True"):
        encode_tokens(mixed, [[3, 4]], role="query")
