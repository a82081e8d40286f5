"""Filtering a corpus: the rows that the rule keeps, whatever the format and however interrupted."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from manyheads import build, classify, save, with_classes
from manyheads.encoding.fingerprints import older_fingerprint
from manyheads.errors import InputError
from manyheads.models.readout import ClassHead
from manyheads.tasks import FilterResult, filter_corpus
from manyheads.tasks.filtering import corpus_filter
from tests.encoding.tiny import letters, small
from tests.messages import refuses

WORDS = ["the", "cat", "sat", "on", "a", "mat", "by", "sun"]
ROOT = Path(__file__).parents[3]


def text(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % 8] for place in range(1 + number % 9))


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": number, "text": text(number), "lang": "en" if number % 3 else "de"}
        for number in range(start, start + count)
    ]


def write_rows(file: Path, some: list[Any]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in some)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(lines.encode()) if file.suffix == ".gz" else lines.encode())


def classifier() -> Any:
    return with_classes(small(), ("bad", "good"))


def median(model: Any, texts: list[str]) -> float:
    return float(classify(model, texts).probabilities[:, 1].median())


def keep(model: Any, corpus: Any, out: Path, rule: str, **options: Any) -> FilterResult:
    options = {"block_rows": 16, "shard_rows": 20, "progress": False} | options
    return filter_corpus(corpus, model, out, keep=rule, **options)


def read(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out).to_pylist()


def test_every_format_gives_the_rows_that_the_rule_keeps(tmp_path: Path) -> None:
    model, corpus = classifier(), tmp_path / "corpus"
    write_rows(corpus / "a.jsonl", rows(30))
    write_rows(corpus / "b.jsonl.gz", rows(30, 30))
    pq.write_table(pa.Table.from_pylist(rows(40, 60)), corpus / "c.parquet")
    (corpus / "d.txt").write_text(f"{text(3)}\n\n{text(4)}\n\n")
    limit = median(model, [row["text"] for row in rows(100)])
    result = keep(
        model, corpus, tmp_path / "out", f'score > {limit} and lang == "en"', separator="\n\n"
    )
    actual = read(tmp_path / "out")
    scores = classify(model, [row["text"] for row in rows(100)]).probabilities[:, 1].tolist()
    expected = [
        row
        for row, score in zip(rows(100), scores, strict=True)
        if score > limit and row["lang"] == "en"
    ]
    assert 0 < len(expected) < 100
    assert [{name: row[name] for name in ("id", "text", "lang")} for row in actual] == expected
    torch.testing.assert_close(
        torch.tensor([row["score"] for row in actual]),
        torch.tensor([scores[row["id"]] for row in actual]),
    )
    labels = classify(model, [row["text"] for row in actual]).labels
    assert tuple(row["label"] for row in actual) == labels
    counts = result.counts
    assert (counts.documents, counts.kept) == (102, len(expected))
    # German documents, and texts without a language, are never read by the model.
    assert counts.decided == 34 + 2
    assert len(result.shards) > 1


def test_the_one_output_of_a_regression_model_is_the_score(tmp_path: Path) -> None:
    config: Any = with_classes(small(), 2).config
    model = build(replace(config, readout=replace(config.readout, classes=1)), seed=0)
    assert isinstance(model.config.readout, ClassHead)
    model.tokenizer = letters()
    write_rows(tmp_path / "a.jsonl", rows(20))
    keep(model, tmp_path / "a.jsonl", tmp_path / "out", "score >= -100 and tokens < 1000")
    result = read(tmp_path / "out")
    assert list(result[0]) == ["id", "text", "lang", "score"]
    tokenizer = letters()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with torch.no_grad():
        for row in result:
            logits = model(torch.tensor([tokenizer.encode(row["text"]).ids])).logits
            assert row["score"] == pytest.approx(float(logits[0, 0]), abs=1e-5)
    with refuses(InputError, "label", "use score"):
        keep(model, tmp_path / "a.jsonl", tmp_path / "other", 'label == "good"')


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    lines = [json.dumps(row) for row in rows(3)]
    lines += ["{broken", '"a string"', '{"text": 5}', '{"text": "\\ud800"}', '{"other": "x"}']
    lines += ['{"text": null}', '{"text": "  "}', json.dumps({"text": text(8) * 9, "lang": "en"})]
    corpus.mkdir()
    (corpus / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows(500)).encode())
    (corpus / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (corpus / "c.parquet").write_bytes(b"PAR1 no")
    (corpus / "d.txt").write_bytes(b"\xff\xfe")
    result = keep(classifier(), corpus, tmp_path / "out", "score >= 0", max_length=40)
    counts = result.counts
    assert (counts.empty, counts.undecodable, counts.truncated) == (2, 7, 1)
    assert counts.kept == counts.documents - 2 - 7 > 4
    assert [Path(each.split(":")[0]).name for each in result.broken_files] == [
        "b.jsonl.gz",
        "c.parquet",
    ]
    assert "7 undecodable" in str(result)


def test_columns_of_several_types_reach_one_schema(tmp_path: Path) -> None:
    values: list[Any] = [1, 2, 2.5, "three", None, {"deep": [1]}, True]
    some = [{"text": text(n), "value": value, "n": n} for n, value in enumerate(values)]
    some[0]["late"] = None
    some[6] |= {"late": 7, "big": 2**70, "empty": {}}
    write_rows(tmp_path / "a.jsonl", some)
    result = keep(
        classifier(),
        tmp_path / "a.jsonl",
        tmp_path / "out",
        "score >= 0",
        block_rows=2,
        shard_rows=2,
    )
    schemas = {pq.read_schema(shard) for shard in result.shards}
    assert len(result.shards) == 4
    assert len(schemas) == 1
    actual = read(tmp_path / "out")
    shown = [None if row["value"] is None else json.loads(row["value"]) for row in actual]
    assert shown == values
    assert [row["late"] for row in actual] == [None] * 6 + [7]
    assert json.loads(actual[6]["big"]) == 2**70


KILLS = """
import os, signal, sys, warnings
from pathlib import Path

