"""Filter a corpus of any size with a classifier: `filter_corpus`."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from manyheads.argument_checks import checked
from manyheads.atomic_write import atomic_write, check_writable, exclusive_lock
from manyheads.data.sources.files import Paths, fingerprint
from manyheads.encoding import encode, filter_rule, text_reader, text_scores
from manyheads.errors import InputError, check_int, check_number
from manyheads.formatting import percent, pluralise
from manyheads.models.build import Model
from manyheads.progress import Progress, duration
from manyheads.renamed_keys import with_new_keys
from manyheads.tasks.filtering import block_scoring
from manyheads.tasks.filtering.corpus import FileGroup, Layout, plan, read_blocks
from manyheads.tasks.filtering.shards import arrow, merge_files, unify_files, write_shard
from manyheads.tasks.fingerprints import filter_fingerprint, older_fingerprint

Engine = Literal["plain", "ray"]
STATE_FILE, LOCK_FILE, PARTS = "_filter.json", ".lock", ".parts"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    """The shards that were written, the counts, and the cost.

    `seconds` is the time of all runs that made this output. `broken_files` could not be read to
    their ends, and `problems` name some rows that could not be read.
    """

    out: Path
    counts: block_scoring.FilterCounts
    shards: tuple[Path, ...]
    seconds: float
    resumed: bool = False
    problems: tuple[str, ...] = ()
    broken_files: tuple[str, ...] = ()
    price_per_hour: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.counts.tokens / max(self.seconds, 1e-9)

    @property
    def cost(self) -> float | None:
        """The price of the time, if `price_per_hour` is known."""
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600

    @property
    def cost_per_million_tokens(self) -> float | None:
        return None if self.cost is None else 1e6 * self.cost / max(1, self.counts.tokens)

    def __str__(self) -> str:
        counts = self.counts
        fraction = percent(counts.kept / max(1, counts.documents))
        lines = [
            f"{counts.kept:,} of {pluralise(counts.documents, 'document')} kept ({fraction}) "
            f"in {pluralise(len(self.shards), 'shard')} of {self.out}",
            f"{counts.tokens:,} tokens in {duration(self.seconds)} "
            f"({self.tokens_per_second:,.0f} tokens/s)",
        ]
        if self.cost is not None:
            per_million = self.cost_per_million_tokens
            lines[1] += f", cost {self.cost:,.4g}: {per_million:,.4g} per million tokens"
        notes = {
            "dropped by their columns alone": counts.decided,
            "truncated": counts.truncated,
            "empty": counts.empty,
            "undecodable": counts.undecodable,
        }
        listed = [f"{count:,} {what}" for what, count in notes.items() if count]
        if listed:
            lines.append(", ".join(listed))
        lines += [f"not readable to its end: {file}" for file in self.broken_files]
        lines += [f"not readable: {problem}" for problem in self.problems]
        return "\n".join(lines)


@dataclass(slots=True)
class FilterState:
    """How far a run has come, as its folder stores it."""

    group: int = 0
    consumed: int = 0
    parts: list[str] = field(default_factory=list)
    part_rows: int = 0
    next_part: int = 0
    shards: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken_files: list[str] = field(default_factory=list)
    complete: bool = False


@checked
def filter_corpus(
    paths: Paths,
    model: Model,
    out: str | Path,
    *,
    keep: str,
    text_column: str = "text",
    separator: str | None = None,
    prefix: str = "",
    max_length: int | None = None,
    batch_tokens: int | None = None,
    block_rows: int = 1024,
    shard_rows: int = 50_000,
    engine: Engine = "plain",
    workers: int | None = None,
    device: str = "auto",
    price_per_hour: float | None = None,
    progress: bool = True,
) -> FilterResult:
    """Keep the documents of a corpus for which a rule over a classifier's output holds.

    This is how FineWeb-Edu was made (arXiv 2406.17557). `paths` are .jsonl, .parquet and .txt
    files, compressed or not, folders or globs; a plain text is one document, or several with a
    `separator`. `keep` is a rule such as `score >= 3 and language == "en"`: see
    `manyheads.encoding.filter_rule`. The score is the output of a regression model, or the expected
    class number. The kept rows go to Parquet shards in the folder `out`, with all their columns
    and with score, label and probability, whose names begin with `prefix`.

    The corpus is read in blocks of `block_rows` documents, so that memory does not grow with it. A
    run that was interrupted, even killed, continues where it was, and its output is the same.
    `engine="ray"` reads and scores on all machines of a Ray cluster, with `workers` copies of the
    model on `device`; the rows are the same, and the scores up to rounding.
    """
    check_int("block_rows", block_rows, minimum=1)
    check_int("shard_rows", shard_rows, minimum=1)
    if workers is not None:
        check_int("workers", workers, minimum=1)
    if price_per_hour is not None:
        check_number("price_per_hour", price_per_hour, "at least 0", lambda price: price >= 0)
    if separator == "":
        raise InputError("separator is empty", r"use '\n\n', or None")
    arrow()
    rule = filter_rule.TextRule.parse(keep)
    rule.check_classes(text_scores.scored_classes(model))
    # Refuses what is wrong before anything is read.
    encode.Options(batch_tokens=batch_tokens)
    max_length = text_reader.resolve_max_length(text_reader.require_text_model(model), max_length)
    folder = Path(out)
    groups = plan(paths)
    if folder.is_file():
        raise InputError(f"out={str(folder)!r} is a file", "name a folder")
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        if Path(path).is_dir() and folder.resolve().is_relative_to(Path(path).resolve()):
            raise InputError(
                f"out={str(folder)!r} is inside the corpus {path}", "use a folder outside of it"
            )
    check_writable(folder)
    run = block_scoring.RunPlan(
        groups,
        Layout(text_column, separator, block_rows),
        block_scoring.ScoringConfig(rule, prefix, max_length, batch_tokens),
    )
    _check_first_block(run, model)
    settings = {
        "keep": keep,
        "model": filter_fingerprint(model),
        "text_column": text_column,
        "separator": separator,
        "prefix": prefix,
        "max_length": max_length,
        "block_rows": block_rows,
        "shard_rows": shard_rows,
        "files": [[file, fingerprint(Path(file))] for group in groups for file in group.files],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / LOCK_FILE, lambda: _refuse_second(folder)):
        writer = _Writer(folder, settings, shard_rows, model)
        resumed = writer.state.consumed > 0 or writer.state.group > 0
        if not writer.state.complete:
            position = writer.state.group, writer.state.consumed
            if engine == "ray":
                from manyheads.tasks.filtering.ray_engine import score_with_ray

                blocks = score_with_ray(run, model, *position, workers, device)
            else:
                blocks = _scored_blocks(run, model, *position)
            _write(blocks, writer, groups, progress)
        return writer.result(resumed, price_per_hour)


def _scored_blocks(
    run: block_scoring.RunPlan, model: Model, first: int, skip: int
) -> Iterator[tuple[int, block_scoring.Scored]]:
    """The next block is read and tokenized while the model reads this one."""

    def prepared() -> Iterator[tuple[int, block_scoring.Prepared]]:
        for index in range(first, len(run.groups)):
            for block in read_blocks(run.groups[index], run.layout, skip if index == first else 0):
                yield index, block_scoring.prepare_block(model, block, run.scoring)

    waiting = prepared()
    with ThreadPoolExecutor(max_workers=1) as executor:
        pending = executor.submit(next, waiting, None)
        while (ready := pending.result()) is not None:
            pending = executor.submit(next, waiting, None)
            yield ready[0], block_scoring.score_block(model, ready[1], run.scoring)


def _write(
    blocks: Iterator[tuple[int, block_scoring.Scored]],
    writer: "_Writer",
    groups: Sequence[FileGroup],
    progress: bool,
) -> None:
    sizes = [group.bytes for group in groups]
    with Progress("filtering", unit="tokens", enabled=progress) as bar:
        for group, block in blocks:
            writer.add(group, block)
            bytes_done = sum(sizes[:group]) + block.fraction * sizes[group]
            if bytes_done:
                bar.expect((bar.done + block.counts.tokens) * sum(sizes) / bytes_done)
            bar.advance(block.counts.tokens)
    writer.finish()


class _Writer:
    """Writes the kept rows of each block to a part, many parts to a shard, and the state.

    A part or shard is complete before the state names it, and what the state does not name is
    written again with the same rows. So a run may be killed at any point.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], shard_rows: int, model: Model
    ) -> None:
        self.folder, self.settings, self.shard_rows = folder, settings, shard_rows
        self.state = _stored_state(folder, settings, model)
        self.parts = folder / PARTS
        # What a killed run was writing; the lock says that it is not running.
        for leftover in (*folder.glob(".*.part"), *self.parts.glob(".*.part")):
            leftover.unlink(missing_ok=True)
        self._since = time.perf_counter()

    def add(self, group: int, block: block_scoring.Scored) -> None:
        state = self.state
        if block.table is not None:
            name = f"{state.next_part:08}.parquet"
            write_shard([block.table], block.table.schema, self.parts / name)
            state.parts.append(name)
            state.part_rows += len(block.table)
            state.next_part += 1
        state.counts = asdict(block_scoring.FilterCounts(**state.counts) + block.counts)
        for problem in block.problems:
            (state.broken_files if problem.ends_file else state.problems).append(problem.reason)
        del state.problems[block_scoring.SHOWN_PROBLEMS :]
        state.group, state.consumed = group, block.consumed
        merged = list(state.parts) if state.part_rows >= self.shard_rows else []
        if merged:
            self._merge()
        self._save()
        for name in merged:
            (self.parts / name).unlink(missing_ok=True)

    def finish(self) -> None:
        if self.state.parts:
            self._merge()
        unify_files(self.shard_files())
        self.state.complete = True
        self._save()
        shutil.rmtree(self.parts, ignore_errors=True)

    def shard_files(self) -> list[Path]:
        return [self.folder / f"shard-{index:05}.parquet" for index in range(self.state.shards)]

    def result(self, resumed: bool, price_per_hour: float | None) -> FilterResult:
        state = self.state
        counts = block_scoring.FilterCounts(**state.counts)
        if not counts.documents:
            raise InputError(
                "no document could be read"
                + (f" ({state.broken_files[0]})" if state.broken_files else ""),
                "check the files",
            )
        return FilterResult(
            out=self.folder,
            counts=counts,
            shards=tuple(self.shard_files()),
            seconds=state.seconds,
            resumed=resumed,
            problems=tuple(state.problems),
            broken_files=tuple(state.broken_files),
            price_per_hour=price_per_hour,
        )

    def _merge(self) -> None:
        state = self.state
        shard = self.folder / f"shard-{state.shards:05}.parquet"
        merge_files([self.parts / name for name in state.parts], shard)
        state.shards += 1
        state.parts, state.part_rows = [], 0

    def _save(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._since
        self._since = now
        content = {"version": VERSION, "settings": self.settings, "state": asdict(self.state)}
        with atomic_write(self.folder / STATE_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=True))


