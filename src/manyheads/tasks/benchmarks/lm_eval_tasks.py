"""Tasks of lm-evaluation-harness by name and from local files, and where their data comes from.

Nothing is downloaded unless that is requested, and no code runs that comes with data or tasks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manyheads.errors import InputError, import_package, short_repr
from manyheads.formatting import listed, pluralise

EXTRA = "'manyheads[lm-eval]'"
# Names under which a benchmark is better known than by that of the harness.
ALIASES = {"ceval": "ceval-valid", "c-eval": "ceval-valid"}
# What datasets reads from files that a task names itself.
FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
ROWS = (
    'each row needs "question", "choices" and "answer" for multiple choice, "question" and '
    '"answer" for generation, or "text" for perplexity'
)


@dataclass(frozen=True, slots=True)
class DatasetNeed:
    """A dataset of huggingface.co that some tasks read, and those of its subsets."""

    path: str
    subsets: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.subsets:
            return self.path
        count = len(self.subsets)
        return f"{self.path} ({self.subsets[0] if count == 1 else pluralise(count, 'subset')})"


@dataclass(frozen=True, slots=True, eq=False)
class TaskSource:
    """Where tasks are from: names and local files, and a folder with their data if there is one."""

    specs: tuple[Any, ...]
    manager: Any
    folders: tuple[Path, ...]
    data: Path | None = None
    download: bool = False
    allow_code: bool = False

    @classmethod
    def of(
        cls,
        tasks: str | Path | Sequence[str | Path],
        *,
        data: Path | str | None = None,
        download: bool = False,
        allow_code: bool = False,
    ) -> "TaskSource":
        """Tasks by name, YAML files of the harness, folders of them, and .json or .jsonl rows."""
        import_package("lm_eval", "tasks.evaluate", EXTRA)
        names = [tasks] if isinstance(tasks, str | Path) else list(tasks)
        names = [part for name in names for part in _split(name)]
        if not names:
            raise InputError("there are no tasks", "name one, such as hellaswag or rows.jsonl")
        if data is not None and not Path(data).is_dir():
            raise InputError(f"the data folder {data} does not exist", "name a folder")
        specs: list[Any] = []
        by_name: list[str] = []
        folders: list[Path] = []
        indexed: list[Path] = []
        for name in names:
            path = Path(name).expanduser()
            if path.is_dir():
                folders.append(path)
                if own := _tasks_of_folder(path, allow_code=allow_code):
                    indexed.append(path)
                    specs += own
                else:
                    specs += _files_of_folder(path)
            elif path.is_file():
                specs.append(_task_of_file(path, allow_code=allow_code))
                folders.append(path.parent)
            elif path.suffix in (".yaml", ".yml", ".json", ".jsonl"):
                raise InputError(f"{path} does not exist", "name a file of tasks or rows")
            else:
                by_name.append(ALIASES.get(str(name), str(name)))
                specs.append(by_name[-1])
        manager = _manager(by_name, indexed)
        source = None if data is None else Path(data)
        return cls(tuple(specs), manager, tuple(folders), source, download, allow_code)

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        """What the tasks say about themselves; functions are not resolved."""
        index = self.manager.task_index
        configs: list[Mapping[str, Any]] = []
        pending: list[Any] = list(self.specs)
        while pending:
            spec = pending.pop(0)
            if isinstance(spec, str) and Path(spec).is_file():
                spec = _read_yaml(Path(spec))
            elif isinstance(spec, str):
                entry = index[spec]
                spec = entry.cfg or {"tag": sorted(entry.tags)}
            elif isinstance(spec.get("task"), str) and spec["task"] in index:
                spec = {**(index[spec["task"]].cfg or {}), **spec}
            if isinstance(members := spec.get("task") or spec.get("tag"), list):
                pending += members
            else:
                configs.append(spec)
        return configs

    @property
    def needs(self) -> list[DatasetNeed]:
        """The datasets that are not in the data folder: from huggingface.co or its local cache."""
        subsets: dict[str, list[str]] = {}
        for config in self.configs:
            path = config.get("dataset_path")
            if path is None or path in FILE_FORMATS or Path(path).exists():
                continue
            if self.data is None or not (self.data / path).is_dir():
                subsets.setdefault(path, []).append(config.get("dataset_name") or "")
        return [
            DatasetNeed(path, tuple(dict.fromkeys(filter(None, names))))
            for path, names in subsets.items()
        ]

    def load(self) -> Any:
        """The tasks with their data; what is missing is named, with where it would come from."""
        self._refuse_remote_metrics()
        needs = self.needs
        try:
            with self.reading():
                return self.manager.load(list(self.specs))
        except (OSError, ValueError) as error:
            # datasets raises these for what it can neither read nor fetch.
            if not needs:
                raise InputError(
                    f"the tasks cannot be loaded: {short_repr(error)}", "correct their files"
                ) from error
            names = listed([str(need) for need in needs], 8)
            example = needs[0].path
            raise InputError(
                f"the data of these tasks is not on this machine: {names}, from huggingface.co",
                "use --download to fetch it (download in Python), or get it elsewhere with "
                f"'hf download {example} --repo-type dataset --local-dir DATA/{example}' and use "
                "--data DATA (data in Python)",
            ) from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Datasets come from local files and, only if allowed, from the network; no code runs."""
        import datasets
        import evaluate
        import huggingface_hub.constants as hub
        import lm_eval.api.task as task_module
        import lm_eval.utils as harness
        from jinja2 import BaseLoader, StrictUndefined
        from jinja2.sandbox import SandboxedEnvironment

        sandbox = SandboxedEnvironment(
            loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
        )
        sandbox.filters.update(harness.env.filters)
        offline = not self.download
        changes: list[tuple[Any, str, Any]] = [
            (datasets, "load_dataset", partial(self._load_dataset, datasets.load_dataset)),
            (evaluate, "load", _refuse_metric),
            # Bars of the harness would draw over ours.
            (task_module, "tqdm", lambda items, **_: items),
        ]
        if offline:
            changes += [(hub, "HF_HUB_OFFLINE", True), (datasets.config, "HF_HUB_OFFLINE", True)]
        if not self.allow_code:
            changes.append((harness, "env", sandbox))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        try:
            for owner, name, value in changes:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def _load_dataset(
        self, load: Any, path: str | None = None, name: str | None = None, **options: Any
    ) -> Any:
        """As `datasets.load_dataset`: JSON is read here, and the data folder comes first."""
        options.pop("trust_remote_code", None)
        files = options.get("data_files")
        if path in FILE_FORMATS and files is not None:
            by_split = files if isinstance(files, Mapping) else {"train": files}
            local = {split: self._local_files(names) for split, names in by_split.items()}
            if path == "json" and set(options) <= {"data_files"}:
                return _json_splits(local)
            options["data_files"] = {split: list(map(str, own)) for split, own in local.items()}
        elif self.data is not None and path is not None and (self.data / path).is_dir():
            path = str(self.data / path)
        return load(path=path, name=name, **options)

    def _local_files(self, names: str | Sequence[str]) -> list[Path]:
        """Files that exist, relative to the working folder or to those of the tasks."""
        result = []
        for name in [names] if isinstance(names, str) else names:
            places = [Path(name).expanduser(), *(folder / name for folder in self.folders)]
            place = next((place for place in places if place.is_file()), None)
            if place is None:
                raise InputError(f"the data file {name} does not exist", "correct data_files")
            result.append(place)
        return result

    def _refuse_remote_metrics(self) -> None:
        """Metrics that the harness does not have would be code from huggingface.co."""
        import lm_eval.api.metrics  # noqa: F401
        from lm_eval.api.registry import metric_registry

        for config in self.configs:
            for metric in config.get("metric_list") or ():
                name = metric.get("metric")
                remote = metric.get("hf_evaluate") or name not in metric_registry
                if remote and isinstance(name, str) and config.get("process_results") is None:
                    raise InputError(
                        f"the metric {name} of {config.get('task')} is code from huggingface.co, "
                        "which is not run",
                        "use a task with metrics of the harness",
                    )


