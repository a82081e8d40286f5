"""A run file is refused before any work, in words that lead to the line."""

import re
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import ConfigError, InputError
from manyheads.train.loop.checkpoint import RunFolder, check_disk_space
from manyheads.train.loop.session import train
from manyheads.train.objectives import CausalLM, MaskedLM
from manyheads.train.optim.optimizers import Muon
from manyheads.train.optim.schedules import BatchGrowth, Cosine
from manyheads.train.run_file.run_config import apply_settings, parse_run, read_run
from tests.messages import refuses
from tests.train.tiny import tables, write_corpus

WHOLE = """
[model]
size = "gpt2"
change = { layers = 1, width = 16, heads = 2, vocabulary = 300 }

[data]
train = ["a.txt", "b/*.jsonl"]
validation = 0.05
max_length = 32
batch = { first = 64, last = 256, by = 64, over = 1152 }
micro_batch = 64

[objective]
kind = "masked-lm"
mask_fraction = 0.2

[[regularizer]]
kind = "HeadDiversity"
weight = 0.1

[optimizer]
kind = "muon"
rest = { lr = 3e-4 }
rates = [{ pattern = "*.attention.query.*", factor = 0.5 }]

[schedule]
kind = "cosine"
warmup = 2

[run]
folder = "out"
tokens = 1408
recompute = [0]
precision = "bfloat16"
"""


def sections_of(**sections: Any) -> dict[str, Any]:
    return tables(Path("nowhere")) | sections