def _stored_state(folder: Path, settings: dict[str, Any], model: Model) -> FilterState:
    """The state of an earlier run with the same settings, or a fresh one."""
    file = folder / STATE_FILE
    if not file.exists():
        if any(folder.glob("*.parquet")):
            raise InputError(
                f"{folder} holds Parquet files that are not of this run", "use another folder"
            )
        return FilterState()
    try:
        stored = json.loads(file.read_text())
        before = with_new_keys(stored["settings"], settings)
        state = FilterState(**stored["state"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file} is damaged", "delete the folder, or use another") from None
    if before.get("model") == older_fingerprint(model):
        before["model"] = settings["model"]
    # A list of lists comes back from JSON as it was; a tuple would not.
    for name, value in settings.items():
        earlier = before.get(name)
        if earlier == value:
            continue
        difference = f"with {name}={earlier!r}, and this one has {name}={value!r}"
        if name == "files":
            old, new = dict(earlier or ()), dict(value)
            changed = [str(file) for file in {**old, **new} if old.get(file) != new.get(file)]
            difference = f"over other files: {', '.join(changed[:3])} differ"
        raise InputError(
            f"{folder} holds a run {difference}",
            "repeat the command of that run to continue it, or use another folder",
        )
    return state


def _refuse_second(folder: Path) -> None:
    raise InputError(f"another process is filtering to {folder}", "wait for it, or stop it")


def _check_first_block(run: block_scoring.RunPlan, model: Model) -> None:
    """Refuse a wrong column at once, and not after hours or with an empty output."""
    block = next(iter(read_blocks(run.groups[0], run.layout)), None)
    if block is None or not block.texts:
        problems = block.problems if block else []
        reasons = [problem.reason for problem in problems if not problem.ends_file]
        if reasons:
            rows = pluralise(len(reasons), "row")
            problem = f"none of the first {rows} can be read: {reasons[0]}"
            raise InputError(problem, "check text_column")
        return
    for name in run.scoring.rule.columns:
        if not block.has_column(name):
            near = get_close_matches(name, (*filter_rule.KNOWN_NAMES, *block.names), n=1)
            names = f"use one of {', '.join(block.names)}, and put strings in quotes"
            raise InputError(
                f"keep={run.scoring.rule.text!r}: the rows have no column {name!r}",
                f"did you mean {near[0]}" if near else names,
            )
    block_scoring.check_new_columns(
        run.scoring.new_columns(text_scores.scored_classes(model)), block.names
    )
