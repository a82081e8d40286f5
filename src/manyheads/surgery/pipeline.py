"""The pruning pipeline: select units, prune them, recover, and compare both models."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manyheads.attention import Attention
from manyheads.bridge.automatic import native_models_only, require_native
from manyheads.errors import InputError
from manyheads.formatting import plain_table
from manyheads.lens.causal.evaluate import Evaluation, Variant
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.inputs.evaluation_inputs import EvaluationInputs, prepare_inputs
from manyheads.lens.inputs.texts import Inputs, Targets, batch_ranges, read_inputs
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.surgery.finetune.loop import recover
from manyheads.surgery.pruning import ReplaceWith, prune, prune_layers, prune_neurons
from manyheads.surgery.rebuild import check_own_weights
from manyheads.surgery.selection import l0_selection, layers, neurons, results
from manyheads.surgery.selection.heads import HeadSelection, select_heads
from manyheads.taps import Sublayer

AnySelection = HeadSelection | neurons.NeuronSelection | layers.LayerSelection

TIMED_ROUNDS = 7
# Tokens that are timed together.
TIMED_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningConfig:
    """How much of which unit to remove, in which order, and how long to recover.

    By default `by` is "ablation", and "gradient" for neurons, which are many. `replace_with` and
    `sublayer` are for heads only.
    """

    unit: results.UnitName = "heads"
    fraction: float | None = None
    budget: float | None = None
    by: results.Order | None = None
    iterative: bool = False
    replace_with: ReplaceWith = "zero"
    stack: StackName | None = None
    sublayer: Sublayer = Sublayer.ATTENTION
    l0: l0_selection.L0Config = l0_selection.DEFAULT_L0
    recovery_steps: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters, those of attention, bytes, heads, and tokens per second."""

    parameters: int
    attention: int
    bytes: int
    heads: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PruningResult:
    """The selection, the pruned model, and both models side by side.

    `pruned` is the metric after pruning and `recovered` after recovery, both measured again on the
    texts of the selection. Where the request could not be met, or the selection was interrupted,
    nothing is pruned.
    """

    selection: AnySelection
    model: Model | None = None
    before: ModelSize | None = None
    after: ModelSize | None = None
    pruned: float | None = None
    recovered: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        selection = self.selection
        return {
            "by": selection.by,
            "metric": selection.metric,
            "baseline": selection.baseline,
            selection.unit: selection.total,
            "removed": selection.removed if selection.met else [],
            "harmful": list(selection.harmful_names),
            "met": selection.met,
            "curve": selection.rows(),
            "pruned": self.pruned,
            "recovered": self.recovered,
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
        }

    def table(self) -> Any:
        """A rich table of both models: their size, their speed and the metric."""
        assert self.before is not None
        assert self.after is not None
        before, after = asdict(self.before), asdict(self.after)
        rows = [
            [
                title,
                f"{before[name]:,.0f}",
                f"{after[name]:,.0f}",
                f"{after[name] / before[name]:.2f}" if before[name] else "-",
            ]
            for title, name in (
                ("heads", "heads"),
                ("parameters", "parameters"),
                ("of attention", "attention"),
                ("bytes", "bytes"),
                ("tokens per second", "tokens_per_second"),
            )
        ]
        metric = self.selection.metric
        rows.append([metric, f"{self.selection.baseline:.4f}", f"{self.pruned:.4f}", ""])
        if self.recovered is not None:
            rows.append(["after recovery", "", f"{self.recovered:.4f}", ""])
        return plain_table([""], ["before", "after", "ratio"], rows)