def test_a_file_becomes_values(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(WHOLE)
    run = read_run(tmp_path / "run.toml", ["run.seed=7", "optimizer.rest.lr=1e-4"])
    assert run.data[0].train == ("a.txt", "b/*.jsonl")
    assert run.data[0].batch == BatchGrowth(first=64, last=256, by=64, over=1152)
    assert run.objective == MaskedLM(mask_fraction=0.2)
    assert isinstance(run.optimizer, Muon)
    assert run.optimizer.rest.lr == 1e-4
    assert run.optimizer.rates[0].factor == 0.5
    assert run.phases.each[0].schedule == Cosine(warmup=2)
    # Three updates of 64, 128 and 192 tokens, and one of 256.
    assert run.ends == (10,)
    assert (run.run.seed, run.run.recompute, run.run.half) == (7, (0,), True)
    assert [each.name for each in run.regularizer] == ["head outputs"]


@pytest.mark.parametrize(
    ("section", "table", "message"),
    [
        ("rum", {}, "rum is not a known key: use run."),
        ("run", {"folder": "o", "stepz": 3}, "run.stepz is not a known key: use run.steps."),
        ("run", {"folder": "o", "steps": 2.5}, "run.steps is 2.5: use an integer."),
        ("run", {"folder": "o", "steps": True}, "run.steps is True: use an integer."),
        ("run", {"steps": 3}, "run.folder is missing: add it."),
        ("run", {"folder": "o", "steps": -1}, "run: steps must be at least 0, got -1"),
        (
            "run",
            {"folder": "o"},
            "run.steps or run.tokens...steps=0 and tokens=0...set one",
        ),
        (
            "run",
            {"folder": "o", "steps": 3, "precision": "half"},
            "run.precision is 'half': use 'float32' or 'bfloat16'.",
        ),
        (
            "run",
            {"folder": "o", "steps": 3, "recompute": "most"},
            "run.recompute is 'most': use 'none' or 'all' or an integer.",
        ),
        (
            "objective",
            {"kind": "Causal"},
            "objective.kind is 'Causal': use 'CausalLM', 'MaskedLM', 'Seq2SeqLM', "
            "'SequenceClassification', 'MultiLabelClassification', 'TokenClassification', "
            "'ImageClassification', 'Contrastive' or 'Distillation'.",
        ),
        (
            "objective",
            {"kind": "CausalLM", "zloss": 1},
            "objective.zloss is not a known key: use objective.z_loss.",
        ),
        (
            "optimizer",
            {"lr": -1.0},
            "optimizer: lr must be above 0, got -1.0: use a value such as 1e-3.",
        ),
        (
            "schedule",
            {"kind": "WarmupStableDecay", "warmup": 5, "decay": 5},
            "warmup=5 and decay=5...8 steps...use more steps",
        ),
        (
            "model",
            {"size": "gpt2", "folder": "gpt2/"},
            "model: ...one of size, config and folder...size and folder",
        ),
        (
            "model",
            {"size": "gpt2", "change": {"layer": 2}},
            "model.change.layer is not a known key: use model.change.layers.",
        ),
        (
            "model",
            {"size": "gpt2", "change": {"heads": 5}},
            "model.change: heads must divide width=768, got 5: use 2, 3, 4 or 6 heads...head_size",
        ),
        (
            "run",
            {"folder": "o", "steps": 3, "seed": 2**70},
            f"run: seed={2**70} has more than 64 bits: use a smaller number.",
        ),
        (
            "objective",
            {"kind": "CausalLM", "z_loss": -1.0},
            "objective: z_loss must be at least 0, got -1",
        ),
        (
            "objective",
            {"kind": "CausalLM", "routing": {"balance": float("nan")}},
            "objective.routing: balance must be a number, got nan",
        ),
        (
            "optimizer",
            {"kind": "Muon", "rounds": 0},
            "optimizer: rounds must be at least 1, got 0",
        ),
        (
            "run",
            {"folder": "o", "steps": 3, "clip": float("nan")},
            "run: clip must be a number, got nan",
        ),
        (
            "phase",
            [{"steps": 3}],
            "run.steps and run.tokens...in each phase",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_its_key(section: str, table: Any, message: str) -> None:
    with refuses(ConfigError, message):
        parse_run(sections_of(**{section: table}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_lenght": 3}, "data.max_lenght is not a known key: use data.max_length."),
        (
            {"batch": 100},
            "data: batch=100 is not a multiple of micro_batch=64: use a batch of 128.",
        ),
        ({"max_length": 65}, "data: micro_batch=64 cannot hold max_length=65: use 65 or more."),
        (
            {"kind": "Tables"},
            "data.kind is 'Tables': use 'Texts', 'Labeled', 'Pairs', 'Tagged' or 'Images'.",
        ),
        (
            {"max_length": 129, "micro_batch": 0},
            "data: batch=128 cannot hold max_length=129: use 129 or more.",
        ),
        (
            {"validation": 1.5},
            "data: validation must be in [0, 1), got 1.5: give a fraction or files.",
        ),
    ],
)
def test_data_that_do_not_fit_are_named_too(change: dict[str, Any], message: str) -> None:
    made = sections_of()
    made["data"] |= change
    with refuses(ConfigError, message):
        parse_run(made)


def test_keys_of_earlier_versions_are_read() -> None:
    made = sections_of()
    expected = parse_run(made)
    made["optimiser"] = {"rate": made.pop("optimizer", {}).get("lr", 1e-3)}
    made["data"]["length"] = made["data"].pop("max_length")
    made["data"]["field"] = "text"
    run = parse_run(apply_settings(made, ["optimiser.rate=0.5", "data.length=8"]))
    assert (run.optimizer.lr, run.data[0].max_length) == (0.5, 8)
    run = parse_run(made)
    assert (run.optimizer, run.data) == (expected.optimizer, expected.data)


def test_phases_inherit_the_tables_of_the_file() -> None:
    made = sections_of(phase=[{"tokens": 256}, {"steps": 3, "data": {"max_length": 8}}])
    del made["run"]["steps"]
    run = parse_run(made)
    assert (run.ends, run.data[0].max_length, run.data[1].max_length) == ((2, 5), 16, 8)
    assert run.data[1].batch == run.data[0].batch
    made["phase"][1]["data"]["max_lenght"] = 3
    with refuses(ConfigError, "phase.1.data.max_lenght", "use phase.1.data.max_length."):
        parse_run(made)


def test_a_phase_that_is_no_table_is_refused() -> None:
    with refuses(ConfigError, "phase.0...'a'...write [[phase]]"):
        parse_run(sections_of(run={"folder": "o"}, phase=["a"]))


def test_a_setting_reaches_into_lists_and_is_refused_elsewhere() -> None:
    made = {"phase": [{"steps": 1}], "run": {"seed": 1}}
    assert apply_settings(made, ["phase.0.steps=9"])["phase"] == [{"steps": 9}]
    assert made["phase"] == [{"steps": 1}]
    with refuses(ConfigError, "--set phase.3.steps=1: phase is a list of 1: count from phase.0."):
        apply_settings(made, ["phase.3.steps=1"])
    with refuses(ConfigError, "--set run.seed.x=1: run.seed is 1, not a table: set run.seed."):
        apply_settings(made, ["run.seed.x=1"])
    with refuses(ConfigError, "--set run.seed has no value: write it as run.steps=100."):
        apply_settings(made, ["run.seed"])


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("x = " + "[" * 50_000, "levels deep"),
        ("x = " + "{a = " * 90 + "1" + "}" * 90, "levels deep"),
        ("[a" + ".a" * 100_000 + "]", "64 names"),
        ("x = " + "9" * 5_000, "TOML"),
        ("#" * 2**20 + "x", "1 MB"),
    ],
)
def test_a_run_file_that_would_end_python_is_refused(
    content: str, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    with refuses(ConfigError, "run.toml", word):
        read_run(file)


def test_a_run_file_that_links_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").symlink_to("run.toml")
    with refuses(ConfigError, "run.toml", "name a run file"):
        read_run(tmp_path / "run.toml")


def test_a_missing_file_or_invalid_toml_is_an_error_of_one_line(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    with refuses(ConfigError, f"there is no {missing}: name a run file, such as run.toml."):
        read_run(missing)
    with refuses(ConfigError, f"{tmp_path} is a folder: name a run file, such as run.toml."):
        read_run(tmp_path)
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML \(.*line 1.*\): correct"):
        read_run(broken)
    broken.write_text("[run]\nfolder = 3\n")
    with refuses(ConfigError, f"{broken}: run.folder is 3: use a path in quotes."):
        read_run(broken)


def refused(error: type, message: str, tables: dict[str, Any]) -> None:
    with refuses(error, message):
        train(parse_run(tables), progress=False)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "objective.kind is missing: use 'CausalLM', 'MaskedLM', "),
        ({"objectve": {"kind": "CausalLM"}}, "objectve is not a known key: use objective."),
    ],
)
def test_a_table_that_is_left_out_or_misspelt_is_named(
    written: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {key: table for key, table in tables(tmp_path).items() if key != "objective"}
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_run(settings | written)


def test_what_the_run_lacks_is_found_before_any_work(tmp_path: Path) -> None:
    made = tables(tmp_path)
    refused(InputError, f"{tmp_path}/corpus.txt does not exist: check the path.", made)
    write_corpus(tmp_path, documents=20)
    made["data"]["tokenizer"] = "nowhere.json"
    refused(
        InputError,
        "data.tokenizer: there is no nowhere.json: give the path of a tokenizer.json.",
        made,
    )
    (tmp_path / "words.json").write_text("no words")
    made["data"]["tokenizer"] = str(tmp_path / "words.json")
    with pytest.raises(InputError, match=r"^data.tokenizer: \S*/words.json is not a tokenizer \("):
        train(parse_run(made), progress=False)
    made = tables(tmp_path)
    made["model"]["change"]["vocabulary"] = 100
    refused(
        ConfigError,
        "the tokenizer has 300 tokens, and the model a vocabulary of 100: "
        "set model.change.vocabulary=300, or use the model's own tokenizer.",
        made,
    )
    made = tables(tmp_path)
    made["model"]["change"]["positions"] = 8
    refused(ConfigError, "data.max_length=16, and the model has 8 positions: use 8 or less.", made)
    made = tables(tmp_path, validate_every=2)
    refused(
        ConfigError,
        "run.validate_every=2 needs validation data: set data.validation to files or a fraction.",
        made,
    )
    made = tables(tmp_path, recompute=[5])
    refused(ConfigError, "run.recompute has layer 5: use 0 to 1.", made)
    made = tables(tmp_path)
    made["optimizer"]["rates"] = [{"pattern": "*.querry.*", "factor": 2.0}]
    with pytest.raises(ConfigError, match=r"^no parameter matches '\*\.querry\.\*': use a "):
        train(parse_run(made), progress=False)
    made = tables(tmp_path)
    made["run"]["folder"] = str(tmp_path / "corpus.txt")
    file = tmp_path / "corpus.txt"
    problem = f"run.folder={file}: {file} is a file: give the path of a folder."
    refused(ConfigError, problem, made)
    assert not (tmp_path / "out").exists(), "refused, and yet something was written"


def test_a_disk_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the checkpoints take about 1000000.0 GB and .* free"):
        check_disk_space(tmp_path / "out", 10**15)
    # What is kept already takes no more room.
    kept = RunFolder(tmp_path / "out").checkpoints
    kept.mkdir(parents=True)
    with (kept / "large").open("wb") as file:
        file.truncate(10**12)
    check_disk_space(tmp_path / "out", 10**12)


@pytest.mark.parametrize(
    ("objective", "kind", "wanted"),
    [
        ("CausalLM", "pairs", '"texts" or "labeled" or "tagged"'),
        ("SequenceClassification", "texts", '"labeled"'),
        ("Contrastive", "texts", '"pairs"'),
    ],
)
def test_data_without_the_answers_are_refused(
    tmp_path: Path, objective: str, kind: str, wanted: str
) -> None:
    made = tables(tmp_path)
    made["objective"] = {"kind": objective}
    made["data"] |= {"kind": kind}
    if kind != "texts":
        del made["data"]["separator"]
    message = (
        f'objective.kind="{objective}" cannot be used with data.kind="{kind}": '
        f"use data.kind={wanted}, or another objective."
    )
    with refuses(ConfigError, message):
        parse_run(made)


def test_an_objective_that_the_model_cannot_serve_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=20)
    made = tables(tmp_path)
    made["model"] = {
        "size": "bert-base",
        "change": {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "vocabulary": 300},
    }
    message = (
        "layer 0 sees the tokens that CausalLM predicts, with Full(): "
        "use Causal() or a window without `after`."
    )
    refused(ConfigError, message, made)
    assert CausalLM() == parse_run(made).objective
