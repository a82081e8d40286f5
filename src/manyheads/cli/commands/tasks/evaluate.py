"""manyheads evaluate: standard scores of a model, without some heads, or by head."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from manyheads.cli import arguments
from manyheads.cli.options import BatchOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, plain_table, standard_error

if TYPE_CHECKING:
    from manyheads.lens.results.tables import ByHead


@dataclass(frozen=True, slots=True)
class EvaluateCommand:
    """Evaluate a model on benchmarks of lm-evaluation-harness, also without some heads or by head.

    For example: manyheads evaluate smollm2 --tasks hellaswag,my_questions.jsonl --limit 100
    or manyheads evaluate house-gpt --tasks my_questions.jsonl --each-head --json by_head.json

    Tasks are names (mmlu, gsm8k, hellaswag, ceval, cmmlu), YAML files of tasks, .jsonl or .json
    files of rows, and folders of these. Rows have "question", "choices" and "answer"; "question"
    and "answer"; or "text" alone, for perplexity. Data comes from --data or the local cache of
    datasets; what would have to be downloaded is named, and fetched only with --download.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    tasks: Annotated[str, arguments.metavar("NAME,FILE,...")] = ""
    """The tasks, with commas between them."""

    without: Annotated[str, arguments.metavar("L3H5,...", "(none)")] = ""
    """Heads to switch off."""

    each_head: arguments.Flag = False
    """Also score the model without each head alone, with standard errors."""

    heads: Annotated[str, arguments.metavar("L2H7,...", "(all)")] = ""
    """With --each-head: the heads to switch off one at a time."""

    replace_with: Literal["zero", "mean"] = "zero"
    """What replaces a head that is off: zero, or its mean over the texts."""

    shots: arguments.OptionalInt = None
    """Examples before each question; by default as many as the task says."""

    limit: arguments.OptionalInt = None
    """Documents of each task; by default all."""

    chat: arguments.Flag = False
    """Apply the model's chat template."""

    data: arguments.OptionalFolder = None
    """A folder with datasets of huggingface.co: FOLDER/cais/mmlu for cais/mmlu."""

    download: arguments.Flag = False
    """Allow downloads of datasets from huggingface.co."""

    allow_code: arguments.Flag = False
    """Allow local YAML tasks to run their own Python functions."""

    out: arguments.OptionalOutFolder = None
    """A folder for the files that the harness writes: results and all samples."""

    json: arguments.JsonFile = None
    """A .json file for the results as the harness writes them, or with --each-head for the scores
    by head, for manyheads.lens to read; - prints it instead."""

    compute: BatchOptions = BatchOptions()

    def run(self) -> None:
        """Print the scores, or those without each head, the most important head first."""
        arguments.check_json(self.json)
        arguments.check_out_folder(self.out, self.model)
        if not self.tasks:
            raise InputError("manyheads evaluate needs --tasks", "name one, such as rows.jsonl")
        if self.heads and not self.each_head:
            raise InputError("--heads is for --each-head", "add --each-head, or use --without")
        if self.each_head and self.out is not None:
            raise InputError("--out is for the results of one model", "use --json")
        for flag, value in (("--shots", self.shots), ("--limit", self.limit)):
            if value is not None:
                arguments.check_minimum(flag, value, 0 if flag == "--shots" else 1)
        self._announce_downloads()
        model = self.compute.open(self.model)
        options: dict[str, Any] = {
            "without": self.without,
            "replace_with": self.replace_with,
            "shots": self.shots,
            "limit": self.limit,
            "chat": self.chat,
            "data": self.data,
            "download": self.download,
            "allow_code": self.allow_code,
            "batch_tokens": self.compute.batch_tokens,
        }
        from manyheads import tasks

        if self.each_head:
            by_head = tasks.evaluate_heads(model, self.tasks, self.heads or "all", **options)
            _print_heads(self.model, by_head)
            arguments.save_result(self.json, by_head)
            return
        results = tasks.evaluate(model, self.tasks, out=self.out, **options)
        _print_scores(self.model, results, self.without)
        arguments.write_json(self.json, _plain(results))
        if self.out is not None:
            print(f"wrote results and samples into {self.out}")

    def _announce_downloads(self) -> None:
        """With --download: say what may be fetched, before it is."""
        from manyheads import tasks

        needs = tasks.benchmark_data(self.tasks, data=self.data, allow_code=self.allow_code)
        if needs and self.download:
            names = listed([str(need) for need in needs], len(needs))
            print(f"from huggingface.co, unless cached: {names}", file=sys.stderr)


def _plain(results: dict[str, Any]) -> Any:
    """The results as the harness writes them: all but the samples, in values of JSON."""
    from lm_eval.utils import handle_non_serializable

    files = {key: value for key, value in results.items() if key != "samples"}
    return json.loads(json.dumps(files, default=handle_non_serializable))


def _print_scores(name: str, results: dict[str, Any], without: str) -> None:
    from manyheads.console import TerminalPage

    page = TerminalPage()
    page.title(name)
    if without:
        page.paragraph(f"Without {without}.")
    rows = []
    for task, scores in results["results"].items():
        for key, value in scores.items():
            metric, comma, after = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = scores.get(f"{metric}_stderr,{after}")
            error = float(error) if isinstance(error, int | float) else float("nan")
            better = results["higher_is_better"].get(task, {}).get(metric)
            arrow = {True: "higher", False: "lower"}.get(better, "")
            shots = str(results["n-shot"].get(task, ""))
            documents = results["n-samples"].get(task, {}).get("effective", "")
            title = metric if after == "none" else f"{metric} ({after})"
            row = [task, title, f"{value:.4f}", standard_error(error), arrow, shots]
            rows.append([*row, str(documents)])
    titles = ["score", "±", "better", "shots", "documents"]
    page.show(plain_table(["task", "metric"], titles, rows))


def _print_heads(name: str, result: "ByHead") -> None:
    from manyheads.console import TerminalPage

    page, metadata = TerminalPage(), result.metadata
    page.title(name)
    for title, baseline in metadata["baseline"].items():
        better, error = metadata["better"][title], metadata["baseline_error"][title]
        with_error = "" if error is None else f" {standard_error(error)}"
        page.heading(title, right=f"{better} is better")
        page.paragraph(f"With all heads {baseline:.4f}{with_error}.")
        score, change = result[title], result[f"{title} change"]
        rows = [
            [
                str(address),
                f"{score.of(address):.4f}",
                standard_error(score.error_of(address)),
                f"{value:+.4f}",
                standard_error(change.error_of(address)),
            ]
            for address, value in change.ranked(smallest=better == "higher")
        ]
        page.show(plain_table(["without"], ["score", "±", "change", "±"], rows))
