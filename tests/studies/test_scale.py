"""Scores of queries and keys of unit variance."""

import torch

from studies.scale.score_statistics import draw_unit_variance, measure_scores
from studies.small_models import language_model


def scores_of(scale: float | str) -> dict[str, float]:
    model = language_model(width=64, layers=2, heads=1, attention={"scale": scale})
    torch.manual_seed(0)
    draw_unit_variance(model)
    ids = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    return measure_scores(model, ids)


def test_scores_have_the_variance_of_the_head_size_or_one() -> None:
    plain, scaled = scores_of(1.0), scores_of("root")
    assert 32 < plain["variance"] < 128
    torch.testing.assert_close(plain["variance"] / 64, scaled["variance"], rtol=0.2, atol=0)


def test_large_scores_leave_little_entropy_and_little_gradient() -> None:
    plain, scaled = scores_of(1.0), scores_of("root")
    assert plain["entropy"] < 0.5 < scaled["entropy"] <= 1
    assert plain["largest"] > scaled["largest"]
    assert plain["softmax gradient"] < 0.8 * scaled["softmax gradient"] <= 1.6
    assert min(plain["score gradient"], scaled["score gradient"]) > 0


def test_smaller_queries_replace_the_scale() -> None:
    folded = language_model(width=64, layers=1, heads=1, attention={"scale": 1.0})
    scaled = language_model(width=64, layers=1, heads=1)
    for model, factor in ((folded, 1 / 8), (scaled, 1.0)):
        torch.manual_seed(0)
        draw_unit_variance(model, factor)
    ids = torch.arange(16)[None]
    torch.testing.assert_close(folded(ids).logits, scaled(ids).logits)
