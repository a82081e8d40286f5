"""Why this word: the numbers behind the card are those of the lens, and parts sum to the logit."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads import load
from manyheads.lens.attention_maps.patterns import patterns
from manyheads.lens.attribution.direct_logits import attribute_logits, logit_lens
from manyheads.lens.attribution.link_reasons import why
from manyheads.lens.attribution.source_tokens import token_routes
from manyheads.lens.causal.attention_links import cut
from manyheads.lens.causal.patching import Patch, patch
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.progress import Progress
from manyheads.studio.examples import BUNDLED
from manyheads.studio.models import ModelStore
from manyheads.studio.requests import LIMITS, DisconnectedError, RequestBody
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from manyheads.studio.why import WhyHandlers
from manyheads.taps import Head, Sublayer
from tests.studio import models
from tests.studio.test_handlers import ADDRESS, OTHER, TEXT, ask, image, refused

LINK = ["L1H2", 9, 2]


@pytest.fixture(scope="module")
def decoder() -> Any:
    return models.decoder()


@pytest.fixture(scope="module")
def client(decoder: Any) -> Iterator[TestClient]:
    store = [
        ("tiny", decoder),
        ("fills", models.masked()),
        ("sees", models.vision()),
        ("points", models.vectors()),
    ]
    with TestClient(make_app(store, Endpoint(port=8765)), base_url=ADDRESS) as client:
        yield client


def total(parts: dict[str, Any]) -> float:
    layers = (
        sum(head["value"] for head in layer["heads"]) + layer.get("feedforward", 0)
        for layer in parts["layers"]
    )
    return float(parts["embedding"] + parts["biases"] + sum(layers))


def test_every_layer_is_read_as_the_logit_lens_reads_it(client: TestClient, decoder: Any) -> None:
    response = ask(client, "why_lens", text=TEXT, position=5)
    lens = logit_lens(decoder, [TEXT], [response["target"]["id"]], at=[5], top_k=3)
    assert len(response["steps"]) == 4
    for step, shown in enumerate(response["steps"]):
        assert [word["id"] for word in shown["top"]] == lens.answers[step, 0].tolist()
        own = float(lens.answer_log_probabilities[step, 0].exp())
        assert shown["probability"] == pytest.approx(own, rel=1e-4)
        assert shown["rank"] == int(lens.answer_ranks[step, 0])
    assert response["settled"] == int(lens.settled()[0])
    unlikely = ask(client, "why_lens", text=TEXT, position=5, target=7)
    assert unlikely["settled"] is None


def test_parts_sum_to_the_difference_of_two_logits(client: TestClient, decoder: Any) -> None:
    response = ask(client, "why_parts", text=TEXT, position=5)
    target, foil = (response[name]["id"] for name in ("target", "foil"))
    assert [word["id"] for word in response["candidates"]][:2] == [target, foil]
    assert total(response) == pytest.approx(response["value"], abs=1e-4)
    direct = attribute_logits(decoder, [TEXT], [target], [foil], at=[5])
    heads = [head["value"] for layer in response["layers"] for head in layer["heads"]]
    assert heads == pytest.approx(direct.by_head[0].tolist(), abs=1e-5)
    for layer, shown in enumerate(response["layers"]):
        added = float(direct.layers[Sublayer.FEEDFORWARD, layer][0])
        assert shown["feedforward"] == pytest.approx(added, abs=1e-5)
    alone = ask(client, "why_parts", text=TEXT, position=5, alone=True)
    assert alone["foil"] is None
    assert total(alone) == pytest.approx(alone["value"], abs=1e-4)
    typed = ask(client, "why_parts", text=TEXT, position=5, target="dog", foil=target)
    assert typed["target"]["text"].strip() == "dog"


def test_routes_are_those_of_the_lens_and_sum_to_what_heads_add(
    client: TestClient, decoder: Any
) -> None:
    response = ask(client, "why_parts", text=TEXT)
    target, foil = (response[name]["id"] for name in ("target", "foil"))
    routes = token_routes(decoder, [TEXT], target, foil)
    heads = sum(head["value"] for layer in response["layers"] for head in layer["heads"])
    assert sum(response["tokens"]) + response["rest"] == pytest.approx(heads, abs=1e-4)
    expected = {(str(route.head), route.token): route.value for route in routes.ranked(40)}
    shown = {(route["head"], route["token"]): route["value"] for route in response["routes"]}
    assert shown == pytest.approx(expected, abs=1e-5)


def test_edits_are_part_of_the_explanation(client: TestClient) -> None:
    edits = {"ablated": ["L0H1"], "links": [LINK], "patched": ["L2H0"], "source": OTHER}
    parts = ask(client, "why_parts", text=TEXT, edits=edits, alone=True)
    top = ask(client, "predictions", text=TEXT, edits=edits)["top"][0]
    assert parts["target"]["id"] == top["id"]
    assert parts["candidates"][0]["probability"] == top["probability"]
    assert total(parts) == pytest.approx(parts["value"], abs=1e-4)
    assert parts["layers"][0]["heads"][1]["value"] == 0.0
    assert not any(route["head"] in ("L0H1", "L2H0") for route in parts["routes"])
    assert not any(route["head"] == "L1H2" and route["token"] == 2 for route in parts["routes"])
    lens = ask(client, "why_lens", text=TEXT, edits=edits)
    assert lens["steps"][-1]["probability"] == pytest.approx(top["probability"], rel=1e-4)
    assert lens["settled"] is not None


def test_a_link_is_explained_as_in_the_lens(client: TestClient, decoder: Any) -> None:
    response = ask(client, "why_link", text=TEXT, head="L2H1", query=9, key=3)
    result = why(decoder, [TEXT], "L2H1", 9, 3, against="mean")
    assert response["score"] == pytest.approx(result.score, abs=1e-5)
    pairs = [tuple(pair.values()) for pair in response["pairs"]]
    assert [pair[:2] for pair in pairs] == [pair[:2] for pair in result.ranked(len(pairs))]
    for side in ("query_side", "key_side"):
        sent = {part["writer"]: part["value"] for part in response[side]}
        expected = dict(list(getattr(result, side).items())[: len(sent)])
        assert sent == pytest.approx(expected, abs=1e-5)
    edits = {"ablated": ["L0H1"], "links": [["L1H2", 9, 2]]}
    edited = ask(client, "why_link", text=TEXT, edits=edits, head="L2H1", query=9, key=3)
    assert edited["score"] != response["score"]
    assert ask(client, "why_link", model="points", text=TEXT, head="L0H0", query=2, key=1)["pairs"]


def test_a_link_that_the_mask_hides_has_no_reasons(client: TestClient) -> None:
    hidden = ask(client, "why_link", text=TEXT, head="L2H1", query=3, key=9)
    assert "does not see key 9" in hidden["reason"]


def test_a_cut_link_changes_predictions_as_in_the_lens(client: TestClient, decoder: Any) -> None:
    edits = {"links": [LINK, ["L0H0", 4, 0], ["L0H0", 4, 1]]}
    response = ask(client, "predictions", text=TEXT, edits=edits)
    links = [("L1H2", 9, 2), ("L0H0", 4, 0), ("L0H0", 4, 1)]
    result = cut(decoder, [TEXT], links, logits=True, progress=False)
    assert result.after is not None
    after = result.after[0].softmax(-1)
    for word in response["top"]:
        assert word["probability"] == pytest.approx(float(after[word["id"]]), rel=1e-3)
    body = {"text": TEXT, "edits": edits, "heads": ["L1H2"], "top_k": 12}
    row = ask(client, "attention_from", position=9, **body)["heads"]["L1H2"]
    assert 2 not in row["positions"]
    assert row["sum"] == pytest.approx(1.0)
    # The others grow as if the mask hid the key.
    edits = {"links": [LINK]}
    row = ask(client, "attention_from", position=9, **body | {"edits": edits})["heads"]["L1H2"]
    full = patterns(decoder, [TEXT], "L1H2").of("L1H2").weights[9].tolist()
    expected = [full[place] / (1 - full[2]) for place in row["positions"]]
    assert row["weights"] == pytest.approx(expected, abs=1e-4)


def test_links_that_cannot_be_cut_are_refused(client: TestClient) -> None:
    for links, message in (
        ([["L1H2", 2, 9]], "does not see key 9"),
        ([["L1H2", 99, 0]], "has no token 99"),
        ([["L9H2", 3, 0]], "L9H2"),
        ([["L1H2", -1, 0]], "must be a list of links"),
        ([["L1H2", 1, 0]] * (LIMITS.cut_links + 1), "cut at most"),
    ):
        assert message in refused(client, "predictions", edits={"links": links})
    assert "restore them" in refused(client, "generate", edits={"links": [LINK]})


def test_places_restore_what_patching_restores(client: TestClient, decoder: Any) -> None:
    response = ask(client, "why_places", text=TEXT, source=OTHER, layer=1, component="attention")
    answer, target = (response[name]["id"] for name in ("answer", "target"))
    metric = LogitDifference(answer=(answer,), distractor=(target,))
    components: Any = ("attention",)
    result = patch(
        decoder, [OTHER], [TEXT], metric, components=components, positions="each", progress=False
    )
    expected = [result[Patch("attention", 1, position=place)] for place in range(10)]
    assert response["recovered"] == pytest.approx(expected, abs=1e-4)
    assert response["layers"] == 3
    first = ask(client, "why_places", text=TEXT, source=OTHER, layer=0, position=8)
    # The first layer reads only the words, and both prompts differ in two of them.
    assert [place for place, value in enumerate(first["recovered"]) if abs(value) > 1e-4] == [1, 8]


def test_a_view_without_meaning_has_a_reason(client: TestClient) -> None:
    def reason(name: str, **fields: Any) -> str:
        message: str = ask(client, name, **fields)["reason"]
        assert message.endswith(".")
        return message

    assert "2 tokens and this one 10" in reason("why_places", text=TEXT, source="The dog", layer=0)
    assert "for both prompts" in reason("why_places", text=TEXT, source=TEXT, layer=0)
    long = "the cat " * LIMITS.attribution_tokens
    assert f"{LIMITS.attribution_tokens:,}" in reason("why_parts", text=long)
    assert "predicts no word" in reason("why_lens", model="points", text=TEXT)
    masked = {"model": "fills", "text": "The cat[MASK] on the mat.", "position": 2}
    assert "not linear" in reason("why_parts", **masked)
    assert len(ask(client, "why_lens", **masked)["steps"]) == 3
    picture = {"model": "sees", "image": image()}
    assert "one class" in reason("why_lens", **picture)
    assert "reads images" in reason("why_places", **picture, source=TEXT, layer=0)
    parts = ask(client, "why_parts", **picture)
    assert total(parts) == pytest.approx(parts["value"], abs=1e-4)
    assert len(parts["tokens"]) == 17
    named = ask(client, "why_parts", **picture, target="class 3")
    assert named["target"]["id"] == 3


def test_a_word_or_place_that_does_not_exist_is_refused(client: TestClient) -> None:
    assert "use 0 to 319" in refused(client, "why_parts", target=320)
    assert "tokens of this model" in refused(client, "why_parts", target="dogcatlog")
    assert "with itself" in refused(client, "why_parts", target=5, foil=5)
    assert '"residual" or' in refused(client, "why_places", source=OTHER, layer=0, component="x")
    assert "from 0 to 2" in refused(client, "why_places", source=OTHER, layer=3)


def test_patching_stops_when_the_page_goes_away(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = WhyHandlers(ModelStore([("tiny", decoder)]))
    gone, advance = [False], Progress.advance

    def leave(self: Progress, *amount: Any) -> None:
        gone[0] = True
        advance(self, *amount)

    monkeypatch.setattr(Progress, "advance", leave)
    body = RequestBody({"model": "tiny", "text": TEXT, "source": OTHER, "layer": 0})
    with pytest.raises(DisconnectedError):
        handlers.why_places(body, lambda: gone[0])


def test_the_same_links_are_the_same_edits() -> None:
    """Links are sorted, so that the same edits are one run of the cache."""
    body = RequestBody({"edits": {"links": [["L1H0", 3, 1], ["L0H1", 2, 0], ["L1H0", 3, 1]]}})
    edits = body.edits(models.decoder(layers=2))
    assert edits.links == ((Head(0, 1), 2, 0), (Head(1, 0), 3, 1))
    assert edits.layers == {0, 1}
    assert not edits.empty


def test_the_numbers_of_the_guide_hold() -> None:
    example = BUNDLED["house-gpt"][0]
    with TestClient(
        make_app([("house-gpt", load("house-gpt"))], Endpoint(port=8765)), base_url=ADDRESS
    ) as client:
        fields = {"model": "house-gpt", "text": example.text}
        cut_once = ask(client, "predictions", **fields, edits={"links": [["L2H6", 27, 3]]})
        parts = ask(client, "why_parts", **fields)
        lens = ask(client, "why_lens", **fields)
        places = [
            ask(client, "why_places", **fields, source=example.source, layer=layer)["recovered"]
            for layer in (2, 3)
        ]
    assert cut_once["top"][0]["before"] == pytest.approx(0.82, abs=0.005)
    assert cut_once["top"][0]["probability"] == pytest.approx(0.28, abs=0.005)
    assert (parts["target"]["text"], parts["foil"]["text"]) == ("he", "ad")
    assert parts["value"] == pytest.approx(2.88, abs=0.01)
    heads = {head["head"]: head["value"] for layer in parts["layers"] for head in layer["heads"]}
    assert (heads["L2H6"], heads["L2H7"]) == pytest.approx((2.85, 1.87), abs=0.01)
    assert [route["token"] for route in parts["routes"][:2]] == [3, 3]
    # Step 3 is after layer 2.
    assert lens["settled"] == 3
    assert [row.index(max(row)) for row in places] == [3, 27]
