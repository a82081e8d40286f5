"""The studio's questions: good ones are answered as the lens answers, bad ones with a message."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from manyheads.decoding.generation import generate
from manyheads.decoding.sampling import Greedy
from manyheads.errors import InputError
from manyheads.lens.attention_maps.patterns import patterns
from manyheads.lens.causal.ablation import ablate_together
from manyheads.progress import Progress
from manyheads.studio.handlers import Handlers
from manyheads.studio.models import LoadedModel, ModelStore
from manyheads.studio.requests import LIMITS, RequestBody
from manyheads.studio.run_cache import never_cancelled
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from manyheads.taps import Head
from tests.studio import models

ADDRESS = "http://127.0.0.1:8765"
TEXT = "The cat sat on the mat. The cat sat"
OTHER = "The dog sat on the mat. The dog sat"


@pytest.fixture(scope="module")
def decoder() -> Any:
    return models.decoder()


@pytest.fixture(scope="module")
def client(decoder: Any) -> Iterator[TestClient]:
    store = [
        ("tiny", decoder),
        ("short", models.learned()),
        ("reads", models.encoder()),
        ("sees", models.vision()),
    ]
    with TestClient(make_app(store, Endpoint(port=8765)), base_url=ADDRESS) as client:
        yield client


def ask(client: TestClient, name: str, **fields: Any) -> Any:
    answer = client.post(f"/api/{name}", json={"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: TestClient, name: str, status: int = 422, **fields: Any) -> str:
    answer = client.post(f"/api/{name}", json={"model": "tiny", "text": TEXT, **fields})
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]
    assert message.endswith(".")
    return message


def image(side: int = 32) -> dict[str, Any]:
    data = np.random.default_rng(0).integers(0, 255, side * side * 3, dtype=np.uint8).tobytes()
    return {"width": side, "height": side, "data": b64encode(data).decode()}


def test_every_model_is_described(client: TestClient) -> None:
    response = client.get("/api/models").json()["models"]
    assert [each["name"] for each in response] == ["tiny", "short", "reads", "sees"]
    assert [each["output"] for each in response] == [
        "next token",
        "next token",
        "masked token",
        "classes",
    ]
    assert [each["generates"] for each in response] == [True, True, False, False]
    assert response[0]["layers"] == [{"layer": layer, "heads": 4} for layer in range(3)]
    assert response[3]["image"] == {"side": 32, "patch": 8, "registers": 0}


def test_a_model_with_nan_in_its_weights_is_described_with_a_warning() -> None:
    model = models.decoder(layers=1)
    assert LoadedModel("tiny", model).describe()["warning"] == ""
    with torch.no_grad():
        next(model.parameters())[0] = torch.nan
    warning = LoadedModel("tiny", model).describe()["warning"]
    assert "embedding.tokens.weight holds NaN or infinity" in warning
    page = files("manyheads.studio").joinpath("page/frame.js").read_text("utf-8")
    assert "side.model.warning" in page


def test_tokens_are_the_letters_of_the_text(client: TestClient) -> None:
    for text in (TEXT, "Привет, мир! 你好", "a\n\n b\t", "<|end|>", "שלום 👋🏽"):
        response = ask(client, "tokens", text=text)
        assert "".join(response["letters"]) == text
        assert not any("\ufffd" in token for token in response["tokens"])
        assert response["start"] == len(response["tokens"]) - 1
        count = ask(client, "token_count", text=text)["tokens"]
        assert count == len(response["tokens"])


def test_a_prediction_inside_a_letter_is_a_byte(client: TestClient) -> None:
    response = ask(client, "predictions", text=TEXT, top_k=LIMITS.predictions)
    assert not any("\ufffd" in each["text"] for each in response["top"])


def test_a_text_is_cut_where_positions_end(client: TestClient) -> None:
    response = ask(client, "tokens", model="short", text=TEXT * 4)
    assert response["truncated"]
    assert len(response["tokens"]) == response["max_tokens"] == 16


def test_a_window_of_the_map_is_the_pattern(client: TestClient, decoder: Any) -> None:
    length = len(ask(client, "tokens", text=TEXT)["tokens"])
    response = ask(client, "attention_map", text=TEXT, heads=["L1H2"], rows=[3, 9], keys=[2, 8])[
        "maps"
    ][0]
    drawn = np.frombuffer(b64decode(response["data"]), dtype="<f4").reshape(6, 6)
    pattern = patterns(decoder, TEXT, [Head(1, 2)]).of(Head(1, 2)).weights
    assert pattern.shape == (length, length)
    assert np.allclose(drawn, pattern[3:9, 2:8].numpy(), atol=1e-6)


def test_a_map_drawn_small_keeps_the_largest_weights(client: TestClient, decoder: Any) -> None:
    length = len(ask(client, "tokens", text=TEXT)["tokens"])
    everything = [0, length]
    response = ask(
        client,
        "attention_map",
        text=TEXT,
        heads=["L0H1"],
        rows=everything,
        keys=everything,
        cells=5,
    )["maps"][0]
    assert (response["height"], response["width"]) == (5, 5)
    drawn = np.frombuffer(b64decode(response["data"]), dtype="<f4")
    pattern = patterns(decoder, TEXT, [Head(0, 1)]).of(Head(0, 1)).weights
    assert drawn.max() == pytest.approx(float(pattern.max()), abs=1e-6)


def test_a_token_looks_and_is_looked_at_as_in_the_pattern(client: TestClient, decoder: Any) -> None:
    pattern = patterns(decoder, TEXT, [Head(2, 3)]).of(Head(2, 3)).weights
    row = ask(client, "attention_from", text=TEXT, heads=["L2H3"], position=6)["heads"]["L2H3"]
    column = ask(client, "attention_to", text=TEXT, heads=["L2H3"], position=1)["heads"]["L2H3"]
    for result, weights in ((row, pattern[6]), (column, pattern[:, 1])):
        assert result["weights"] == sorted(result["weights"], reverse=True)
        for place, weight in zip(result["positions"], result["weights"], strict=True):
            assert weight == pytest.approx(float(weights[place]), abs=1e-4)
        assert result["sum"] == pytest.approx(float(weights.sum()), abs=1e-3)


def test_rows_hold_the_largest_keys_of_each_query(client: TestClient, decoder: Any) -> None:
    response = ask(client, "attention_rows", text=TEXT, heads=["L0H0"], rows=[2, 7], top_k=2)[
        "heads"
    ]["L0H0"]
    pattern = patterns(decoder, TEXT, [Head(0, 0)]).of(Head(0, 0)).weights
    assert [each["positions"] for each in response] == pattern[2:7].topk(2).indices.tolist()


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_heads_that_are_off_change_the_loss_as_ablation_does(
    client: TestClient, decoder: Any, how: Any
) -> None:
    edit = {"ablated": ["L0H1", "L2H0"], "replace_with": how}
    response = ask(client, "predictions", text=TEXT, edits=edit)
    result = ablate_together(
        decoder, [TEXT], [Head(0, 1), Head(2, 0)], replace_with=how, progress=False
    )
    assert response["loss"] == pytest.approx(result.value, abs=1e-4)
    assert response["loss_before"] == pytest.approx(result.baseline, abs=1e-4)
    assert response["divergence"] > 0


def test_answers_are_the_models_own_chances(client: TestClient, decoder: Any) -> None:
    response = ask(client, "predictions", text=TEXT, position=4, top_k=5)
    ids = torch.tensor([decoder.tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        chances = decoder(ids).logits[0, 4].softmax(-1)
    assert [each["id"] for each in response["top"]] == chances.topk(5).indices.tolist()
    assert response["top"][0]["probability"] == pytest.approx(float(chances.max()), rel=1e-3)


def test_all_heads_patched_is_the_other_prompt(client: TestClient) -> None:
    """Attention alone carries one token to another; the last is the same in both prompts."""
    heads = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    same = ask(client, "predictions", text=TEXT, edits={"patched": heads, "source": TEXT})
    assert same["divergence"] == pytest.approx(0, abs=1e-5)
    other = ask(client, "predictions", text=TEXT, edits={"patched": heads, "source": OTHER})
    clean = ask(client, "predictions", text=OTHER)
    # The last token is the same in both prompts, so nothing else is left of this one.
    assert other["top"][0]["id"] == clean["top"][0]["id"]
    assert other["top"][0]["probability"] == pytest.approx(clean["top"][0]["probability"], rel=1e-3)


def test_a_text_is_continued_with_the_patch(client: TestClient) -> None:
    edits = {"patched": ["L0H0", "L1H1", "L2H2"], "source": OTHER}
    best = ask(client, "predictions", text=TEXT, edits=edits)["top"][0]
    body = {"model": "tiny", "text": TEXT, "edits": edits, "max_new_tokens": 2}
    first, second, _ = map(
        json.loads, client.post("/api/generate", json=body).text.strip().splitlines()
    )
    assert first["id"] == best["id"]
    assert first["probability"] == pytest.approx(best["probability"], rel=1e-3)
    assert second["position"] == first["position"] + 1


def test_patching_tells_a_share_for_every_head(client: TestClient) -> None:
    response = ask(client, "patching", text=TEXT, source=OTHER)
    assert len(response["heads"]) == len(response["recovered"]) == 12
    assert "10 tokens" not in refused(client, "patching", source="one")
    assert "tokens" in refused(client, "patching", source=f"{OTHER} again and again")


def test_vectors_are_compared_with_those_of_the_unchanged_model() -> None:
    handlers = Handlers(ModelStore([("vectors", models.vectors())]))
    body = {"model": "vectors", "text": TEXT, "position": 3}
    clean = handlers.predictions(RequestBody(body), never_cancelled)
    assert clean["similarity"] is None
    edited = RequestBody(body | {"edits": {"ablated": ["L0H1", "L1H0"]}})
    similarity = handlers.predictions(edited, never_cancelled)["similarity"]
    assert 0 < similarity["token"] < 1
    assert 0 < similarity["input"] < 1


def test_the_heads_of_two_sides_are_ordered_by_how_much_they_differ(
    client: TestClient, decoder: Any
) -> None:
    one = {"model": "tiny", "text": TEXT}
    same = client.post("/api/comparison", json={"sides": [one, one]}).json()
    assert same["overlap"] == pytest.approx([1.0] * 12)
    other = {**one, "text": OTHER}
    response = client.post("/api/comparison", json={"sides": [one, other]}).json()
    assert response["overlap"] == sorted(response["overlap"])
    assert len(set(response["heads"])) == 12
    layer, head = int(response["heads"][0][1]), int(response["heads"][0][3])
    weights = [
        patterns(decoder, text, [Head(layer, head)]).of(Head(layer, head)).weights
        for text in (TEXT, OTHER)
    ]
    shared = float(torch.minimum(*weights).sum() / 10)
    assert response["overlap"][0] == pytest.approx(shared, abs=1e-4)
    for sides, says in (
        ([one], "sides has 1 objects"),
        ([one, 5], "must be a list of objects"),
        ([one, {**one, "text": "The cat"}], "the same number of tokens"),
    ):
        answer = client.post("/api/comparison", json={"sides": sides})
        assert answer.status_code == 422
        assert says in answer.json()["error"]


def test_statistics_come_for_every_head(client: TestClient) -> None:
    response = ask(client, "statistics", text=TEXT)
    assert len(response["heads"]) == 12
    assert all(len(values) == 12 for values in response["statistics"].values())
    assert {"entropy", "previous_token", "induction"} <= set(response["statistics"])


def test_writing_comes_line_by_line_and_is_what_the_model_writes(
    client: TestClient, decoder: Any
) -> None:
    body = {"model": "tiny", "text": TEXT, "heads": ["L1H0"], "max_new_tokens": 5, "temperature": 0}
    with client.stream("POST", "/api/generate", json=body) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[-1]["done"]
    ids = [line["id"] for line in lines[:-1]]
    written = generate(decoder, TEXT, max_new_tokens=5, sampling=Greedy())
    assert tuple(ids) == written.ids
    assert "".join(line["text"] for line in lines) == written.text
    length = len(decoder.tokenizer.encode(TEXT).ids)
    for step, line in enumerate(lines[:-1]):
        assert line["position"] == length + step
        assert sum(line["heads"]["L1H0"]["weights"]) == pytest.approx(1, abs=0.01)


def test_writing_without_a_head_differs(client: TestClient) -> None:
    heads = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]

    def written(edit: dict[str, Any]) -> str:
        body = {"model": "tiny", "text": TEXT, "max_new_tokens": 6, "edits": edit}
        return client.post("/api/generate", json=body).text

    assert written({}) == written({})
    assert written({"ablated": heads}) != written({})


def test_images_are_read_as_patches(client: TestClient) -> None:
    response = ask(client, "tokens", model="sees", image=image())
    assert len(response["tokens"]) == 17
    looked = ask(client, "attention_from", model="sees", image=image(), heads=["L0H0"], position=0)
    assert looked["heads"]["L0H0"]["sum"] == pytest.approx(1, abs=1e-3)
    answered = ask(client, "predictions", model="sees", image=image(), edits={"ablated": ["L1H1"]})
    assert sum(each["probability"] for each in answered["top"]) == pytest.approx(1, abs=1e-3)
    assert len(ask(client, "statistics", model="sees", image=image())["heads"]) == 8


def test_an_encoder_predicts_the_masked_token(client: TestClient) -> None:
    response = ask(client, "predictions", model="reads", text=TEXT, position=2)
    assert response["output"] == "masked token"
    assert response["loss"] is None


def test_a_long_text_is_answered_by_windows(client: TestClient) -> None:
    text = models.WORDS * 110
    response = ask(client, "tokens", text=text)
    length = len(response["tokens"])
    assert length > 2048
    row = ask(client, "attention_from", text=text, heads=["L0H0"], position=length - 1)["heads"][
        "L0H0"
    ]
    assert row["sum"] == pytest.approx(1, abs=1e-3)
    everything = [0, length]
    small = ask(
        client,
        "attention_map",
        text=text,
        heads=["L0H0"],
        rows=everything,
        keys=everything,
        cells=9,
    )
    assert small["maps"][0]["height"] == 9
    assert ask(client, "statistics", text=text)["tokens"] == LIMITS.statistics_tokens


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("tokens", {"model": "none"}, "there is no model 'none'"),
        ("tokens", {"text": ""}, "the text is empty"),
        ("tokens", {"text": "\ud800"}, "incomplete character"),
        ("tokens", {"text": 5}, "text must be a string, got 5"),
        ("tokens", {"text": "a" * 400_001}, "400,001 characters"),
        ("tokens", {"txt": TEXT}, "unknown field 'txt'"),
        ("tokens", {"model": "sees"}, "reads images"),
        ("tokens", {"image": {"width": 8, "height": 8, "data": "!"}}, "not valid base64"),
        ("tokens", {"image": {"width": 8, "height": 8, "data": "AAAA"}}, "192 in total"),
        ("attention_from", {"heads": ["L9H9"], "position": 0}, "there is no head L9H9"),
        ("attention_from", {"heads": ["L0H0"], "position": 10_000}, "got 10000"),
        ("attention_from", {"heads": 5, "position": 0}, "must be a list of heads"),
        (
            "attention_from",
            {"heads": [f"L0H{head}" for head in range(13)], "position": 0},
            "heads has 13 heads",
        ),
        ("attention_rows", {"heads": ["L0H0"], "rows": [0, 100_000]}, "must be [start, stop]"),
        ("attention_map", {"heads": ["L0H0"], "rows": [0, 3], "keys": [3, 3]}, "got [3, 3]"),
        (
            "predictions",
            {"edits": {"ablated": ["L0H0"], "replace_with": "noise"}},
            'must be "zero" or "mean", got "noise"',
        ),
        ("predictions", {"edits": {"patched": ["L0H0"]}}, "source is missing"),
        ("predictions", {"edits": {"patched": ["L0H0"], "source": "one"}}, "the other prompt has"),
        ("generate", {"max_new_tokens": 10_000}, "512, got 10000"),
        ("generate", {"temperature": -1}, "5.0, got -1"),
        ("generate", {"model": "reads"}, "cannot generate text"),
        ("generate", {"model": "short", "max_new_tokens": 400}, "positions"),
        ("patching", {"source": TEXT}, "for both prompts"),
        ("kinds", {}, "unknown field 'text'"),
    ],
)
def test_a_bad_request_gets_a_sentence(
    client: TestClient, name: str, fields: dict[str, Any], says: str
) -> None:
    body = json.dumps({"model": "tiny", "text": TEXT, **fields}, ensure_ascii=True)
    answer = client.post(f"/api/{name}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert says in answer.json()["error"]


def test_the_measurement_of_kinds_reports_how_far_it_is(
    client: TestClient, decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = Handlers(ModelStore([("tiny", decoder)]))
    reports = []

    def measured(*_: Any, **__: Any) -> Any:
        with Progress("reading", total=4, enabled=False) as bar:
            bar.advance()
            reports.append(handlers.kinds_progress())
        raise InputError("enough", "")

    monkeypatch.setattr("manyheads.studio.handlers.kinds", measured)
    with pytest.raises(InputError, match="enough"):
        handlers.kinds(RequestBody({"model": "tiny"}), never_cancelled)
    [report] = reports
    assert report == {"model": "tiny", "label": "reading", "fraction": 0.25, "seconds": 0}
    assert handlers.kinds_progress() == {}
    assert client.get("/api/kinds_progress").json() == {}


def test_heads_get_names(client: TestClient) -> None:
    result = ask(client, "kinds", model="sees")
    response, nearest = result["heads"], result["nearest"]
    assert set(response) == {f"L{layer}H{head}" for layer in range(2) for head in range(4)}
    assert set(nearest) == {head for head, labels in response.items() if not labels}
    every = [*nearest.values(), *(label for labels in response.values() for label in labels)]
    wanted = {"name", "score", "interval", "samples", "sample", "draws", "threshold", "evidence"}
    assert all(wanted <= set(label) for label in every)
