"""Work on many machines by Ray Data: actors that hold the model, and results in order."""

import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.encoding.classify import Classification, classify_counted
from manyheads.encoding.encode import Encoded, Options, encode_with_counts
from manyheads.encoding.text_reader import Texts
from manyheads.errors import InputError, ManyheadsError, MissingPackageError, TruncationWarning
from manyheads.models.build import Model
from manyheads.models.provenance import Pooling
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tasks.filtering import block_scoring, corpus

# Texts that a worker receives at a time.
TEXTS_PER_TASK = 1024
# A reader mostly waits for its disk.
READER_CPUS = 0.5
# Loggers that report what the user did not ask for.
TALKATIVE = ("ray", "ray.data", "ray.tune", "ray._private")

# What Ray's own processes say and send.
QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# Reads one source as the items that are worked on.
Expand = Callable[[Any], Iterator[Any]]
Work = Callable[[Model, Any], Any]


class WorkerError(NamedTuple):
    """An error that the user can fix, on its way from a worker."""

    problem: str
    remedy: str


class RayWorker:
    """An actor with its own copy of the model."""

    def __init__(self, model: Any, device: str, work: Work) -> None:
        import ray

        self.model: Model = ray.get(model).to(device).eval()
        self.work = work

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        # Ray moves Python objects as pickles anyway; these bytes keep each item in one piece.
        return {"item": [pickle.dumps(self._result(pickle.loads(item))) for item in batch["item"]]}

    def _result(self, item: Any) -> Any:
        if isinstance(item, WorkerError):
            return item
        try:
            return self.work(self.model, item)
        except ManyheadsError as error:
            return WorkerError(error.problem, error.remedy)


class RayReader:
    """A task that reads one source and passes on its items, one by one."""

    def __init__(self, expand: Expand) -> None:
        self.expand = expand

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        try:
            for source in batch["item"]:
                for item in self.expand(pickle.loads(source)):
                    yield {"item": [pickle.dumps(item)]}
        except ManyheadsError as error:
            yield {"item": [pickle.dumps(WorkerError(error.problem, error.remedy))]}


def ray_map(
    model: Model,
    sources: Sequence[Any],
    work: Work,
    *,
    expand: Expand | None = None,
    workers: int | None = None,
    device: str = "auto",
) -> Iterator[Any]:
    """`work(model, item)` for every item of every source, in order.

    A cluster that is named by RAY_ADDRESS, or that Python is connected to, is used; otherwise Ray
    is started on this machine for `workers` actors, and stopped in the end.
    """
    with ray_session(workers) as ray:
        gpus, device = _device(ray, device)
        count = workers or gpus or max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)
        for name, value in list(vars(model).items()):
            # Views of dicts cannot be sent.
            if isinstance(value, MappingProxyType):
                setattr(model, name, dict(value))
        # Shared memory holds it once per machine.
        home = next(model.parameters()).device
        stored = ray.put(model if home.type == "cpu" else model.to("cpu"))
        model.to(home)
        items = [{"item": pickle.dumps(source)} for source in sources]
        data = ray.data.from_items(items, override_num_blocks=max(1, len(items)))
        if expand is not None:
            # With needs of its own it is a stage of its own, and one file keeps all workers busy.
            reader = RayReader(expand).__call__
            data = data.map_batches(reader, batch_size=1, num_cpus=READER_CPUS)
        data = data.map_batches(
            RayWorker,
            batch_size=1,
            concurrency=count,
            num_gpus=1 if gpus else 0,
            fn_constructor_args=(stored, device, work),
        )
        for batch in data.iter_batches(batch_size=None, prefetch_batches=1):
            for item in map(pickle.loads, batch["item"]):
                if isinstance(item, WorkerError):
                    raise InputError(*item)
                yield item


