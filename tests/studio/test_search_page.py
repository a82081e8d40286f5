"""The page of search: documents found and explained, in JSON and in a browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient

from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from manyheads.tasks.search.documents import Document
from manyheads.tasks.search.index import Index
from tests.chromium import needs_chromium
from tests.studio import models
from tests.studio.live_server import LiveServer, live_server

DOCUMENTS = [
    Document(id="cat", title="A cat", text="The cat sat on the mat and it rained in Rome."),
    Document(id="dog", text="The dog sat on the log.", metadata={"year": 1999}),
    Document(id="he", title="שלום", text="שלום עולם 👋🏽 the cat"),
    Document(id="long", text="while it rained in Paris " * 40 + "x" * 400),
]
ADDRESS = "http://127.0.0.1:8765"
QUERY = "the cat sat"


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Index]]:
    pytest.importorskip("lancedb")
    pytest.importorskip("bm25s")
    folder: Path = tmp_path_factory.mktemp("indexes")
    model = models.encoder()
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    options: Any = {"progress": False, "chunk_tokens": 128}
    return [
        ("notes", Index.create(folder / "notes", model, DOCUMENTS, **options)),
        ("late", Index.create(folder / "late", model, DOCUMENTS, kind="late", **options)),
        ("words", Index.create(folder / "words", None, DOCUMENTS, kind="bm25", **options)),
    ]


@pytest.fixture(scope="module")
def client(indexes: list[tuple[str, Index]]) -> Iterator[TestClient]:
    app = make_app([("reads", models.encoder())], Endpoint(port=8765), indexes)
    with TestClient(app, base_url=ADDRESS) as result:
        yield result


@pytest.fixture(scope="module")
def searching(indexes: list[tuple[str, Index]]) -> Iterator[LiveServer]:
    with live_server([("reads", models.encoder())], indexes) as result:
        yield result


def ask(client: TestClient, name: str, **fields: Any) -> Any:
    answer = client.post(f"/api/{name}", json={"index": "notes", "query": QUERY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("index", ["notes", "late"])
def test_a_hit_is_explained_with_its_own_score(client: TestClient, index: str) -> None:
    hits = ask(client, "search", index=index, top_k=4)["hits"]
    assert {each["id"] for each in hits} == {each.id for each in DOCUMENTS}
    for hit in hits:
        words = [hit["text"][start:end] for start, end in hit["marks"]]
        assert {word.casefold() for word in words} <= set(QUERY.split())
    result = next(each for each in hits if each["id"] == "cat")
    fields = {"title": result["title"], "text": result["text"], "index": index}
    quick = ask(client, "explain_match", **fields)
    assert quick["score"] == pytest.approx(result["score"], rel=1e-3)
    assert quick["heads"] is None
    text, words = quick["document"]["text"], quick["document"]["words"]
    assert "Rome" in [text[start:end] for start, end, _ in words]
    total = sum(value for _, _, value in words) + quick["document"]["special"]
    assert total == pytest.approx(quick["score"], rel=1e-3)
    whole = ask(client, "explain_match", heads=True, **fields)
    assert [layer["layer"] for layer in whole["heads"]["document"]] == [0, 1]
    assert len(whole["heads"]["query"][0]["values"]) == 4


def test_what_cannot_be_searched_is_refused(client: TestClient) -> None:
    described = client.get("/api/models").json()["indexes"]
    assert described[0]["queries"] == ["A cat", "שלום", "while it rained in Paris while"]
    assert [(each["name"], each["kind"], each["explains"]) for each in described] == [
        ("notes", "dense", True),
        ("late", "late", True),
        ("words", "bm25", False),
    ]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("search", {"index": "none"}, "notes"),
        ("search", {"query": "  "}, "empty"),
        ("search", {"top_k": 0}, "top_k"),
        ("search", {"where": "1=1"}, "where"),
        ("explain_match", {"title": "", "text": "a", "heads": 1}, "heads"),
        ("explain_match", {"index": "words", "title": "", "text": "a"}, "dense"),
        ("explain_match", {"title": ""}, "text"),
    ]
    for name, fields, remedy in wrong:
        answer = client.post(f"/api/{name}", json={"index": "notes", "query": QUERY, **fields})
        assert answer.status_code == 422, (name, fields)
        assert remedy in json.loads(answer.text)["error"]


def test_a_studio_without_an_index_has_no_search() -> None:
    with TestClient(
        make_app([("reads", models.encoder())], Endpoint(port=8765)), base_url=ADDRESS
    ) as client:
        assert client.get("/api/models").json()["indexes"] == []
        assert client.post("/api/search", json={}).status_code == 404


@needs_chromium
def test_a_person_searches_and_sees_why(page: Page, searching: LiveServer) -> None:
    # The studio opens on its search.
    page.goto(f"http://127.0.0.1:{searching.endpoint.port}/")
    expect(page).to_have_url(re.compile("search.html"))
    expect(page.locator("#query")).to_be_focused()
    # Queries to try, with the whole width; the other half comes with the results.
    expect(page.locator("#why")).to_be_hidden()
    page.get_by_role("group", name="Queries to try").get_by_text("A cat").click()
    expect(page.locator("#status")).to_contain_text("results")
    page.locator("#query").fill("")
    page.keyboard.type(QUERY)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("4 results")
    expect(page.locator(".hit mark").first).to_be_visible()
    why = page.locator("#why")
    expect(why.locator(".explained span").first).to_be_visible()
    expect(why.locator(".match td.best").first).to_be_visible()
    expect(why.locator(".heads-map")).to_have_count(2)
    # By keyboard to the next result.
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".hit").nth(1)).to_have_attribute("aria-current", "true")
    expect(why.locator(".heads-map")).to_have_count(2)
    before = why.locator(".explained span").first.evaluate("e => getComputedStyle(e).color")
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert before
    # An index of words alone has nothing more to say.
    page.locator("#index").select_option("words")
    page.keyboard.press("/")
    page.locator("#query").fill("cat")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("2 results")
    expect(why).to_contain_text("without a model")
    expect(why.locator("mark").first).to_have_text("cat")
    # The address restores the view, and nothing is wider than the window.
    page.reload()
    expect(page.locator("#status")).to_contain_text("2 results")
    page.goto(f"http://127.0.0.1:{searching.endpoint.port}/search.html#q=שלום Paris&i=late")
    expect(page.locator("#status")).to_contain_text("4 results")
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.get_by_role("link", name="Heads").click()
    expect(page.locator(".token").first).to_be_visible()
    expect(page.get_by_role("link", name="Search")).to_be_visible()


@needs_chromium
def test_errors_are_shown(page: Page, searching: LiveServer) -> None:
    page.goto(f"http://127.0.0.1:{searching.endpoint.port}/search.html")
    page.locator("#query").fill("   ")
    page.locator(".run").click()
    expect(page.locator("#status")).to_contain_text("at least one word")
    page.evaluate("document.getElementById('index').add(new Option('gone', 'gone', true, true))")
    page.locator("#query").fill("cat")
    page.locator(".run").click()
    expect(page.locator("#error")).to_contain_text("gone")
