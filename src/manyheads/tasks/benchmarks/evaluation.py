"""Standard scores of a model by lm-evaluation-harness, without some heads, and by head."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, import_package
from manyheads.lens.causal.evaluate import HeadSet
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.inputs import cached_run
from manyheads.lens.results import addresses, tables
from manyheads.models import build
from manyheads.progress import Progress
from manyheads.tasks.benchmarks.lm_eval_tasks import EXTRA, DatasetNeed, TaskSource

Tasks = str | Path | Sequence[str | Path]
# The seed of few-shot examples, as in the harness.
SEED = 1234
# Resamples of scores that have no formula for their standard error, such as perplexity.
RESAMPLES = 100
# At most so many groups of documents are left out in turn.
GROUPS = 50


class EvaluateOptions(TypedDict, total=False):
    """What is evaluated and how; see `evaluate`."""

    replace_with: Replacement
    shots: int | None
    limit: int | float | None
    chat: bool
    data: Path | str | None
    download: bool
    allow_code: bool
    max_length: int | None
    batch_tokens: int | None
    progress: bool


@wrapping_models
def lm_eval_model(
    model: build.Model,
    *,
    without: addresses.Heads = (),
    replace_with: Replacement = "zero",
    max_length: int | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Any:
    """A model as `lm_eval.simple_evaluate` takes it, for what `evaluate` has no option for.

    import lm_eval
    model = manyheads.load("smollm2")
    lm_eval.simple_evaluate(tasks.lm_eval_model(model), tasks=["hellaswag"])
    """
    import_package("lm_eval", "tasks.lm_eval_model", EXTRA)
    from manyheads.tasks.benchmarks.lm_eval_adapter import LmEvalModel

    return LmEvalModel(
        model,
        without=_heads(model, without),
        replace_with=replace_with,
        max_length=max_length,
        batch_tokens=batch_tokens,
        progress=progress,
    )


def benchmark_data(
    tasks: Tasks, *, data: Path | str | None = None, allow_code: bool = False
) -> list[DatasetNeed]:
    """The datasets of huggingface.co that tasks read and the folder `data` does not hold.

    Nothing is downloaded. They may already be in the local cache of `datasets`.
    """
    return TaskSource.of(tasks, data=data, allow_code=allow_code).needs


@wrapping_models
def evaluate(
    model: build.Model,
    tasks: Tasks,
    *,
    without: addresses.Heads = (),
    replace_with: Replacement = "zero",
    shots: int | None = None,
    limit: int | float | None = None,
    chat: bool = False,
    data: Path | str | None = None,
    download: bool = False,
    allow_code: bool = False,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    out: Path | str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The scores of a model on tasks of lm-evaluation-harness, as `lm_eval` returns them.

    `tasks` are names such as "hellaswag", "mmlu" or "gsm8k", YAML files of tasks, and .json or
    .jsonl files of rows: "question", "choices" and "answer" for multiple choice, "question" and
    "answer" for generation, "text" for perplexity; or folders of these. Heads `without` are
    replaced by zeros, or by their mean over the texts.

    `shots` are the examples before each question, `limit` the documents of each task, and `chat`
    applies the chat template. Data is read from the folder `data` (data/cais/mmlu for cais/mmlu) or
    the cache of `datasets`, and fetched only with `download`. Python functions of local tasks run
    only with `allow_code`. With `out` the files of the harness are written into that folder.
    """
    lm = lm_eval_model(
        model,
        without=without,
        replace_with=replace_with,
        max_length=max_length,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    source = TaskSource.of(tasks, data=data, download=download, allow_code=allow_code)
    loaded = _load(source)
    return _simple(source, loaded, lm, shots=shots, limit=limit, chat=chat, out=out)


@wrapping_models
def evaluate_heads(
    model: build.Model,
    tasks: Tasks,
    heads: addresses.Heads = "all",
    *,
    without: addresses.Heads = (),
    **options: Unpack[EvaluateOptions],
) -> tables.ByHead:
    """The scores of a model on tasks without each head alone, with their standard errors.

    For each task and metric there are two measures: "hellaswag acc", the score without the head
    with the error that the harness gives it, and "hellaswag acc change", its difference to the
    model with all heads. The error of a change is of the same documents with and without the head
    (a jackknife over groups of documents). `without` are heads that all versions lack; the options
    are those of `evaluate`.
    """
    import_package("lm_eval", "tasks.evaluate_heads", EXTRA)
    from lm_eval.evaluator import evaluate as run_tasks

    from manyheads.tasks.benchmarks.lm_eval_adapter import LmEvalModel

    names = addresses.head_names(heads)
    scope = cached_run.head_scope(model, heads=names)
    chosen = scope.find(names)
    source = TaskSource.of(
        tasks,
        data=options.get("data"),
        download=options.get("download", False),
        allow_code=options.get("allow_code", False),
    )
    loaded = _load(source)
    shots, limit = options.get("shots"), options.get("limit")
    chat, progress = options.get("chat", False), options.get("progress", True)
    lm = LmEvalModel(
        model,
        [(head,) for head in chosen],
        without=_heads(model, without),
        replace_with=options.get("replace_with", "zero"),
        max_length=options.get("max_length"),
        batch_tokens=options.get("batch_tokens"),
        progress=progress,
    )
    baseline = _simple(source, loaded, lm, shots=shots, limit=limit, chat=chat, resamples=RESAMPLES)
    scores = list(_scores(baseline, loaded))
    index = {head: place for place, head in enumerate(scope.heads)}
    values = np.full((len(scores), 4, len(index)), np.nan)
    with Progress("heads", total=len(chosen), unit="heads", enabled=progress) as bar:
        for lm.version, head in enumerate(chosen, 1):
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(seed=SEED)
            with source.reading():
                result = run_tasks(
                    lm=lm,
                    task_dict=loaded,
                    limit=limit,
                    bootstrap_iters=RESAMPLES,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=True,
                )
            for row, score in enumerate(scores):
                value, error = score.of(result)
                change = value - score.of(baseline)[0]
                paired = score.change_error(baseline, result)
                values[row, :, index[head]] = value, error, change, paired
            bar.advance()
    names_of = [score.name for score in scores]
    return tables.ByHead(
        kind="benchmark scores",
        blocks=scope.blocks,
        means={
            name: values[row, column]
            for row, title in enumerate(names_of)
            for name, column in ((title, 0), (f"{title} change", 2))
        },
        errors={
            name: values[row, column]
            for row, title in enumerate(names_of)
            for name, column in ((title, 1), (f"{title} change", 3))
        },
        metadata={
            "baseline": {score.name: score.of(baseline)[0] for score in scores},
            "baseline_error": {score.name: _finite(score.of(baseline)[1]) for score in scores},
            "better": {score.name: "higher" if score.higher else "lower" for score in scores},
            "replace_with": options.get("replace_with", "zero"),
            "without": [str(head) for head in lm.without],
            "documents": {name: _documents(baseline, name) for name in baseline["n-samples"]},
            "shots": baseline["n-shot"],
        },
    )


class _Score(NamedTuple):
    """One number of the results: a metric of a task or group, after one of its filters."""

    task: str
    metric: str
    filter: str
    higher: bool
    # The tasks that it is of, and how their values per document become one.
    members: tuple[str, ...]
    aggregate: Callable[[Sequence[Any]], float]

    @property
    def name(self) -> str:
        after = "" if self.filter == "none" else f" {self.filter}"
        return f"{self.task} {self.metric}{after}"

    def of(self, results: Mapping[str, Any]) -> tuple[float, float]:
        """The score and its standard error: that of the harness, or else by leaving out groups."""
        row = results["results"][self.task]
        error = row.get(f"{self.metric}_stderr,{self.filter}", "N/A")
        if not isinstance(error, int | float):
            error = self._error(results)
        return float(row[f"{self.metric},{self.filter}"]), float(error)

    def change_error(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
        """The standard error of the change, from the same documents."""
        return self._error(after, before)

    def _error(self, *results: Mapping[str, Any]) -> float:
        """The jackknife error of a score, or of its difference to that of other results."""
        values = [list(self._values(own)) for own in results]
        documents = len(values[0])
        reported = results[0]["results"][self.task][f"{self.metric},{self.filter}"]
        # Groups may weigh their tasks in another way.
        if documents < 2 or not np.isclose(self.aggregate(values[0]), reported):
            return float("nan")
        groups = min(GROUPS, documents)
        estimates = []
        for left_out in range(groups):
            rows = [row for row in range(documents) if row % groups != left_out]
            first, *rest = (self.aggregate([own[row] for row in rows]) for own in values)
            estimates.append(first - sum(rest))
        return float(np.sqrt((groups - 1) * np.var(np.array(estimates, dtype=float))))

    def _values(self, results: Mapping[str, Any]) -> Iterator[Any]:
        for task in self.members:
            for sample in results["samples"][task]:
                if sample["filter"] == self.filter and self.metric in sample:
                    yield sample[self.metric]


def _scores(results: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[_Score]:
    """The scores of all tasks and groups, in the order of the results."""
    for name, row in results["results"].items():
        group = loaded["groups"].get(name)
        tasks = [loaded["tasks"][name]] if group is None else group.get_all_tasks()
        better = results["higher_is_better"].get(name, {})
        for key in row:
            metric, comma, after = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            aggregate = tasks[0].aggregation()[metric]
            members = tuple(task.task_name for task in tasks)
            yield _Score(name, metric, after, better.get(metric) is not False, members, aggregate)


def _load(source: TaskSource) -> Any:
    loaded = source.load()
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise InputError(
                f"{name} runs the code that a model writes, which is not done here",
                "choose another task, or use lm_eval with tasks.lm_eval_model",
            )
    return loaded


def _simple(
    source: TaskSource,
    loaded: Any,
    lm: Any,
    *,
    shots: int | None,
    limit: int | float | None,
    chat: bool,
    out: Path | str | None = None,
    resamples: int = 100_000,
) -> dict[str, Any]:
    """The results of the harness for loaded tasks, written to its files if there is a folder."""
    import lm_eval
    from lm_eval.loggers import EvaluationTracker

    members = {name for names in loaded["group_map"].values() for name in names}
    roots = [
        item
        for kind in ("groups", "tasks")
        for name, item in loaded[kind].items()
        if name not in members
    ]
    described = {"pretrained": str(lm.model.source or type(lm.model).__name__)}
    if lm.without:
        described["without"] = ",".join(map(str, lm.without))
        described["replace_with"] = lm.replace_with
    tracker = None if out is None else EvaluationTracker(output_path=str(out))
    with source.reading(), _no_commit_outside_git():
        results = lm_eval.simple_evaluate(
            lm,
            model_args=described,
            tasks=roots,
            num_fewshot=shots,
            limit=limit,
            device=str(lm.device),
            bootstrap_iters=resamples,
            apply_chat_template=chat,
            fewshot_random_seed=SEED,
            task_manager=source.manager,
            evaluation_tracker=tracker,
        )
    assert results is not None, "this is the only process"
    if tracker is not None:
        saved = {key: value for key, value in results.items() if key != "samples"}
        tracker.save_results_aggregated(results=saved, samples=results["samples"])
        for name in results["configs"]:
            tracker.save_results_samples(name, results["samples"][name])
    return dict(results)


@contextmanager
def _no_commit_outside_git() -> Iterator[None]:
    """The harness asks git for a commit, which prints an error where there is no repository."""
    from lm_eval import evaluator

    current, ask = Path.cwd(), evaluator.get_git_commit_hash
    inside = any((folder / ".git").exists() for folder in (current, *current.parents))
    try:
        evaluator.get_git_commit_hash = ask if inside else lambda: None
        yield
    finally:
        evaluator.get_git_commit_hash = ask


def _heads(model: build.Model, heads: addresses.Heads) -> HeadSet:
    """The heads by their names; none for an empty name."""
    if not heads:
        return ()
    names = addresses.head_names(heads)
    return cached_run.head_scope(model, heads=names).find(names)


def _finite(value: float) -> float | None:
    return None if np.isnan(value) else value


def _documents(results: Mapping[str, Any], task: str) -> int:
    return int(results["n-samples"][task]["effective"])
