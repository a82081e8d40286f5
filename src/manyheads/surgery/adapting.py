"""A run that changes a model in part: it trains an adapter, or some of the heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from manyheads.checkpoints.folder import Saved, family_of, save
from manyheads.errors import ConfigError, ManyheadsError
from manyheads.models.build import Model
from manyheads.models.recipes import ModelConfig
from manyheads.surgery.adapters import adapt, detach, merge
from manyheads.surgery.lowrank import LowRank
from manyheads.surgery.peft_files import save_adapter
from manyheads.surgery.peft_wholes import check_named
from manyheads.surgery.quantised import quantise
from manyheads.surgery.trainable import learn_all_but, learn_only
from manyheads.train.loop.model_setup import model_with_weights, record_inference_settings
from manyheads.train.loop.session import ModelHooks, TrainResult, train
from manyheads.train.regularisers import L0Gates, L1Scales, Regulariser, final_gates
from manyheads.train.run_file.run_config import Run, run_of
from manyheads.train.run_file.toml_config import changed, read_table, read_toml

__all__ = ["AdapterTable", "Adapting", "LearnTable", "read_adapting", "train_adapter"]

ADAPTER, LEARN = "adapter", "learn"
MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTable(LowRank):
    """The [adapter] table of a run file: what is adapted, and in how many bits the rest lies.

    `merged` saves the model too, with the adapter in its weights.
    """

    name: str = "default"
    base: Literal["as it is", "nf4"] = "as it is"
    merged: bool = False

    def __post_init__(self) -> None:
        LowRank.__post_init__(self)
        if self.merged and self.base == "nf4":
            raise ConfigError(
                "merged=true and base='nf4': four bits cannot take up a small update",
                "leave one of them out",
            )

    def with_head(self) -> "AdapterTable":
        """The same where the head is a new one, which must learn."""
        return replace(self, whole=tuple(dict.fromkeys((*self.whole, "readout"))))

    def open(self, model: Model, seed: int) -> Model:
        if self.base == "nf4":
            quantise(model)
        check_named(model, adapt(model, self, self.name, seed=seed).wholes)
        return model

    def check(self, regularisers: Sequence[Regulariser]) -> None:
        """Refuse what the files of an adapter cannot hold, or what does not learn with one."""
        for each in regularisers:
            if isinstance(each, L0Gates) and not self.merged:
                raise ConfigError(
                    "L0Gates closes heads of the model, and an adapter cannot hold its gates",
                    "set adapter.merged=true, which saves the whole model, or leave L0Gates out",
                )
            if isinstance(each, L1Scales):
                raise ConfigError(
                    "L1Scales shrinks scales of heads, and beside an adapter they do not learn",
                    "leave it out",
                )

    def close(self, model: Model, place: Path) -> Saved:
        # Without the gates it would be the adapter of another model.
        if final_gates(model):
            return self._merged(model, place)
        folder = save_adapter(model, place / ADAPTER, self.name)
        family = family_of(model).__name__.rpartition(".")[2]
        kind = f"an adapter of {family}"
        if self.merged:
            kind += f", merged into {self._merged(model, place).folder}"
        return Saved(folder, kind, "manyheads alone" if family == "native" else "peft")

    def _merged(self, model: Model, place: Path) -> Saved:
        merge(model, self.name)
        detach(model)
        return _saved_whole(model, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnTable:
    """The [learn] table of a run file: heads that learn alone, or all that learns `but` some.

    The model itself is trained and saved; what belongs to a head is as in `learn_only`.
    """

    only: tuple[str, ...] = ()
    all_but: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.only) == bool(self.all_but):
            raise ConfigError(
                f"only={list(self.only)} and all_but={list(self.all_but)} say which heads learn",
                'give one of both, such as only = ["L0H1"]',
            )

    def with_head(self) -> "LearnTable":
        """The same where the head is a new one, which must learn."""
        if self.only:
            raise ConfigError(
                f"model.classes is given and only {', '.join(self.only)} would learn, not the new "
                "head",
                "use all_but, or [adapter]",
            )
        return self

    def check(self, regularisers: Sequence[Regulariser]) -> None:
        """Refuse what would change heads that are to stay as they are."""
        if any(isinstance(each, L0Gates) for each in regularisers):
            raise ConfigError(
                "L0Gates closes any head, and [learn] lets only some of them change",
                "leave one of both out",
            )

    def open(self, model: Model, seed: int) -> Model:
        del seed
        if self.only:
            learn_only(model, self.only)
        else:
            learn_all_but(model, self.all_but)
        return model

    def close(self, model: Model, place: Path) -> Saved:
        return _saved_whole(model, place)


def _saved_whole(model: Model, place: Path) -> Saved:
    """With the gates that a regulariser may have trained along in its weights."""
    weights = {name: each.detach().cpu() for name, each in model.state_dict().items()}
    return save(model_with_weights(cast(ModelConfig, model.config), weights, model), place / MODEL)


Change = AdapterTable | LearnTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapting:
    """A run and what it changes of a model."""

    run: Run
    change: Change


def read_adapting(model: str, file: Path, settings: Sequence[str] = ()) -> Adapting:
    """A run file as for training, with [adapter] or [learn]; the model is named beside it."""
    tables = changed(read_toml(file), settings)
    classes = dict(tables.get("model", {})).pop("classes", 0)
    if set(tables.get("model", {})) - {"classes"}:
        raise ConfigError(
            f"{file}: [model] is given and the model is {model}", "leave all but classes out of it"
        )
    tables["model"] = {"folder": model} | ({"classes": classes} if classes else {})
    own = {key: table for key, table in tables.items() if key not in (ADAPTER, LEARN)}
    try:
        change = _change(tables)
        if classes:
            change = change.with_head()
        run = replace(run_of(own), tables=tables)
        change.check(run.regulariser)
        if run.run.distributed == "fsdp":
            raise ConfigError("run.distributed is 'fsdp', which cuts matrices up", "use 'ddp'")
    except ManyheadsError as error:
        raise ConfigError(f"{file}: {error.problem}", error.remedy) from None
    return Adapting(run=run, change=change)


def _change(tables: dict[str, Any]) -> Change:
    if ADAPTER in tables and LEARN in tables:
        raise ConfigError("[adapter] and [learn] are both given", "leave one of them out")
    if LEARN in tables:
        learn: LearnTable = read_table(LearnTable, tables[LEARN], LEARN)
        return learn
    adapter: AdapterTable = read_table(AdapterTable, tables.get(ADAPTER, {}), ADAPTER)
    return adapter


def train_adapter(
    asked: Adapting, *, since: str = "", fresh: bool = False, shown: bool = True
) -> TrainResult:
    """Train what is asked alone.

    The files of an adapter are in the folder `adapter` of the run, a whole model in `model`.
    """

    def opened(model: Model) -> Model:
        return asked.change.open(model, asked.run.run.seed)

    def closed(model: Model, place: Path) -> Saved:
        record_inference_settings(model, asked.run.objective, asked.run.data[-1])
        return asked.change.close(model, place)

    hooks = ModelHooks(prepare=opened, save=closed)
    return train(asked.run, resume_from=since, fresh=fresh, progress=shown, hooks=hooks)
