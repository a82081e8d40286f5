"""The study of sinks: sigmoids in place of the softmax, and verdicts on curves."""

import pytest
import torch

from manyheads import Ragged, Record, Site, Tap
from manyheads.attention import Attention
from manyheads.models import Decoder
from manyheads.taps import Patterns
from studies.sinks.sigmoid_attention import measure_sigmoid_sinks, without_softmax
from studies.sinks.study import judge_onset, judge_removed
from studies.small_models import language_model
from studies.study import Arm, Result, Verdict
from studies.training import logits_of

SCORES, PATTERN = Site(0, Tap.SCORES), Site(0, Tap.PATTERN)
IDS = torch.randint(200, (2, 7), generator=torch.Generator().manual_seed(0))


def small_model() -> Decoder:
    return language_model(width=16, layers=1, heads=2, seed=0)


def plain_result(*shares: float) -> Result:
    """A curve of the plain model at the steps 0, 512, 1024 and 2500."""
    by_step = dict(zip(("0", "512", "1024", "2500"), shares, strict=True))
    result = Result("sinks", "test", {}, "")
    values = {"sink_share": shares[-1], "by_step": {"sink_share": by_step}}
    for seed in range(2):
        result.add(Arm("plain", seed), values, 0.0)
    return result


def test_weights_are_sigmoids_of_the_scores() -> None:
    softmax, batch = small_model(), Ragged.from_list(list(IDS))
    scores, weights = Record([SCORES]), Record([PATTERN])
    softmax(batch, watch=scores)
    without_softmax(small_model())(batch, watch=weights)
    before, after = scores[SCORES], weights[PATTERN]
    assert isinstance(before, Patterns)
    assert isinstance(after, Patterns)
    for text in range(2):
        torch.testing.assert_close(after.of(text), torch.sigmoid(before.of(text)))


def test_a_token_does_not_see_later_ones() -> None:
    model, changed = without_softmax(small_model()), IDS.clone()
    changed[:, 4:] = 3
    before, after = (logits_of(model, ids).unflatten(0, ids.shape) for ids in (IDS, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_weights_that_are_all_alike_give_the_first_token_its_even_share() -> None:
    model = without_softmax(small_model())
    attention = model.stack.layers[0].attention
    assert isinstance(attention, Attention)
    torch.nn.init.zeros_(attention.project.weight)
    even = sum(1 / (query + 1) for query in range(7)) / 7
    values = measure_sigmoid_sinks(model, IDS, sink_length=3)
    assert values["first_token"] == pytest.approx(even)
    # Of three tokens it is (1 + 1/2 + 1/3) / 3, above 0.3.
    assert values["sink_share"] == 1.0


def test_the_step_at_which_sinks_appear_decides() -> None:
    assert judge_onset(plain_result(0.0, 0.01, 0.2, 0.3))[0] is Verdict.HOLDS
    assert judge_onset(plain_result(0.0, 0.2, 0.2, 0.3))[0] is Verdict.WEAKLY
    assert judge_onset(plain_result(0.2, 0.2, 0.2, 0.3))[0] is Verdict.CONTRADICTED
    assert judge_onset(plain_result(0.0, 0.0, 0.0, 0.01))[0] is Verdict.NOT_HERE


def test_only_sinks_that_exist_are_removed() -> None:
    result = plain_result(0.0, 0.1, 0.2, 0.4)
    result.add(Arm("gated"), {"sink_share": 0.1}, 0.0)
    assert judge_removed(result, "gated")[0] is Verdict.HOLDS
    few = plain_result(0.0, 0.0, 0.0, 0.01)
    few.add(Arm("gated"), {"sink_share": 0.0}, 0.0)
    assert judge_removed(few, "gated")[0] is Verdict.NOT_HERE
