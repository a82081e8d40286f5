"""Routes are those of the model, and what is measured of them is right in plain cases."""

import math

import pytest
import torch

from manyheads.parts import Experts
from studies.byte_texts import ByteTexts
from studies.experts.judges import DENSE, FOURFOLD, MAIN, ONE, WHOLE
from studies.experts.routing import (
    agreement,
    balanced_loss,
    byte_classes,
    entropy,
    find_routes,
    measure_choices,
    measure_loads,
    mutual_information,
    overlap,
    read_documents,
    write_routes,
)
from studies.experts.study import STUDY, count_weights, feedforward_of
from studies.small_models import language_model
from studies.training import next_byte_loss

SETTINGS = STUDY.settings("test")


def routed_model() -> torch.nn.Module:
    experts = Experts(width=16, hidden=8, count=4, top_k=2)
    return language_model(width=16, layers=2, heads=2, feedforward=experts).eval()


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def test_routes_are_the_two_largest_logits_in_order() -> None:
    model, ids = routed_model(), some_bytes(3, 8)
    seen = []
    model.stack.layers[1].feedforward.router.register_forward_hook(
        lambda *call: seen.append(call[-1])
    )
    routes = find_routes(model, ids, batch=2)
    assert routes.shape == (2, 3, 8, 2)
    expected = torch.cat(seen).view(3, 8, 4).argsort(-1, descending=True)[..., :2]
    assert torch.equal(routes[1], expected)


def test_the_balancing_loss_is_added_with_its_weight() -> None:
    model, ids = routed_model(), (some_bytes(2, 9),)
    with torch.no_grad():
        plain, some, more = (balanced_loss(weight)(model, ids) for weight in (0.0, 0.1, 0.2))
        torch.testing.assert_close(plain, next_byte_loss(model, ids))
        # Two layers that are nearly even have a balance of about one.
        assert float(some - plain) == pytest.approx(0.2, rel=0.3)
        torch.testing.assert_close(more - plain, 2 * (some - plain), rtol=1e-4, atol=1e-5)


def test_arms_compute_alike_and_have_the_weights_that_they_name() -> None:
    def weights(name: str) -> dict[str, float]:
        inner = feedforward_of(name, SETTINGS)
        return count_weights(language_model(width=16, layers=1, heads=2, feedforward=inner), inner)

    routers = 16 * SETTINGS["count"] / 1e6
    dense, experts = weights(DENSE), weights(MAIN)
    assert dense["active"] == dense["weights"]
    assert experts["active"] == pytest.approx(dense["active"] + routers)
    assert experts["weights"] == pytest.approx(weights(WHOLE)["weights"] + routers)
    assert weights(ONE)["weights"] == pytest.approx(weights(WHOLE)["weights"] + routers / 2)
    assert weights(FOURFOLD)["active"] == pytest.approx(dense["active"] + 4 * routers)


def test_mutual_information_is_all_of_a_copy_and_nothing_of_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(8, (4000,), generator=generator) for _ in range(2))
    assert entropy(first) == pytest.approx(3, abs=0.01)
    assert mutual_information(first, 7 - first) == pytest.approx(entropy(first), abs=0.01)
    assert mutual_information(first, second) == pytest.approx(0, abs=0.004)
    assert mutual_information(first, first // 4) == pytest.approx(1, abs=0.01)


def test_loads_are_even_or_on_few_experts() -> None:
    even = torch.arange(8).view(1, 2, 2, 2)
    assert measure_loads(even, 8) == {
        "violation": pytest.approx(0),
        "evenness": pytest.approx(1),
        "dead": 0,
        "most_dead": 0,
    }
    loads = measure_loads(torch.cat([even, even // 4]), 8)
    assert loads["violation"] == pytest.approx(1.5)
    assert loads["dead"] == pytest.approx(3 / 8)
    assert loads["most_dead"] == pytest.approx(6 / 8)
    assert loads["evenness"] == pytest.approx((1 + 1 / 3) / 2)


def test_choices_by_class_and_by_document_are_distinct() -> None:
    ids = torch.tensor([*b"ab1 cd2 "] * 64).view(8, 64)
    by_class = byte_classes(ids)[None, ..., None]
    by_document = torch.arange(8).repeat_interleave(64).view(1, 8, 64, 1)
    follows, stays = (measure_choices(each, ids, 8) for each in (by_class, by_document))
    assert follows["class"] == pytest.approx(1, abs=0.02)
    assert follows["document"] == pytest.approx(0, abs=0.02)
    assert stays["document"] == pytest.approx(1, abs=0.03)
    assert stays["class"] == pytest.approx(0, abs=0.02)
    assert stays["repeated"] == 1
    assert stays["by chance"] == pytest.approx(1 / 8)


def test_classes_of_bytes() -> None:
    assert byte_classes(torch.tensor([*b"aZ7 \n[.", 200])).tolist() == list(range(8))


def test_overlap_counts_choices_in_any_order() -> None:
    routes = torch.tensor([[0, 1], [2, 3]])
    assert overlap(routes, routes.flip(1)) == 1
    assert overlap(routes, torch.tensor([[1, 2], [0, 1]])) == 0.25


def test_seeds_agree_if_one_renames_the_experts_of_the_other() -> None:
    routes = torch.arange(4).repeat(100).view(1, 4, 100, 1)
    renamed = (routes + 1) % 4
    written = [write_routes(each, 400) for each in (routes, renamed)]
    assert written[0][0][:5] == "ABCDA"
    assert agreement(written) == pytest.approx(1, abs=0.01)
    assert math.isnan(agreement(written[:1]))


def test_documents_lie_apart_in_the_held_out_text() -> None:
    texts = ByteTexts("topics", "cpu", 20_000)
    ids = read_documents(texts, 3, 2, 10)
    held_out = texts.parts["held out"]
    assert ids.shape == (6, 10)
    assert ids[:2].flatten().tolist() == held_out[:20].tolist()
    assert ids[4:].flatten().tolist() == held_out[-20:].tolist()
