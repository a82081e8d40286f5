"""Run files that train an adapter of a model, or only some of its heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from manyheads.argument_checks import check_fields
from manyheads.checkpoints.config_json import family_of
from manyheads.checkpoints.folder import Saved, save
from manyheads.errors import ConfigError, ManyheadsError
from manyheads.models.build import Model
from manyheads.models.recipes import ModelConfig
from manyheads.surgery.finetune.trainable import freeze, freeze_except
from manyheads.surgery.lora.adapters import adapt, delete_adapter, merge
from manyheads.surgery.lora.low_rank import LoraConfig
from manyheads.surgery.lora.peft_files import check_saveable, save_adapter
from manyheads.surgery.lora.quantization import quantize
from manyheads.train.loop.model_setup import model_with_weights
from manyheads.train.loop.session import ModelHooks, TrainResult, train
from manyheads.train.regularizers import L0Gates, L1Scales, Regularizer, final_gates
from manyheads.train.run_file import run_config

ADAPTER, FREEZE = "adapter", "freeze"
MODEL = "model"


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTable(LoraConfig):
    """The [adapter] table of a run file: what is adapted, and whether the base is quantized.

    `merged` also saves the model with the adapter in its weights.
    """

    name: str = "default"
    base: Literal["as it is", "nf4"] = "as it is"
    merged: bool = False

    def __post_init__(self) -> None:
        LoraConfig.__post_init__(self)
        if self.merged and self.base == "nf4":
            raise ConfigError(
                "merged=true loses the update in the four-bit weights of base='nf4'",
                "leave one of them out",
            )

    def with_head(self) -> "AdapterTable":
        """The same, with a new readout that must be trained."""
        names = tuple(dict.fromkeys((*self.modules_to_save, "readout")))
        return replace(self, modules_to_save=names)

    def prepare(self, model: Model, seed: int) -> Model:
        if self.base == "nf4":
            quantize(model)
        check_saveable(model, adapt(model, self, self.name, seed=seed).modules)
        return model

    def check(self, regularizers: Sequence[Regularizer]) -> None:
        """Raise for regularizers that cannot be used with an adapter."""
        for regularizer in regularizers:
            if isinstance(regularizer, L0Gates) and not self.merged:
                raise ConfigError(
                    "L0Gates closes heads of the model, which the files of an adapter cannot store",
                    "set adapter.merged=true, which saves the whole model, or leave L0Gates out",
                )
            if isinstance(regularizer, L1Scales):
                raise ConfigError(
                    "L1Scales needs trainable head scales, and an adapter does not train them",
                    "leave it out",
                )

    def save(self, model: Model, folder: Path) -> Saved:
        # The adapter was trained together with the gates, which its files cannot store.
        if final_gates(model):
            return self._merged(model, folder)
        saved = save_adapter(model, folder / ADAPTER, self.name)
        family = family_of(model).name
        kind = f"an adapter of {family}"
        if self.merged:
            kind += f", merged into {self._merged(model, folder).folder}"
        return Saved(saved, kind, "manyheads alone" if family == "native" else "peft")

    def _merged(self, model: Model, folder: Path) -> Saved:
        merge(model, self.name)
        delete_adapter(model)
        return _save_full_model(model, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeTable:
    """The [freeze] table of a run file: `heads` to freeze, or those to train alone (`all_except`).

    The model itself is trained and saved; what belongs to a head is as in `freeze_except`.
    """

    heads: tuple[str, ...] = ()
    all_except: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.heads) == bool(self.all_except):
            raise ConfigError(
                f"[freeze] needs heads or all_except, got heads={list(self.heads)} and "
                f"all_except={list(self.all_except)}",
                'give one of them, such as all_except = ["L0H1"]',
            )

    def with_head(self) -> "FreezeTable":
        """The same, with a new readout that must be trained."""
        if self.all_except:
            raise ConfigError(
                f"model.classes is set and only {', '.join(self.all_except)} would be trained, not "
                "the new classes",
                "use freeze.heads, or [adapter]",
            )
        return self

    def check(self, regularizers: Sequence[Regularizer]) -> None:
        """Raise for regularizers that would change frozen heads."""
        if any(isinstance(regularizer, L0Gates) for regularizer in regularizers):
            raise ConfigError(
                "L0Gates may close any head, also those that [freeze] keeps unchanged",
                "leave one of them out",
            )

    def prepare(self, model: Model, seed: int) -> Model:
        del seed
        if self.heads:
            freeze(model, self.heads)
        else:
            freeze_except(model, self.all_except)
        return model

    def save(self, model: Model, folder: Path) -> Saved:
        return _save_full_model(model, folder)


def _save_full_model(model: Model, folder: Path) -> Saved:
    """Save the model, with the gates of a regularizer folded into its weights."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return save(model_with_weights(cast(ModelConfig, model.config), weights, model), folder / MODEL)


TrainedPart = AdapterTable | FreezeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRun:
    """A run, and the part of the model that it trains."""

    run: run_config.Run
    change: TrainedPart


def read_adapter_run(model: str, file: Path, settings: Sequence[str] = ()) -> AdapterRun:
    """Read a run file with [adapter] or [freeze]; the model is a separate argument."""
    tables = run_config.apply_settings(run_config.read_toml(file), settings)
    classes = dict(tables.get("model", {})).pop("classes", 0)
    if set(tables.get("model", {})) - {"classes"}:
        raise ConfigError(
            f"{file}: [model] is set, and the model is {model}", "keep only classes in it"
        )
    tables["model"] = {"folder": model} | ({"classes": classes} if classes else {})
    own = {key: table for key, table in tables.items() if key not in (ADAPTER, FREEZE)}
    try:
        change = _change(tables)
        if classes:
            change = change.with_head()
        run = replace(run_config.parse_run(own), tables=tables)
        change.check(run.regularizer)
        if run.run.distributed == "fsdp":
            raise ConfigError(
                "run.distributed='fsdp' cannot be used with adapters or frozen heads", "use 'ddp'"
            )
    except ManyheadsError as error:
        raise ConfigError(f"{file}: {error.problem}", error.remedy) from None
    return AdapterRun(run=run, change=change)


def _change(tables: dict[str, Any]) -> TrainedPart:
    if ADAPTER in tables and FREEZE in tables:
        raise ConfigError("[adapter] and [freeze] are both set", "leave one of them out")
    key = FREEZE if FREEZE in tables else ADAPTER
    kind = FreezeTable if key == FREEZE else AdapterTable
    change: TrainedPart = run_config.RUN_TABLES.decode_table(kind, tables.get(key, {}), key)
    return change


def train_adapter(
    spec: AdapterRun, *, resume_from: str = "", fresh: bool = False, progress: bool = True
) -> TrainResult:
    """Train the adapter, or the heads that are not frozen.

    An adapter is saved to the folder `adapter` of the run, a full model to `model`.
    """

    def save_trained(model: Model, folder: Path) -> Saved:
        model.source = spec.run.model.folder
        return spec.change.save(model, folder)

    prepare = partial(spec.change.prepare, seed=spec.run.run.seed)
    hooks = ModelHooks(prepare=prepare, save=save_trained)
    return train(spec.run, resume_from=resume_from, fresh=fresh, progress=progress, hooks=hooks)