def _split(name: str | Path) -> list[str | Path]:
    """Names with commas between them, one by one; a path stays as it is."""
    if isinstance(name, Path) or Path(name).exists():
        return [name]
    return [part.strip() for part in name.split(",") if part.strip()]


def _manager(names: Sequence[str], folders: Sequence[Path]) -> Any:
    """The index of local folders and of the harness: of the part that has the names, or of all."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    own = list(folders)
    if not names:
        return TaskManager(include_path=own or None, include_defaults=False)

    # All 14 thousand tasks take ten seconds.
    root = Path(lm_eval.tasks.__file__).parent
    near = [
        folder
        for folder in root.iterdir()
        if folder.is_dir() and any(name.startswith(folder.name) for name in names)
    ]
    if near:
        manager = TaskManager(include_path=[*near, *own], include_defaults=False)
        if _resolves(manager, names):
            return manager
    manager = TaskManager(include_path=own or None)
    for name in names:
        if name not in manager.task_index:
            from difflib import get_close_matches

            close = get_close_matches(name, manager.all_tasks, 5)
            raise InputError(
                f"lm-evaluation-harness has no task {name!r}",
                f"did you mean {', '.join(close)}?" if close else "name a task, or a local file",
            )
    return manager


def _resolves(manager: Any, names: Sequence[str]) -> bool:
    """Whether the index has these tasks, and the members of groups among them."""
    pending, index = list(names), manager.task_index
    while pending:
        name = pending.pop()
        if name not in index:
            return False
        members = (index[name].cfg or {}).get("task")
        if isinstance(members, list):
            pending += [m if isinstance(m, str) else str(m.get("task")) for m in members]
    return True


def _tasks_of_folder(folder: Path, *, allow_code: bool) -> list[str]:
    """The names of the groups and tasks in the YAML files of a folder; none if it has no such."""
    names: dict[str, None] = {}
    members: set[str] = set()
    for path in sorted(folder.glob("**/*.yaml")):
        config = _read_task(path, allow_code=allow_code)
        task, group = config.get("task"), config.get("group")
        if isinstance(task, list):
            members |= {own if isinstance(own, str) else str(own.get("task")) for own in task}
        if isinstance(name := group or task, str):
            names[name] = None
    return [name for name in names if name not in members]


def _files_of_folder(folder: Path) -> list[Any]:
    """The tasks of the files of rows in a folder."""
    files = sorted((*folder.glob("*.jsonl"), *folder.glob("*.json")))
    if not files:
        raise InputError(
            f"{folder} has no tasks", "put .yaml tasks of the harness or .jsonl rows into it"
        )
    return [_task_of_file(path, allow_code=False) for path in files]


def _task_of_file(path: Path, *, allow_code: bool) -> Any:
    """A YAML task by its path, or a task for the rows of a JSON file."""
    if path.suffix in (".yaml", ".yml"):
        _read_task(path, allow_code=allow_code)
        return str(path)
    if path.suffix not in (".json", ".jsonl"):
        raise InputError(f"{path} is no task", "name a .yaml, .json or .jsonl file")
    rows = read_rows(path)
    config: dict[str, Any] = {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "fewshot_split": "test",
        "metadata": {"version": 1.0},
    }
    columns = set.intersection(*map(set, rows))
    if {"question", "choices", "answer"} <= columns:
        return config | {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
        }
    if {"question", "answer"} <= columns:
        exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
        return config | {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, "do_sample": False},
            "filter_list": [
                {
                    "name": "none",
                    "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
                }
            ],
            "metric_list": [exact],
        }
    if "text" in columns:
        del config["fewshot_split"]
        return config | {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        }
    raise InputError(f"{path} has the columns {', '.join(sorted(columns)) or 'none'}", ROWS)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, or of a list in a .json file; answers of choices as numbers."""
    text = path.read_text("utf-8")
    try:
        if path.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON, {error}", "correct the file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise InputError(f"{path} has no rows", "give a list of objects, or one object per line")
    for number, row in enumerate(rows, 1):
        answer, choices = row.get("answer"), row.get("choices")
        if isinstance(choices, list) and isinstance(answer, str):
            if answer not in choices:
                raise InputError(
                    f"{path}: the answer {answer!r} of row {number} is none of its choices",
                    "give one of them, or its number from 0 on",
                )
            row["answer"] = choices.index(answer)
    return rows


