"""The examples show what they say, on the models that they are shipped for."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads import load
from manyheads.checkpoints.hub import folder_of
from manyheads.checkpoints.pip_models import PIP_MODELS, is_fetched
from manyheads.studio.examples import BUNDLED, PRONOUN
from manyheads.studio.models import LoadedModel
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from tests.studio import models

# The prediction at the selected token of each example, and its probability.
PREDICTED = {
    "house-gpt": {
        "Repeated name": ("he", 0.82),
        "Repeated treaty": ("a", 0.99),
        "Known phrase": (" States", 0.84),
    },
    "house-gpt-gated": {
        "Repeated name": ("he", 0.98),
        "Repeated treaty": ("a", 1.0),
        "Known phrase": (" States", 0.69),
    },
    "house-bert": {
        "Repeated name": ("he", 1.0),
        "Repeated word": (" battle", 0.94),
        "Known phrase": (" largest", 0.82),
    },
    "smollm2": {
        "Repetition": (" dog", 0.99),
        "Names": (" Mary", 0.94),
        "A story": (" would", 0.73),
    },
}
# The same with the heads of the example's button switched off.
WITHOUT = {
    ("house-gpt", "Repeated name"): 0.06,
    ("house-gpt", "Repeated treaty"): 0.04,
    ("house-gpt-gated", "Repeated name"): 0.07,
    ("house-gpt-gated", "Repeated treaty"): 0.03,
    ("house-bert", "Repeated word"): 0.75,
    ("house-bert", "Known phrase"): 0.71,
    ("smollm2", "Names"): 0.53,
}
AVAILABLE = [name for name in BUNDLED if name not in PIP_MODELS or is_fetched(name)]
# A test has a cache of its own, without what was fetched.
FETCHED = {name: folder_of(name) for name in AVAILABLE if name in PIP_MODELS}
needs_smollm2 = pytest.mark.skipif("smollm2" not in AVAILABLE, reason="manyheads get smollm2")
needs_minilm = pytest.mark.skipif("minilm" not in AVAILABLE, reason="manyheads get minilm")


@pytest.fixture(scope="module")
def client() -> Any:
    store = [(name, load(FETCHED.get(name, name))) for name in AVAILABLE]
    app = make_app(store, Endpoint(port=8765))
    with TestClient(app, base_url="http://127.0.0.1:8765") as client:
        yield client


def ask(client: TestClient, name: str, model: str, text: str, **fields: Any) -> Any:
    answer = client.post(f"/api/{name}", json={"model": model, "text": text, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def attended(client: TestClient, model: str, text: str, at: int, head: str) -> int:
    """The token that a head attends to most."""
    response = ask(client, "attention_from", model, text, heads=[head], position=at)
    position: int = response["heads"][head]["positions"][0]
    return position


@pytest.mark.parametrize("name", [name for name in PREDICTED if name in AVAILABLE])
def test_every_example_predicts_what_it_promises(client: TestClient, name: str) -> None:
    for example in BUNDLED[name]:
        at = ask(client, "tokens", name, example.text)["start"]
        best = ask(client, "predictions", name, example.text, position=at)["top"][0]
        token, probability = PREDICTED[name][example.name]
        assert best["text"] == token
        assert best["probability"] == pytest.approx(probability, abs=0.01)


@pytest.mark.parametrize("name", [name for name in PREDICTED if name in AVAILABLE])
def test_the_button_of_an_example_makes_its_word_unlikely(client: TestClient, name: str) -> None:
    with_button = [example for example in BUNDLED[name] if example.ablate]
    assert {(name, example.name) for example in with_button} == {
        pair for pair in WITHOUT if pair[0] == name
    }
    for example in with_button:
        assert set(example.ablate) <= set(example.heads)
        assert ("three" in example.button) == (len(example.ablate) == 3)
        assert ("both" in example.button) == (len(example.ablate) == 2)
        at = ask(client, "tokens", name, example.text)["start"]
        off = {"ablated": list(example.ablate)}
        top = ask(client, "predictions", name, example.text, position=at, edits=off)["top"]
        best = max(top, key=lambda token: token["before"])
        assert best["text"] == PREDICTED[name][example.name][0]
        assert best["probability"] == pytest.approx(WITHOUT[name, example.name], abs=0.01)


@pytest.mark.parametrize(
    ("name", "induction", "previous"),
    [("house-gpt", ("L2H6", "L2H7"), "L1H0"), ("house-gpt-gated", ("L3H7",), "L2H5")],
)
def test_the_selected_heads_do_it(
    client: TestClient, name: str, induction: tuple[str, ...], previous: str
) -> None:
    for example in BUNDLED[name][:2]:
        assert set(example.heads) == {*induction, previous}
        tokens = ask(client, "tokens", name, example.text)["tokens"]
        last = len(tokens) - 1
        copied = tokens.index(PREDICTED[name][example.name][0])
        for head in induction:
            assert attended(client, name, example.text, last, head) == copied
        assert attended(client, name, example.text, last, previous) == last - 1
        assert attended(client, name, example.text, copied, previous) == copied - 1
        off = {"ablated": list(example.heads)}
        top = ask(client, "predictions", name, example.text, edits=off)["top"]
        [best] = [each for each in top if each["text"] == tokens[copied]]
        assert best["probability"] < best["before"] / 2


def test_no_other_heads_do_it_as_clearly(client: TestClient) -> None:
    response = ask(client, "statistics", "house-gpt", BUNDLED["house-gpt"][0].text)

    def best(measure: str, count: int) -> set[str]:
        values = dict(zip(response["heads"], response["statistics"][measure], strict=True))
        return set(sorted(values, key=values.__getitem__)[-count:])

    assert best("induction", 2) == {"L2H6", "L2H7"}
    assert best("previous_token", 1) == {"L1H0"}


def test_masked_models_select_the_mask_and_copy(client: TestClient) -> None:
    for example in BUNDLED["house-bert"]:
        response = ask(client, "tokens", "house-bert", example.text)
        assert response["tokens"][response["start"]] == "[MASK]"
    name = BUNDLED["house-bert"][0]
    tokens = ask(client, "tokens", "house-bert", name.text)["tokens"]
    at = tokens.index("[MASK]")
    assert attended(client, "house-bert", name.text, at, "L3H1") == tokens.index("he")
    for head, step in (("L2H4", -1), ("L2H1", 1)):
        assert attended(client, "house-bert", name.text, at, head) == at + step


@pytest.mark.parametrize("name", ["house-gpt", "house-gpt-gated"])
def test_the_pairs_for_patching_work_at_the_first_try(client: TestClient, name: str) -> None:
    pairs = [each for each in BUNDLED[name] if each.source]
    assert len(pairs) == 2
    for example in pairs:
        response = ask(client, "patching", name, example.text, source=example.source)
        assert response["distractor"] == PREDICTED[name][example.name][0]
        by_head = dict(zip(response["heads"], response["recovered"], strict=True))
        best = sorted(by_head, key=by_head.__getitem__)[-2:]
        assert example.heads[0] in best


@needs_smollm2
def test_smollm2_opens_on_heads_that_do_what_its_captions_say(client: TestClient) -> None:
    repetition, names, _ = BUNDLED["smollm2"]
    tokens = ask(client, "tokens", "smollm2", repetition.text)["tokens"]
    last, dog = len(tokens) - 1, tokens.index(" dog")
    assert repetition.heads[0] == "L17H4"
    for head in ("L17H4", "L17H5"):
        assert attended(client, "smollm2", repetition.text, last, head) == dog
    assert attended(client, "smollm2", repetition.text, last, "L16H0") == last - 1
    assert attended(client, "smollm2", repetition.text, dog, "L16H0") == dog - 1
    tokens = ask(client, "tokens", "smollm2", names.text)["tokens"]
    repeated = [place for place, token in enumerate(tokens) if token == " John"][1]
    for head in ("L20H0", "L23H3"):
        assert attended(client, "smollm2", names.text, len(tokens) - 1, head) == repeated
    edits = {"ablated": list(names.heads)}
    [mary] = ask(client, "predictions", "smollm2", names.text, edits=edits)["top"][:1]
    assert mary["text"] == " Mary"
    assert mary["probability"] < 0.6 * mary["before"]


@needs_minilm
def test_minilm_opens_on_heads_that_find_the_animal(client: TestClient) -> None:
    example = BUNDLED["minilm"][0]
    response = ask(client, "tokens", "minilm", example.text)
    tokens, at = response["tokens"], response["start"]
    assert tokens[at] == "it"
    for head in example.heads:
        assert attended(client, "minilm", example.text, at, head) == tokens.index("animal")
    edits = {"ablated": list(example.heads)}
    moved = ask(client, "predictions", "minilm", example.text, position=at, edits=edits)
    assert moved["similarity"]["token"] < moved["similarity"]["input"] < 0.995


def test_a_mask_is_read_with_its_space_and_in_lower_case() -> None:
    fills = LoadedModel("fills", models.masked())
    closed = fills.read_text("The cat sat on[MASK] mat.")
    assert closed.note == ""
    for typed in ("on [MASK] mat.", "on [mask] mat.", "on[Mask] mat.", "on <mask> mat."):
        text = fills.read_text(f"The cat sat {typed}")
        assert text.tokens == closed.tokens
        assert text.tokens[text.start] == "[MASK]"
        assert ("space before [MASK]" in text.note) == (" [" in typed or " <" in typed)
        assert fills.count_tokens(f"The cat sat {typed}") == len(closed)


def test_the_pronoun_of_the_example_is_selected() -> None:
    reads = LoadedModel("reads", models.encoder())
    text = reads.read_text(PRONOUN.text)
    assert text.letters is not None
    assert text.letters[text.start] == " it"
    assert reads.read_text("The cat sat on it while it rained.").start != text.start


def test_other_models_get_examples_that_they_can_read() -> None:
    decoder = LoadedModel("tiny", models.decoder(layers=1)).describe()["examples"]
    tiny = LoadedModel("tiny", models.decoder(layers=1))
    for example in decoder:
        if example["source"]:
            assert tiny.count_tokens(example["source"]) == tiny.count_tokens(example["text"])
    plain = LoadedModel("reads", models.encoder()).describe()["examples"]
    assert not any(example["source"] for example in plain)
    reads = LoadedModel("fills", models.masked())
    for example in reads.describe()["examples"]:
        text = reads.read_text(example["text"])
        assert text.tokens[text.start] == "[MASK]"
        # The tokenizer of bytes would make a token of the space before a mask.
        assert text.tokens[text.start - 1] != " "
