"""Filter a corpus of any size with a classifier: `filter_corpus`."""

import json
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from manyheads.annotations import NonNegativeFloat, NonNegativeInt
from manyheads.argument_checks import check_fields, checked
from manyheads.atomic_write import atomic_write, check_writable, exclusive_lock
from manyheads.checkpoints.files import parse_json
from manyheads.data.sources.files import Paths, fingerprint
from manyheads.data.sources.rows import open_parquet
from manyheads.encoding import encode, filter_rule, text_reader, text_scores
from manyheads.encoding.fingerprints import filter_fingerprint, older_fingerprint
from manyheads.errors import InputError, ManyheadsError, check_int, check_number, short_repr
from manyheads.formatting import percent, pluralise
from manyheads.models.build import Model
from manyheads.progress import Progress, duration
from manyheads.renamed_keys import with_new_keys
from manyheads.tasks.filtering import block_scoring
from manyheads.tasks.filtering.corpus import FileGroup, Layout, plan, read_blocks
from manyheads.tasks.filtering.shards import arrow, merge_files, unify_files, write_shard
from manyheads.train.loop.manifest import file_checksum

Engine = Literal["plain", "ray"]
STATE_FILE, LOCK_FILE, PARTS = "_filter.json", ".lock", ".parts"
PART_NAME = re.compile(r"\d{8,}\.parquet")
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


@check_fields
@dataclass(slots=True)
class FilterState:
    """How far a run has come, as its folder stores it.

    `checksums` are those of the parts and shards by name; a shard that is being replaced has two.
    `starts` has for each shard, and for the one that is not complete yet, the position where its
    rows begin; it is empty where an earlier version did not store it.
    """

    group: NonNegativeInt = 0
    consumed: NonNegativeInt = 0
    parts: list[str] = field(default_factory=list)
    part_rows: NonNegativeInt = 0
    next_part: NonNegativeInt = 0
    shards: NonNegativeInt = 0
    seconds: NonNegativeFloat = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken_files: list[str] = field(default_factory=list)
    complete: bool = False
    checksums: dict[str, list[str]] = field(default_factory=dict)
    starts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = asdict(block_scoring.FilterCounts())
        wrong = [name for name, count in self.counts.items() if count < 0 or name not in counts]
        wrong += [name for name in self.parts if not PART_NAME.fullmatch(name)]
        fields = len(self.position) if not wrong else 0
        if wrong or any(
            start and (len(start) != fields or min(start) < 0) for start in self.starts
        ):
            raise InputError(f"the state has a wrong {short_repr((*wrong, 'start')[0])}")
        if not (self.group or self.consumed):
            self.starts = [self.position]

    @property
    def position(self) -> list[int]:
        """Where the run is, in numbers from which `from_shard` restores it."""
        lengths = len(self.problems), len(self.broken_files)
        counts = asdict(block_scoring.FilterCounts(**self.counts)).values()
        return [self.group, self.consumed, self.next_part, *lengths, *counts]

    def from_shard(self, shard: int) -> "FilterState":
        """The state before a shard was begun, or before the first where that is not known."""
        if shard >= len(self.starts) or not self.starts[shard]:
            return FilterState(seconds=self.seconds)
        group, consumed, next_part, problems, broken, *counts = self.starts[shard]
        names = asdict(block_scoring.FilterCounts())
        return FilterState(
            group=group,
            consumed=consumed,
            next_part=next_part,
            shards=shard,
            seconds=self.seconds,
            counts=dict(zip(names, counts, strict=True)),
            problems=self.problems[:problems],
            broken_files=self.broken_files[:broken],
            checksums={
                name: self.checksums[name]
                for name in map(shard_name, range(shard))
                if name in self.checksums
            },
            starts=self.starts[: shard + 1],
        )


def shard_name(index: int) -> str:
    return f"shard-{index:05}.parquet"


