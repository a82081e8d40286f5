"""Tasks come from names and local files; nothing is fetched and no foreign code runs unasked."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import InputError
from manyheads.tasks.benchmarks.lm_eval_tasks import DatasetNeed, TaskSource, read_rows
from tests.messages import refuses

pytest.importorskip("lm_eval")

CHOICES = [
    {"question": "The sky is", "choices": ["blue", "made of old bread"], "answer": "blue"},
    {"question": "Fire is", "choices": ["cold", "hot"], "answer": 1},
]
TEXTS = [{"text": "The town stands where the old road crosses the river."}]
ANSWERS = [{"question": "The market of Harlow", "answer": "Bridge"}]
LOCAL_TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
    path.write_text(lines)
    return path


def write_group(folder: Path) -> None:
    """Two tasks of the same rows, and the group of both."""
    write_rows(folder / "choices.jsonl", CHOICES)
    for name in ("first", "second"):
        (folder / f"{name}.yaml").write_text(LOCAL_TASK.replace("local", name))
    metric = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    (folder / "both.yaml").write_text(f"group: both\ntask: [first, second]\n{metric}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_rows(folder / "choices.jsonl", CHOICES)
    write_rows(folder / "texts.json", TEXTS)
    write_rows(folder / "answers.jsonl", ANSWERS)
    return folder


def test_rows_become_the_tasks_that_their_columns_say(folder: Path) -> None:
    source = TaskSource.of(folder)
    tasks = source.load()["tasks"]
    kinds = {name: task.OUTPUT_TYPE for name, task in tasks.items()}
    assert kinds == {
        "answers": "generate_until",
        "choices": "multiple_choice",
        "texts": "loglikelihood_rolling",
    }
    assert source.needs == []
    # The text of an answer becomes its number.
    assert [row["answer"] for row in tasks["choices"].dataset["test"]] == [0, 1]


def test_yaml_tasks_find_their_data_beside_them(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "choices.jsonl", CHOICES)
    (tmp_path / "local.yaml").write_text(LOCAL_TASK)
    for where in (tmp_path, tmp_path / "local.yaml"):
        tasks = TaskSource.of(where).load()["tasks"]
        assert list(tasks) == ["local"]
        assert len(tasks["local"].eval_docs) == 2
    both = TaskSource.of([tmp_path / "local.yaml", folder / "answers.jsonl"])
    assert [config["task"] for config in both.configs] == ["local", "answers"]


def test_a_group_of_a_folder_has_its_tasks(tmp_path: Path) -> None:
    write_group(tmp_path)
    source = TaskSource.of(tmp_path)
    assert source.specs == ("both",)
    assert sorted(config["task"] for config in source.configs) == ["first", "second"]
    loaded = source.load()
    assert loaded["group_map"] == {"both": ["first", "second"]}


def test_a_benchmark_by_name_has_its_datasets_listed(tmp_path: Path) -> None:
    source = TaskSource.of("hellaswag,ceval")
    assert source.needs[0] == DatasetNeed("Rowan/hellaswag")
    assert source.needs[1].path == "ceval/ceval-exam"
    assert len(source.needs[1].subsets) == 52
    with refuses(InputError, "Rowan/hellaswag", "52 subsets", "--download", "--data DATA"):
        source.load()
    (tmp_path / "Rowan/hellaswag").mkdir(parents=True)
    assert TaskSource.of("hellaswag", data=tmp_path).needs == []


def test_a_data_folder_holds_what_a_benchmark_reads(tmp_path: Path) -> None:
    own = tmp_path / "Rowan/hellaswag"
    own.mkdir(parents=True)
    row = {
        "activity_label": "Baking",
        "ctx_a": "She opens the oven.",
        "ctx_b": "she",
        "endings": ["takes the bread out.", "swims.", "flies.", "sings."],
        "label": "0",
    }
    write_rows(own / "validation.jsonl", [row])
    write_rows(own / "train.jsonl", [row])
    tasks = TaskSource.of("hellaswag", data=tmp_path).load()["tasks"]
    [document] = tasks["hellaswag"].eval_docs
    assert document["choices"][0] == "takes the bread out."


def test_functions_of_local_tasks_run_only_if_allowed(tmp_path: Path) -> None:
    write_rows(tmp_path / "choices.jsonl", CHOICES)
    (tmp_path / "shared.yaml").write_text("process_docs: !function own.prepare\n")
    (tmp_path / "local.yaml").write_text("include: shared.yaml\n" + LOCAL_TASK)
    (tmp_path / "own.py").write_text("def prepare(docs):\n    return docs.select([0])\n")
    with refuses(InputError, "local.yaml", "own.prepare", "allow_code"):
        TaskSource.of(tmp_path / "local.yaml")
    tasks = TaskSource.of(tmp_path / "local.yaml", allow_code=True).load()["tasks"]
    assert len(tasks["local"].eval_docs) == 1


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    import lm_eval.utils
    from jinja2.exceptions import SecurityError

    inside = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    assert lm_eval.utils.apply_template(inside, {})
    with TaskSource.of(folder).reading(), pytest.raises(SecurityError):
        lm_eval.utils.apply_template(inside, {})


def test_metrics_from_the_network_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "choices.jsonl", CHOICES)
    metric = "metric_list: [{metric: bleurt, aggregation: mean, higher_is_better: true}]\n"
    (tmp_path / "local.yaml").write_text(LOCAL_TASK + metric)
    with refuses(InputError, "bleurt", "huggingface.co", "metrics of the harness"):
        TaskSource.of(tmp_path).load()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", "{", "not valid JSON"),
        ("rows.jsonl", "", "no rows"),
        ("rows.json", '{"text": "a"}', "list of objects"),
        ("rows.jsonl", '{"words": 3}', 'has the columns words..."question", "choices"'),
        ("rows.jsonl", '{"question": "a", "choices": ["b"], "answer": "c"}', "'c' of row 1"),
        ("rows.yaml", "- a", "holds no task"),
        ("rows.txt", "a", "rows.txt is no task"),
    ],
)
def test_wrong_files_are_refused(name: str, content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with refuses(InputError, expected):
        TaskSource.of(tmp_path / name)


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    for tasks, expected in (
        ([], "no tasks"),
        (tmp_path, "has no tasks"),
        ("missing.jsonl", "missing.jsonl does not exist"),
    ):
        with refuses(InputError, expected):
            TaskSource.of(tasks)
    with refuses(InputError, "nowhere does not exist"):
        TaskSource.of("hellaswag", data=tmp_path / "nowhere")


def test_rows_of_a_list_and_of_lines_are_alike(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "rows.jsonl", CHOICES)
    whole = write_rows(tmp_path / "rows.json", CHOICES)
    assert read_rows(lines) == read_rows(whole)