def _json_splits(files: Mapping[str, Sequence[Path]]) -> Any:
    """A dataset in memory, so that nothing is written into a cache."""
    from datasets import Dataset, DatasetDict

    return DatasetDict(
        {
            split: Dataset.from_list([row for path in paths for row in read_rows(path)])
            for split, paths in files.items()
        }
    )


def _read_yaml(path: Path, functions: list[str] | None = None) -> dict[str, Any]:
    """A YAML file of the harness with what it includes; `functions` collects those it names."""
    yaml = import_package("yaml", "a task in YAML", EXTRA)
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def construct(_: Any, node: Any) -> str:
        if functions is not None:
            functions.append(str(node.value))
        return str(node.value)

    loader.add_constructor("!function", construct)
    try:
        config = yaml.load(path.read_text("utf-8"), loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}", "correct the file") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no task", "give the fields of a task of the harness")
    includes = config.pop("include", None) or ()
    merged: dict[str, Any] = {}
    for name in [includes] if isinstance(includes, str) else includes:
        merged |= _read_yaml(path.parent / name, functions)
    return merged | config


def _read_task(path: Path, *, allow_code: bool) -> dict[str, Any]:
    """A YAML file of the user; its functions are refused unless they are allowed."""
    functions: list[str] = []
    config = _read_yaml(path, functions)
    if functions and not allow_code:
        raise InputError(
            f"{path} runs Python functions: {listed(functions, 3)}",
            "read that code, then pass allow_code",
        )
    return config


def _refuse_metric(name: str, *_: Any, **__: Any) -> Any:
    raise InputError(
        f"the metric {name} is code from huggingface.co, which is not run",
        "use a task with metrics of the harness",
    )
