"""Statistics of the heads of a `transformers` model while somebody else trains or runs it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.bridge.automatic import is_of_transformers
from manyheads.bridge.mask_rules import runs
from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import InputError, MissingPackageError, check_int
from manyheads.lens.inputs.texts import PassSummary
from manyheads.lens.measure.statistics import Statistics, StatisticsTotals, make_plan
from manyheads.lens.measure.watcher import StatisticsWatcher
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site

LOGGED = ("entropy", "first_token", "induction_score")


class LiveStatistics:
    """Measures the forwards of a model inside its block; see `patch_attention`."""

    def __init__(self, model: Any, every: int) -> None:
        self._inner = _find_model(model)
        self._wrapped = wrap(self._inner)
        self._plan = make_plan(self._wrapped)
        self._every, self._calls = every, 0
        self._hooks = ExitStack()
        self._forward: ExitStack | None = None
        self._watcher: StatisticsWatcher | None = None
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

    def __enter__(self) -> "LiveStatistics":
        before = self._inner.register_forward_pre_hook(self._before, with_kwargs=True)
        after = self._inner.register_forward_hook(self._after, always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_forward()
        self._hooks.close()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._calls += 1
        # A checkpointed layer runs again in the backward pass, after this forward.
        again = module.training and getattr(module, "is_gradient_checkpointing", False)
        if (self._calls - 1) % self._every or again:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask, known = kwargs.get("attention_mask"), {}
        tokens: dict[str, Ragged] = {}
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            flat = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
            name = "encoder" if "encoder" in self._wrapped.stacks else self._wrapped.readout_stack
            tokens[name] = Ragged.from_padded(ids, flat)
            starts = None if flat is None else runs(flat != 0)
            if starts is None or not any(start for start, _ in starts):
                known[name] = tokens[name].lengths
        texts = len(ids) if isinstance(ids, Tensor) else 1
        self._watcher = StatisticsWatcher(self._plan, tokens, list(range(texts)))
        self._texts += texts
        self._forward = ExitStack()
        self._forward.enter_context(self._wrapped.watching(_Detached(self._watcher), known))

    def _after(self, *_: object) -> None:
        self._end_forward()

    def _end_forward(self) -> None:
        if self._forward is None or self._watcher is None:
            return
        self._forward.close()
        self._totals.add(self._watcher)
        self._forward = self._watcher = None


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


def _find_model(model: Any) -> Any:
    """The model of `transformers` itself, or the one inside, as in sentence-transformers."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for each in modules:
        if is_of_transformers(each):
            return each
    raise InputError(
        f"a {type(model).__name__} holds no model of transformers", "pass one that does"
    )


def patch_attention(model: Any, *, every: int = 1) -> LiveStatistics:
    """Measure the heads of a `transformers` model while your own code trains or runs it.

    Inside the block every `every`-th forward is measured; its output and gradients stay the same.
    A forward with gradient checkpointing is not measured. `statistics()` gives the result that
    `lens.statistics` gives.

        with manyheads.patch_attention(model, every=100) as heads:
            trainer.train()
        print(heads.statistics()["entropy"])
    """
    check_int("every", every, minimum=1)
    return LiveStatistics(model, every)


def trainer_callback(heads: LiveStatistics, folder: str, measures: Sequence[str] = LOGGED) -> Any:
    """A callback for the Trainer of `transformers` that writes measures per head for TensorBoard.

    It writes whenever the Trainer logs, what was measured since the last time.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
        from transformers import TrainerCallback
    except ImportError:
        packages = ("transformers", "tensorboard")
        raise MissingPackageError("trainer_callback", *packages) from None

    class HeadCallback(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if not heads._texts:
                return
            found = heads.statistics()
            heads.clear()
            with SummaryWriter(folder) as writer:
                for name in (each for each in measures if each in found.names):
                    for address in found.addresses:
                        tag = f"{name}/{address}".replace(" ", "_")
                        writer.add_scalar(tag, found.of(address)[name], state.global_step)

    return HeadCallback()