@native_models_only
def run_pruning(
    model: Model,
    texts: Sequence[Any],
    config: PruningConfig,
    *,
    recovery_texts: Sequence[Any] = (),
    targets: Targets | None = None,
    recovery_targets: Targets | None = None,
    progress: bool = True,
) -> PruningResult:
    """Select on the texts, prune, and recover on `recovery_texts`, or on the same texts.

    A classifier needs `targets`, the correct classes.
    """
    require_native(model, "pruning")
    check_own_weights(model)
    if config.recovery_steps < 0:
        raise InputError(
            f"recovery_steps must be at least 0, got {config.recovery_steps}", "use 0 or more"
        )
    if config.recovery_steps and model.readout is None:
        raise InputError("a model without a readout cannot be trained", "leave recovery out")
    inputs = prepare_inputs(model, texts, targets=targets, seed=config.seed)
    selection = _select(model, inputs, config, progress)
    if not (selection.met and selection.complete):
        return PruningResult(selection=selection)
    pruned = _prune(model, selection, config, inputs)
    value, recovered = _evaluate(pruned, model, inputs), None
    if config.recovery_steps:
        pruned = recover(
            pruned,
            recovery_texts or texts,
            config.recovery_steps,
            targets=recovery_targets if recovery_texts else targets,
            seed=config.seed,
            progress=progress,
        )
        recovered = _evaluate(pruned, model, inputs)
    before, after = compare_sizes((model, pruned), inputs.model_inputs)
    return PruningResult(
        selection=selection,
        model=pruned,
        before=before,
        after=after,
        pruned=value,
        recovered=recovered,
    )


def _select(
    model: Model, inputs: EvaluationInputs, config: PruningConfig, progress: bool
) -> AnySelection:
    common: dict[str, Any] = {
        "fraction": config.fraction,
        "budget": config.budget,
        "iterative": config.iterative,
        "metric": inputs.metric,
        "targets": inputs.targets,
        "stack": config.stack,
        "l0": config.l0,
        "seed": config.seed,
        "progress": progress,
    }
    by = config.by or ("gradient" if config.unit == "neurons" else "ablation")
    if config.unit == "heads":
        common |= {"replace_with": config.replace_with, "sublayer": config.sublayer}
        return select_heads(model, inputs.model_inputs, by, **common)
    for name, value, default in (
        ("replace_with", config.replace_with, "zero"),
        ("sublayer", config.sublayer.value, "attention"),
    ):
        if value != default:
            raise InputError(
                f"{name}={value!r} cannot be used with unit={config.unit!r}",
                "leave it out, or prune heads",
            )
    if config.unit == "layers":
        return layers.select_layers(model, inputs.model_inputs, by, **common)
    return neurons.select_neurons(model, inputs.model_inputs, by, **common)


def _prune(
    model: Model, selection: AnySelection, config: PruningConfig, inputs: EvaluationInputs
) -> Model:
    match selection:
        case HeadSelection():
            return prune(model, selection.heads, config.replace_with, inputs.model_inputs)
        case neurons.NeuronSelection():
            return prune_neurons(model, selection.neurons, stack=config.stack)
        case layers.LayerSelection():
            return prune_layers(model, selection.layers, stack=config.stack)


def _evaluate(pruned: Model, model: Model, inputs: EvaluationInputs) -> float:
    """The metric of the pruned model, evaluated as the original one."""
    evaluation = Evaluation.of(
        model, inputs.model_inputs, inputs.metric, inputs.targets, progress=False
    )
    return evaluation.measure([Variant(pruned)]).of(0)[0]


def compare_sizes(models: Sequence[Model], texts: Inputs) -> list[ModelSize]:
    """The sizes and speeds of models, timed in turns so that other load affects all alike."""
    model_inputs = read_inputs(models[0], texts)
    sizes = model_inputs.sizes(models[0])
    first = next(batch_ranges(sizes, TIMED_TOKENS))
    batch, tokens = model_inputs.select(first), sum(sizes[text] for text in first)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(TIMED_ROUNDS + 1):
        for times, model in zip(seconds, models, strict=True):
            times.append(_time(model, batch))
    # The first round warms up.
    rates = [tokens / statistics.median(times[1:]) for times in seconds]
    return list(map(_size, models, rates))


def _time(model: Model, batch: ModelInputs) -> float:
    on_cuda = next(model.parameters()).is_cuda
    with eval_mode(model), torch.inference_mode():
        if on_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        model.run_inputs(batch)
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started


def _size(model: Model, rate: float) -> ModelSize:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    return ModelSize(
        parameters=sum(weight.numel() for weight in model.parameters()),
        attention=sum(weight.numel() for module in attentions for weight in module.parameters()),
        bytes=sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        heads=sum(module.config.heads for module in attentions),
        tokens_per_second=rate,
    )
