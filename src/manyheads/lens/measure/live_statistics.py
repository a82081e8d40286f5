"""Statistics of the heads of a `transformers` model while somebody else trains or runs it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.bridge import automatic, mask_rules, wrapped_model
from manyheads.errors import InputError, MissingPackageError, check_int
from manyheads.formatting import kind_of
from manyheads.lens.inputs.texts import PassSummary
from manyheads.lens.measure.statistics import Statistics, StatisticsTotals, make_plan
from manyheads.lens.measure.watcher import StatisticsWatcher
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site

LOGGED = ("entropy", "first_token", "induction_score", "largest_logit")


class LiveStatistics:
    """Measures the forwards of a model inside its block; see `monitor`."""

    def __init__(self, model: nn.Module, every: int) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        # The model of `transformers` itself, or the one inside, as in sentence-transformers.
        self._inner: Any = next(filter(automatic.is_of_transformers, modules), None)
        if self._inner is None:
            raise InputError(
                f"{kind_of(model)} holds no model of transformers", "pass one that does"
            )
        self._wrapped = wrapped_model.wrap(self._inner)
        self._plan = make_plan(self._wrapped)
        self._every, self._calls = every, 0
        self._entered = self._running = False
        self._own_forward: Any = None
        self._measured: Any = None
        self.clear()

    def clear(self) -> None:
        """Forget what was measured so far."""
        self._totals, self._texts = StatisticsTotals(), 0

    def statistics(self) -> Statistics:
        """What was measured since the beginning or the last `clear`."""
        if not self._texts:
            raise InputError("no forward was measured yet", "run the model inside the block")
        summary = PassSummary(self._texts, self._totals.tokens, complete=True)
        return self._totals.result(self._wrapped, self._plan, summary)

    def largest_logits(self) -> dict[Address, float]:
        """The largest score of each head before the softmax, with every bias and cap."""
        blocks = blocks_of(self._wrapped)
        values = self._totals.largest_logits(blocks).tolist()
        heads = [address for block in blocks for address in block.addresses]
        return {
            head: value for head, value in zip(heads, values, strict=True) if not math.isnan(value)
        }

    def callback(self, folder: str | Path, measures: Sequence[str] = LOGGED) -> Any:
        """A callback for the Trainer of `transformers` that writes measures for TensorBoard.

        It measures from the beginning of the training to its end, and writes whenever the Trainer
        logs: one curve per measure and head of what was measured since the last time.
        """
        return _trainer_callback(self, Path(folder), measures)

    def __enter__(self) -> "LiveStatistics":
        if self._entered:
            raise InputError("these statistics are being measured already", "enter them once")
        self._entered = True
        # Some libraries call `forward` itself, which skips hooks.
        self._own_forward = self._inner.__dict__.get("forward")
        self._inner.forward = self._measured = self._measuring(self._inner.forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        if self._inner.__dict__.get("forward") is not self._measured:
            # Somebody has wrapped it since; without measuring it only passes on.
            return
        if self._own_forward is None:
            del self._inner.forward
        else:
            self._inner.forward = self._own_forward

    def _measuring(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self._entered or self._running:
                return forward(*args, **kwargs)
            with self._measurement(args, kwargs):
                return forward(*args, **kwargs)

        return measured

    @contextmanager
    def _measurement(self, args: Any, kwargs: dict[str, Any]) -> Iterator[None]:
        """Measure one forward, if it is its turn and succeeds."""
        self._calls += 1
        # A checkpointed layer runs again in the backward pass, after this forward.
        again = self._inner.training and getattr(self._inner, "is_gradient_checkpointing", False)
        if (self._calls - 1) % self._every or again:
            yield
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask, lengths = kwargs.get("attention_mask"), {}
        tokens: dict[str, Ragged] = {}
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            flat = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
            name = "encoder" if "encoder" in self._wrapped.stacks() else self._wrapped.readout_stack
            tokens[name] = Ragged.from_padded(ids, flat)
            starts = None if flat is None else mask_rules.runs(flat != 0)
            if starts is None or not any(start for start, _ in starts):
                lengths[name] = tokens[name].lengths
        texts = len(ids) if isinstance(ids, Tensor) else 1
        watcher = StatisticsWatcher(self._plan, tokens, list(range(texts)))
        self._running = True
        try:
            with self._wrapped.watching(_Detached(watcher), lengths):
                yield
        finally:
            self._running = False
        self._texts += texts
        self._totals.add(watcher)


class _Detached:
    """A watcher whose measurements are no part of the graph."""

    def __init__(self, watcher: StatisticsWatcher) -> None:
        self._watcher = watcher

    def wants(self, site: Site) -> bool:
        return self._watcher.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "patterns are not watched"
        with torch.no_grad():
            self._watcher.see(site, value.map(Tensor.detach))


def monitor(model: nn.Module, *, every: int = 1) -> LiveStatistics:
    """Measure the heads of a `transformers` model while your own code trains or runs it.

    Inside the block every `every`-th forward is measured; its output and gradients stay the same.
    A forward with gradient checkpointing is not measured. `statistics()` gives the result that
    `lens.statistics` gives.

        with manyheads.monitor(model, every=100) as heads:
            trainer.train()
        print(heads.statistics()["entropy"])

    A SentenceTransformer is measured through the model inside it. To follow a training in
    TensorBoard, give the Trainer a callback instead:

        heads = manyheads.monitor(model, every=100)
        trainer = Trainer(model, ..., callbacks=[heads.callback("runs/heads")])
    """
    check_int("every", every, minimum=1)
    return LiveStatistics(model, every)


def _trainer_callback(heads: LiveStatistics, folder: Path, measures: Sequence[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
        from transformers import TrainerCallback
    except ImportError:
        packages = ("transformers", "tensorboard")
        raise MissingPackageError("a callback for TensorBoard", *packages) from None

    class HeadCallback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if not heads._entered:
                heads.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.on_log(args, state, control)
            heads.__exit__()

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if not heads._texts or not state.is_world_process_zero:
                return
            statistics = heads.statistics()
            heads.clear()
            with SummaryWriter(str(folder)) as writer:
                for address in statistics.addresses:
                    values = statistics.of(address)
                    for name in measures:
                        if name in values and math.isfinite(values[name]):
                            tag = f"{name}/{address}".replace(" ", "_")
                            writer.add_scalar(tag, values[name], state.global_step)

    return HeadCallback()