# A process that has started threads cannot be forked.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
import pyarrow as pa
import pyarrow.parquet
from manyheads import load
from manyheads.tasks import filter_corpus

# Loads what it would load in every child again.
pa.array([1])
warnings.simplefilter("ignore")
model, corpus, outs = load(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
fsync, replace = os.fsync, Path.replace

def run(out, kill_at):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    events = 0
    def count():
        nonlocal events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    def counted_fsync(file):
        fsync(file)
        count()
    def counted_replace(self, target):
        result = replace(self, target)
        count()
        return result
    os.fsync, Path.replace = counted_fsync, counted_replace
    filter_corpus(corpus, model, outs / out, keep="score >= 0.5", block_rows=8, shard_rows=12,
                  progress=False)
    os._exit(0)

assert run("whole", 0) == 0
for point in range(1, 100, 5):
    status = run(f"killed{point}", point)
    if status == 0:
        break
    assert status == signal.SIGKILL
    # Killed again while it continues, and then left alone.
    run(f"killed{point}", 3)
    assert run(f"killed{point}", 0) == 0
print(point)
"""


def test_a_killed_run_continues_to_the_same_bytes(tmp_path: Path) -> None:
    save(classifier(), tmp_path / "model")
    some = rows(40)
    # The types of a column differ from shard to shard.
    some[35]["id"] = "x"
    write_rows(tmp_path / "a.jsonl", some)
    outs = tmp_path / "outs"
    command = [
        sys.executable,
        "-c",
        KILLS,
        *map(str, (tmp_path / "model", tmp_path / "a.jsonl", outs)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "src", timeout=300)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 20
    shards = sorted(file.name for file in (outs / "whole").glob("*.parquet"))
    assert len(shards) > 1
    for point in range(1, points, 5):
        killed = outs / f"killed{point}"
        assert (
            sorted(
                file.name for file in killed.iterdir() if not file.name.startswith((".lock", "_"))
            )
            == shards
        )
        for name in shards:
            assert (killed / name).read_bytes() == (outs / "whole" / name).read_bytes()


def test_two_runs_with_different_settings_are_not_mixed(tmp_path: Path) -> None:
    model, file, out = classifier(), tmp_path / "a.jsonl", tmp_path / "out"
    write_rows(file, rows(20))
    first = keep(model, file, out, "score >= 0.5")
    again = keep(model, file, out, "score >= 0.5")
    assert again.resumed
    assert again.counts == first.counts
    # Earlier versions had another word for max_length.
    state = out / "_filter.json"
    state.write_text(state.read_text().replace('"max_length"', '"longest"'))
    assert keep(model, file, out, "score >= 0.5").resumed
    # They also had another hash of the model, which still tells it from others.
    content = json.loads(state.read_text())
    content["settings"]["model"] = older_fingerprint(model)
    state.write_text(json.dumps(content))
    assert keep(model, file, out, "score >= 0.5").resumed
    with refuses(InputError, "keep='score >= 0.5'", "keep='score >= 0.6'", "another folder"):
        keep(model, file, out, "score >= 0.6")
    with refuses(InputError, "model=", "another folder"):
        keep(with_classes(small(), ("bad", "good"), seed=1), file, out, "score >= 0.5")
    write_rows(file, rows(21))
    with refuses(InputError, "a.jsonl", "another folder"):
        keep(model, file, out, "score >= 0.5")
    with refuses(InputError, "inside the corpus", "outside"):
        keep(model, tmp_path, out, "score >= 0.5")


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content["state"] |= changes
    file.write_text(json.dumps(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "negative count": lambda out: _edit(out / "_filter.json", counts={"documents": -5}),
    "wrong type": lambda out: _edit(out / "_filter.json", shards="2", parts=5),
    "path outside": lambda out: _edit(out / "_filter.json", parts=["../../corpus.jsonl"]),
    "shard deleted": lambda out: (out / "shard-00000.parquet").unlink(),
    "shard flipped": lambda out: _flip(out / "shard-00001.parquet"),
    "part deleted": lambda out: next((out / ".parts").iterdir()).unlink(),
    "part flipped": lambda out: _flip(next((out / ".parts").iterdir())),
    "part is a link": lambda out: _link_to_nowhere(next((out / ".parts").iterdir())),
}


def _link_to_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and a folder with a corpus, the output of a run, and that of an interrupted one."""
    model, place = classifier(), tmp_path_factory.mktemp("interrupted")
    write_rows(place / "corpus.jsonl", rows(60))
    keep(model, place / "corpus.jsonl", place / "whole", "score >= 0.2", block_rows=8)
    after = corpus_filter._Writer.add

    def stop(writer: Any, group: int, block: Any) -> None:
        after(writer, group, block)
        if writer.state.shards == 2 and writer.state.parts:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(corpus_filter._Writer, "add", stop)
        keep(model, place / "corpus.jsonl", place / "stopped", "score >= 0.2", block_rows=8)
    return model, place


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_done_again(
    kind: str, interrupted: tuple[Any, Path], tmp_path: Path
) -> None:
    model, place = interrupted
    out = Path(shutil.copytree(place / "stopped", tmp_path / "out"))
    DAMAGE[kind](out)
    result = keep(model, place / "corpus.jsonl", out, "score >= 0.2", block_rows=8)
    assert result.counts.documents == 60
    for shard in (place / "whole").glob("*.parquet"):
        assert (out / shard.name).read_bytes() == shard.read_bytes()
    assert (place / "corpus.jsonl").exists()


def test_a_complete_output_is_checked_and_a_damaged_shard_is_written_again(
    interrupted: tuple[Any, Path], tmp_path: Path
) -> None:
    model, place = interrupted
    out = Path(shutil.copytree(place / "whole", tmp_path / "out"))
    for name in ("shard-00001.parquet", "shard-00002.parquet"):
        _flip(out / name)
    keep(model, place / "corpus.jsonl", out, "score >= 0.2", block_rows=8)
    assert read(out) == read(place / "whole")


def test_a_state_that_cannot_be_read_is_refused(
    interrupted: tuple[Any, Path], tmp_path: Path
) -> None:
    model, place = interrupted
    for content in ("[" * 100_000, "[1]", "{}", '{"settings": {"files": 5}}'):
        (tmp_path / "_filter.json").write_text(content)
        with refuses(InputError, "_filter.json", "delete the folder"):
            keep(model, place / "corpus.jsonl", tmp_path, "score >= 0.2")


def test_wrong_columns_are_refused_before_the_work(tmp_path: Path) -> None:
    model, file, out = classifier(), tmp_path / "a.jsonl", tmp_path / "out"
    write_rows(file, [row | {"score": 1} for row in rows(20)])
    with refuses(InputError, "'score'", "prefix="):
        keep(model, file, out, "score >= 0.5")
    keep(model, file, out, 'column["score"] == 1 and score >= 0', prefix="new_")
    assert {"score", "new_score", "new_label"} <= set(read(out)[0])
    with refuses(InputError, "'langauge'", "did you mean lang"):
        keep(model, file, tmp_path / "b", 'langauge == "en"', prefix="new_")
    with refuses(InputError, "'body'", "text_column"):
        keep(model, file, tmp_path / "b", "score >= 0", text_column="body")
    with refuses(InputError, "neither classifies nor scores"):
        keep(small(), file, tmp_path / "b", "score >= 0")
    assert not (tmp_path / "b").exists()