def _checksum(file: Path) -> str:
    return f"{file.stat().st_size} bytes, {file_checksum(file)}"


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
        self.parts = folder / PARTS
        self.state = self._intact(_stored_state(folder, settings, model))
        # What a killed run was writing; the lock says that it is not running.
        for leftover in (*folder.glob(".*.part"), *self.parts.glob(".*.part")):
            leftover.unlink(missing_ok=True)
        self._since = time.perf_counter()

    def _intact(self, state: FilterState) -> FilterState:
        """The state, or that before the first shard that is damaged or has damaged parts."""
        shards = (self.folder / shard_name(shard) for shard in range(state.shards))
        damaged = next((n for n, file in enumerate(shards) if not self._is_intact(file, state)), -1)
        if damaged >= 0:
            state = state.from_shard(damaged)
        elif not all(self._is_intact(self.parts / name, state) for name in state.parts):
            state = state.from_shard(state.shards)
        stay = {*state.parts, *map(shard_name, range(state.shards))}
        for file in (*self.folder.glob("shard-*.parquet"), *self.parts.glob("*.parquet")):
            # What is written again must not go through a link.
            if file.name not in stay:
                if file.is_dir():
                    raise InputError(f"{file} is a folder", "remove it")
                file.unlink()
        return state

    def _is_intact(self, file: Path, state: FilterState) -> bool:
        try:
            if file.name in state.checksums:
                return _checksum(file) in state.checksums[file.name]
            # Earlier versions stored no checksums.
            with open_parquet(file) as opened:
                return bool(opened.metadata)
        except (OSError, InputError):
            return False

    def add(self, group: int, block: block_scoring.Scored) -> None:
        state = self.state
        if block.table is not None:
            name = f"{state.next_part:08}.parquet"
            write_shard([block.table], block.table.schema, self.parts / name)
            state.checksums[name] = [_checksum(self.parts / name)]
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
        for shard, copy in unify_files(self.shard_files(), self.parts):
            now = self.state.checksums.setdefault(shard.name, [_checksum(shard)])
            now.append(_checksum(copy))
            # A kill before or after the next step leaves one of the two.
            self._save()
            copy.replace(shard)
        self.state.complete = True
        self._save()
        shutil.rmtree(self.parts, ignore_errors=True)

    def shard_files(self) -> list[Path]:
        return [self.folder / shard_name(index) for index in range(self.state.shards)]

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
        shard = self.folder / shard_name(state.shards)
        merge_files([self.parts / name for name in state.parts], shard)
        for name in state.parts:
            state.checksums.pop(name, None)
        state.checksums[shard.name] = [_checksum(shard)]
        state.shards += 1
        state.parts, state.part_rows = [], 0
        unknown: list[list[int]] = [[]] * (state.shards - len(state.starts))
        state.starts += [*unknown, state.position]

    def _save(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._since
        self._since = now
        state = asdict(self.state)
        content = {"version": VERSION, "settings": self.settings, "state": state}
        content["crc32"] = _state_checksum(state)
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
    remedy = "delete the folder, or use another"
    try:
        stored = parse_json(file.read_bytes(), str(file), remedy=remedy)
        before = with_new_keys(stored["settings"], settings)
        earlier_files = dict(before.get("files") or ())
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} is damaged", remedy) from None
    if before.get("model") == older_fingerprint(model):
        before["model"] = settings["model"]
    # A list of lists comes back from JSON as it was; a tuple would not.
    for name, value in settings.items():
        earlier = before.get(name)
        if earlier == value:
            continue
        difference = f"with {name}={short_repr(earlier)}, and this one has {name}={value!r}"
        if name == "files":
            old, new = earlier_files, dict(value)
            changed = [str(file) for file in {**old, **new} if old.get(file) != new.get(file)]
            difference = f"over other files: {', '.join(changed[:3])} differ"
        raise InputError(
            f"{folder} holds a run {difference}",
            "repeat the command of that run to continue it, or use another folder",
        )
    with suppress(ManyheadsError, KeyError, TypeError):
        checksum = _state_checksum(stored["state"])
        # Earlier versions wrote no checksums at all.
        earlier_version = "crc32" not in stored and "checksums" not in stored["state"]
        if earlier_version or stored.get("crc32") == checksum:
            return FilterState(**stored["state"])
    # It is this very run, whose state is damaged: all is done again.
    return FilterState()


def _state_checksum(state: Any) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


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
