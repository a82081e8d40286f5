"""Files of earlier versions still open: tests/earlier_versions was written before names changed."""

import json
from pathlib import Path

import pytest
import torch

import manyheads
from manyheads import lens
from manyheads.renamed_keys import CLASSES, KEYS
from manyheads.train import AdamW
from manyheads.train.run_file.run_config import apply_settings, parse_run, read_run, read_toml

FILES = Path(__file__).parent / "earlier_versions"


def test_a_model_of_recurrent_mixers_gives_the_logits_it_gave_then() -> None:
    model = manyheads.load(FILES / "model").eval()
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits[0, -1, :8]
    expected = torch.tensor(json.loads((FILES / "model" / "last_logits.json").read_text()))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("file", sorted((FILES / "results").iterdir()), ids=lambda file: file.stem)
def test_a_result_opens_and_is_saved_with_the_same_content(file: Path, tmp_path: Path) -> None:
    result = lens.load(file)
    result.save(tmp_path / file.name)
    assert lens.load(tmp_path / file.name) is not None
    before, after = (json.loads(path.read_text()) for path in (file, tmp_path / file.name))
    assert before["kind"] == after["kind"]
    assert before["arrays"] == after["arrays"]


def test_a_run_file_is_read_and_its_old_keys_can_be_set() -> None:
    run = read_run(FILES / "run.toml")
    assert isinstance(run.optimizer, AdamW)
    assert (run.optimizer.lr, run.data[0].max_length) == (3e-3, 512)
    tables = apply_settings(read_toml(FILES / "run.toml"), ["optimiser.rate=0.5"])
    assert parse_run(tables).optimizer.lr == 0.5


def test_no_name_is_renamed_to_one_that_is_itself_renamed() -> None:
    for table in (KEYS, CLASSES):
        assert not table.keys() & set(table.values())
