"""Explanations of matches: exact shares, real words, heads that do what is said of them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.encoding.encode import encode
from manyheads.encoding.late_scores import maxsim
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.provenance import (
    DenseProjection,
    LateInteractionConfig,
    QueryExpansion,
    SentenceConfig,
)
from manyheads.pictures import draw_match
from manyheads.taps import Head
from manyheads.tasks import MatchExplanation, explain_match
from tests.studio.models import encoder

QUERY, TEXT = "the cat sat", "The dog sat on the log,\nwhile the cat sat on the mat in Rome."


@pytest.fixture(scope="module")
def model() -> Any:
    result = encoder()
    # Drawn so small, all texts would be alike.
    for parameter in result.parameters():
        parameter.data.mul_(3.0)
    return result


def cosine(model: Any, query: Any, text: Any, reader: Any = None) -> float:
    options: dict[str, Any] = {"normalize": True, "progress": False}
    one, other = encode(model, query, **options), encode(reader or model, text, **options)
    return float(one[0] @ other[0])


def pooled(model: Any, **config: Any) -> Any:
    copy = deepcopy(model)
    copy.sentence = SentenceConfig(**config)
    return copy


def test_shares_of_tokens_sum_to_the_cosine(model: Any) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    dense = DenseProjection(weight, torch.ones(8), "none")
    for each in (model, pooled(model, dense=(dense,))):
        result = explain_match(each, QUERY, TEXT, heads=False, progress=False)
        assert result.tokens_by == "decomposition"
        assert result.score == pytest.approx(cosine(each, QUERY, TEXT), abs=1e-5)
        assert result.similarity is not None
        assert result.similarity.sum() == pytest.approx(result.score, abs=1e-5)
        for side, axis in ((result.query, 1), (result.document, 0)):
            assert side.contributions == pytest.approx(result.similarity.sum(axis), abs=1e-6)


def test_words_are_those_of_the_text(model: Any) -> None:
    result = explain_match(model, QUERY, TEXT, heads=False, progress=False)
    words = result.document.words()
    assert [TEXT[word.start : word.end] for word in words] == [word.text for word in words]
    assert {"dog", "cat", "Rome"} <= {word.text for word in words}
    total = sum(word.contribution for word in words) + result.document.special
    assert total == pytest.approx(result.score, abs=1e-5)
    assert [word.text for word in result.top_words(2)] == [
        word.text for word in sorted(words, key=lambda word: -word.contribution)[:2]
    ]


def test_a_word_left_out_is_left_out(model: Any) -> None:
    first = pooled(model, pooling="cls")
    result = explain_match(first, QUERY, TEXT, heads=False, progress=False)
    assert (result.tokens_by, result.similarity) == ("removal", None)
    whole = first.tokenizer.encode(TEXT)
    side = result.document
    word = whole.word_ids[-3]
    ids = [each for each, its in zip(whole.ids, whole.word_ids, strict=True) if its != word]
    changed = side.contributions[[its == word for its in side.word_of_token]].sum()
    expected = cosine(first, QUERY, TEXT) - cosine(first, QUERY, [ids])
    assert changed == pytest.approx(expected, abs=1e-5)


def test_gradients_of_tokens_need_no_mean(model: Any) -> None:
    result = explain_match(
        pooled(model, pooling="cls"), QUERY, TEXT, by="gradient", heads=False, progress=False
    )
    assert result.tokens_by == "gradient"
    assert np.isfinite(result.document.contributions).all()
    assert np.abs(result.document.contributions).max() > 0


@pytest.mark.parametrize("head", [Head(0, 1), Head(1, 3)])
def test_a_head_adds_what_is_lost_without_it(model: Any, head: Head) -> None:
    result = explain_match(model, QUERY, TEXT, progress=False)
    assert result.heads is not None
    without = deepcopy(model)
    channels = slice(8 * head.head, 8 * head.head + 8)
    without.stack.layers[head.layer].attention.output.weight.data[:, channels] = 0
    lost = result.score - cosine(model, QUERY, TEXT, without)
    assert result.heads["document"].of(head) == pytest.approx(lost, abs=1e-5)
    lost = result.score - cosine(model, TEXT, QUERY, without)
    assert result.heads["query"].of(head) == pytest.approx(lost, abs=1e-5)


def test_gradients_of_heads_agree_with_their_ablation(model: Any) -> None:
    exact = explain_match(model, QUERY, TEXT, progress=False).heads
    estimate = explain_match(model, QUERY, TEXT, by="gradient", progress=False).heads
    assert exact is not None
    assert estimate is not None
    both = np.corrcoef(exact.means["document"], estimate.means["document"])
    assert both[0, 1] > 0.5


@pytest.mark.parametrize("attend", [True, False])
def test_a_late_score_is_that_of_maxsim(model: Any, attend: bool) -> None:
    copy = deepcopy(model)
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    comma = copy.tokenizer.encode(",").ids[0]
    copy.late = LateInteractionConfig(
        projection=(DenseProjection(weight, None, "none"),),
        query_prompt="it ",
        document_prompt="and ",
        expansion=QueryExpansion(length=9, token=7, attend=attend),
        skipped=(comma,),
    )
    result = explain_match(copy, QUERY, TEXT, progress=False)
    one = encode_tokens(copy, [QUERY], role="query", progress=False)
    expected = float(maxsim(one.of(0), encode_tokens(copy, [TEXT], progress=False))[0])
    assert (result.kind, result.tokens_by) == ("late", "decomposition")
    assert result.score == pytest.approx(expected, abs=1e-5)
    assert result.similarity is not None
    assert result.similarity.max(1) == pytest.approx(result.query.contributions, abs=1e-5)
    assert result.document.contributions.sum() == pytest.approx(expected, abs=1e-5)
    assert [word.text for word in result.query.words()] == ["the", "cat", "sat"]
    assert "," not in result.document.tokens
    assert result.best_matches()[0][2] == pytest.approx(result.similarity[0].max())
    # Without a head, the hidden tokens of a query could not stay hidden.
    assert result.heads is not None
    assert result.heads.names == (("query", "document") if attend else ("document",))
    without = deepcopy(copy)
    without.stack.layers[1].attention.output.weight.data[:, :8] = 0
    changed = maxsim(one.of(0), encode_tokens(without, [TEXT], progress=False))
    lost = expected - float(changed[0])
    assert result.heads["document"].of(Head(1, 0)) == pytest.approx(lost, abs=1e-5)


def test_any_encoder_can_match_by_tokens(model: Any) -> None:
    result = explain_match(model, QUERY, TEXT, kind="late", heads=False, progress=False)
    one = encode_tokens(model, [QUERY], role="query", progress=False)
    expected = maxsim(one.of(0), encode_tokens(model, [TEXT], progress=False))
    assert result.score == pytest.approx(float(expected[0]), abs=1e-5)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_an_explanation_is_saved_and_drawn(model: Any, tmp_path: Path, suffix: str) -> None:
    result = explain_match(model, QUERY, TEXT, progress=False)
    result.save(tmp_path / f"match{suffix}")
    read = MatchExplanation.load(tmp_path / f"match{suffix}")
    assert read.record() == result.record()
    assert str(read) == str(result)
    if suffix == ".json":
        draw_match(path=tmp_path / "match.png", **read.picture_data())
        assert (tmp_path / "match.png").stat().st_size > 10_000


def test_what_cannot_be_explained_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"removal.*gradient"):
        explain_match(pooled(model, pooling="cls"), QUERY, TEXT, tokens_by="decomposition")
    with pytest.raises(InputError, match=r"removal.*dense"):
        explain_match(model, QUERY, TEXT, kind="late", tokens_by="removal")
    with pytest.raises(InputError, match="no tokens"):
        explain_match(model, "", TEXT)
    with pytest.raises(InputError, match="encoder"):
        explain_match(build("transformer-base", layers=1, width=32, heads=2, seed=0), QUERY, TEXT)
