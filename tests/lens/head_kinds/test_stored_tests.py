"""What was measured of a model is not measured again, and a bad cache does no harm."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import load
from manyheads.encoding.fingerprints import exact_fingerprint
from manyheads.lens.head_kinds import stored_tests
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.weights.circuits import score_copying
from manyheads.models.build import Model
from manyheads.parts import Causal, Full
from tests.lens.planted import planted_model

BUNDLED = ("house-gpt", "house-gpt-gated", "house-bert")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(stored_tests, "MIN_PARAMETERS", 0)
    return planted_model()[0]


def count_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs, run = [0], model.run_hidden

    def counted(*arguments: Any, **options: Any) -> Any:
        runs[0] += 1
        return run(*arguments, **options)

    monkeypatch.setattr(model, "run_hidden", counted)
    return runs


def test_a_second_call_runs_nothing_and_gives_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kinds(model, sequences=5, progress=False)
    runs = count_runs(model, monkeypatch)
    second = kinds(model, sequences=5, progress=False)
    assert runs == [0]
    assert second.rows() == first.rows()
    assert second.metadata == first.metadata
    again = kinds(model, sequences=5, remeasure=True, progress=False)
    assert runs[0] > 0
    assert again.rows() == first.rows()
    runs[0] = 0
    kinds(model, sequences=6, progress=False)
    assert runs[0] > 0


def test_texts_need_only_a_pass_of_their_own(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = kinds(model, sequences=5, progress=False)
    runs = count_runs(model, monkeypatch)
    text = list(range(2, 20))
    result = kinds(model, [text], sequences=5, progress=False)
    assert runs == [1]
    for kind in ("induction", "duplicate-token", "copying"):
        assert result.heads(kind) == alone.heads(kind)
        assert (result.scores[kind].means == alone.scores[kind].means).all()


def test_any_changed_weight_is_another_model(model: Model) -> None:
    before = stored_tests.storable_fingerprint(model)
    assert before is not None
    assert stored_tests.storable_fingerprint(planted_model()[0]) == before
    with torch.no_grad():
        *_, last = model.parameters()
        last.view(-1)[-1] += 1e-6
    assert stored_tests.storable_fingerprint(model) not in (None, before)


def test_a_field_that_is_new_leaves_the_hash_and_another_mask_does_not() -> None:
    @dataclass(frozen=True)
    class Sink:
        size: int = 1

    def fingerprint(*fields: Any, mask: Any) -> str:
        config = make_dataclass("Config", [("width", int), ("mask", Any), *fields])
        model: Any = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        model.config, model.tokenizer = config(8, mask), None
        return exact_fingerprint(model)

    before = fingerprint(mask=Full())
    assert (
        fingerprint(("heads", int, 1), ("sink", Sink, field(default_factory=Sink)), mask=Full())
        == before
    )
    assert fingerprint(mask=Causal()) != before


def test_a_model_with_hooks_or_a_tiny_one_is_not_stored(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = next(model.children()).register_forward_hook(lambda *_: None)
    assert stored_tests.storable_fingerprint(model) is None
    hook.remove()
    assert stored_tests.storable_fingerprint(model) is not None
    monkeypatch.setattr(stored_tests, "MIN_PARAMETERS", 10**6)
    assert stored_tests.storable_fingerprint(model) is None


def test_a_damaged_file_is_measured_anew_and_replaced(model: Model, own_cache: Path) -> None:
    first = kinds(model, sequences=5, progress=False)
    stored = sorted((own_cache / "kinds").iterdir())
    assert stored
    before = {file.name: file.read_bytes() for file in stored}
    for file in stored:
        file.write_bytes(file.read_bytes()[: 8 + len(file.name)])
    assert kinds(model, sequences=5, progress=False).rows() == first.rows()
    assert {file.name: file.read_bytes() for file in stored} == before


@pytest.mark.parametrize("obstacle", ["file", "folder"])
def test_a_cache_that_cannot_be_used_does_no_harm(
    model: Model, own_cache: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / "kinds").write_text("a file where the folder should be")
    if obstacle == "folder":
        monkeypatch.setenv("MANYHEADS_CACHE", "/proc/nowhere")
    assert kinds(model, sequences=5, progress=False).complete


def test_the_oldest_files_go(
    model: Model, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tests, "MAX_FILES", 2)
    kinds(model, sequences=5, progress=False)
    assert len(list((own_cache / "kinds").iterdir())) == 2


def test_an_interrupted_test_is_not_stored(
    model: Model, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, run = [0], model.run_hidden

    def interrupted(*arguments: Any) -> Any:
        runs[0] += 1
        if runs[0] == 2:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(model, "run_hidden", interrupted)
    assert not kinds(model, sequences=5, progress=False).complete
    assert not (own_cache / "kinds").exists()


@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_models_come_with_their_tests(
    name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name)
    runs = count_runs(model, monkeypatch)
    result = kinds(model, progress=False)
    assert runs == [0]
    assert result.complete
    assert not own_cache.exists()
    if name == "house-gpt":
        assert [str(head) for head in result.heads("induction")] == ["L2H6", "L2H7"]


def test_what_is_shipped_is_what_is_measured() -> None:
    """By the weights alone, the cheapest of the tests."""
    model = load("house-gpt")
    shipped = kinds(model, progress=False).scores["copying"].means
    measured = score_copying(model, sample=512, progress=False)
    agree = measured.means["copying_eigenvalues"] > 0
    assert shipped[agree] == pytest.approx(measured.means["copying"][agree], abs=0.02)
