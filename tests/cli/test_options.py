"""Groups of options that several commands contain."""

from pathlib import Path

import pytest

from manyheads.cli.options import EngineOptions, PlainTextOptions, TextOptions
from manyheads.errors import InputError
from tests.studio import models


def test_workers_need_the_engine_that_has_them() -> None:
    EngineOptions(engine="ray", workers=2).check()
    with pytest.raises(InputError, match="--workers is for --engine ray"):
        EngineOptions(workers=2).check()
    with pytest.raises(InputError, match="--workers must be at least 1, got 0"):
        EngineOptions(engine="ray", workers=0).check()


def test_lines_are_the_texts_or_those_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\n", "utf-8")
    assert PlainTextOptions(text=("a", "b")).texts() == ["a", "b"]
    assert PlainTextOptions(file=(file, file)).texts() == ["one", "two", "one", "two"]


def test_texts_and_ids_exclude_each_other() -> None:
    model = models.decoder(layers=1)
    assert TextOptions(ids=("1 2 3",)).load_texts(model) == [[1, 2, 3]]
    assert TextOptions(text=("one", "two")).load_texts(model) == ["one", "two"]
    with pytest.raises(InputError, match="exclude each other"):
        TextOptions(ids=("1 2 3",), text=("one",)).load_texts(model)
    with pytest.raises(InputError, match="is empty"):
        TextOptions(text=(" ",)).load_texts(model)