@contextmanager
def ray_session(workers: int | None) -> Iterator[Any]:
    """Ray, started quietly and stopped in the end unless it ran before."""
    try:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import ray
        import ray.data
    except ImportError:
        raise MissingPackageError("engine='ray'", "'manyheads[ray]'") from None
    started = not ray.is_initialized()
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    if started:
        # One for each worker and one for the reader, whatever the machine has.
        cpus = (workers or max(1, (os.cpu_count() or 2) - 1)) + 1
        local: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cpus}
        with _silent_stderr():
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                **local,
            )
    context = ray.data.DataContext.get_current()
    before = (
        context.enable_progress_bars,
        context.execution_options.preserve_order,
        context.target_max_block_size,
    )
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    # Each item is a block of its own, or one worker would receive all of them.
    context.target_max_block_size = 1
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        context.enable_progress_bars = before[0]
        context.execution_options.preserve_order = before[1]
        context.target_max_block_size = before[2]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if started:
            ray.shutdown()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide what Ray's libraries print on starting; a failure is an exception all the same."""
    sys.stderr.flush()
    before = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def _device(ray: Any, device: str) -> tuple[int, str]:
    """The GPUs of the cluster that are used, and the device of each actor."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if device == "auto":
        return gpus, "cuda" if gpus else "cpu"
    if device.startswith("cuda") and not gpus:
        raise InputError(f"device={device!r}, and Ray finds no GPU", "use device='cpu'")
    return (gpus, "cuda") if device.startswith("cuda") else (0, device)


def score_with_ray(
    run: block_scoring.RunPlan,
    model: Model,
    first: int,
    skip: int,
    workers: int | None,
    device: str,
) -> Iterator[tuple[int, block_scoring.Scored]]:
    """The blocks of a corpus from a position on, scored by the workers, in order."""
    _, layout, config = run

    def expand(source: tuple[int, corpus.FileGroup, int]) -> Iterator[tuple[int, Any]]:
        index, group, skipped = source
        return ((index, block) for block in corpus.read_blocks(group, layout, skipped))

    def score(model: Model, item: tuple[int, Any]) -> tuple[int, block_scoring.Scored]:
        prepared = block_scoring.prepare_block(model, item[1], config)
        return item[0], block_scoring.score_block(model, prepared, config)

    sources = [
        (index, run.groups[index], skip if index == first else 0)
        for index in range(first, len(run.groups))
    ]
    return ray_map(model, sources, score, expand=expand, workers=workers, device=device)


@checked
def encode_with_ray(
    model: Model,
    texts: Texts,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    progress: bool = True,
) -> Float[Tensor, "b c"]:
    """`encode` on `workers` copies of the model, each on a `device` of Ray: the same vectors.

    They are in the order of the texts and on the CPU.
    """
    options = Options(
        pooling=pooling,
        normalize=normalize,
        batch_tokens=batch_tokens,
        max_length=max_length,
        progress=progress,
    )
    encoded = encode_on_workers(model, texts, options, workers, device)
    if encoded.truncated:
        warnings.warn(encoded.truncation, TruncationWarning, stacklevel=3)
    return encoded.vectors


@checked
def classify_with_ray(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    progress: bool = True,
) -> Classification:
    """`classify` on `workers` copies of the model, each on a `device` of Ray: the same classes."""
    options = Options(
        batch_tokens=batch_tokens, max_length=max_length, progress=progress, doing="classifying"
    )
    classes, encoded = classify_on_workers(model, texts, options, workers, device)
    if encoded.truncated:
        warnings.warn(encoded.truncation, TruncationWarning, stacklevel=3)
    return classes


def encode_on_workers(
    model: Model, texts: Texts, options: Options, workers: int | None, device: str
) -> Encoded:
    """`encode_with_ray` with counts and without a warning."""
    results = list(_over_texts(model, texts, encode_with_counts, options, workers, device))
    if not results:
        return encode_with_counts(model, texts, options)
    encoded = _joined(results)
    return replace(encoded, vectors=encoded.vectors.to(options.device))


def classify_on_workers(
    model: Model, texts: Texts, options: Options, workers: int | None, device: str
) -> tuple[Classification, Encoded]:
    """`classify_with_ray` with counts and without a warning."""
    results = list(_over_texts(model, texts, classify_counted, options, workers, device))
    if not results:
        return classify_counted(model, texts, options)
    classes = results[0][0]
    encoded = _joined([replace(part, vectors=kind.probabilities) for kind, part in results])
    return replace(classes, probabilities=encoded.vectors), encoded


def _joined(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(
        torch.cat([part.vectors for part in parts]),
        sum(part.tokens for part in parts),
        sum(part.truncated for part in parts),
        parts[0].max_length,
    )


def _over_texts(
    model: Model,
    texts: Texts,
    work: Callable[..., Any],
    options: Options,
    workers: int | None,
    device: str,
) -> Iterator[Any]:
    """The results for `TEXTS_PER_TASK` texts at a time, with a progress bar."""
    texts = [texts] if isinstance(texts, str) else texts
    texts = texts.to_list() if isinstance(texts, Ragged) else texts
    starts = range(0, len(texts), TEXTS_PER_TASK)
    parts = [list(texts[start : start + TEXTS_PER_TASK]) for start in starts]
    if not parts:
        return
    item_work = partial(work, options=replace(options, device="cpu", progress=False))
    results = ray_map(model, parts, item_work, workers=workers, device=device)
    with Progress(options.doing, total=len(texts), unit="texts", enabled=options.progress) as bar:
        for part, result in zip(parts, results, strict=True):
            yield result
            bar.advance(len(part))
