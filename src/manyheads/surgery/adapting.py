"""A run that trains an adapter and leaves its files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from manyheads.checkpoints.folder import Saved, family_of
from manyheads.errors import ConfigError, ManyheadsError
from manyheads.models.build import Model
from manyheads.surgery.adapters import adapt
from manyheads.surgery.lowrank import LowRank
from manyheads.surgery.peft_files import save_adapter
from manyheads.surgery.quantised import quantise
from manyheads.train.reading import changed, read_table, read_toml
from manyheads.train.run import Run, run_of
from manyheads.train.session import Finished, Surgery, train

__all__ = ["AdapterTable", "Adapting", "read_adapting", "train_adapter"]

SECTION = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTable(LowRank):
    """The [adapter] table of a run file: what is adapted, and in how many bits the rest lies."""

    name: str = "default"
    base: Literal["as it is", "nf4"] = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapting:
    """A run and the adapter that it trains."""

    run: Run
    adapter: AdapterTable


def read_adapting(model: str, file: Path, settings: Sequence[str] = ()) -> Adapting:
    """A run file as for training, with an [adapter] table; the model is named beside it."""
    tables = changed(read_toml(file), settings)
    if tables.get("model"):
        raise ConfigError(f"{file}: [model] is given and the model is {model}", "leave [model] out")
    tables["model"] = {"folder": model}
    own = {key: table for key, table in tables.items() if key != SECTION}
    try:
        adapter: AdapterTable = read_table(AdapterTable, tables.get(SECTION, {}), SECTION)
        run = replace(run_of(own), tables=tables)
        if run.run.distributed == "fsdp":
            raise ConfigError("run.distributed is 'fsdp', which cuts adapters up", "use 'ddp'")
    except ManyheadsError as error:
        raise ConfigError(f"{file}: {error.problem}", error.remedy) from None
    return Adapting(run=run, adapter=adapter)


def train_adapter(
    asked: Adapting, *, since: str = "", fresh: bool = False, shown: bool = True
) -> Finished:
    """Train the adapter alone; its files are in the folder `adapter` of the run."""
    config = asked.adapter

    def opened(model: Model) -> Model:
        if config.base == "nf4":
            quantise(model)
        adapt(model, config, config.name, seed=asked.run.run.seed)
        return model

    def closed(model: Model, place: Path) -> Saved:
        folder = save_adapter(model, place / SECTION, config.name)
        family = family_of(model).__name__.rpartition(".")[2]
        reader = "manyheads alone" if family == "native" else "peft"
        return Saved(folder, f"an adapter of {family}", reader)

    surgery = Surgery(open=opened, close=closed)
    return train(asked.run, since=since, fresh=fresh, shown=shown, surgery=surgery)
