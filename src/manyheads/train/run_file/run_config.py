"""The run file: everything that decides a run, as frozen values, checked before any work."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from manyheads.checkpoints.families.native import CONFIG_JSON
from manyheads.dataclass_codec import unknown_key
from manyheads.errors import ConfigError, ManyheadsError
from manyheads.models.build import get_config, get_recipe, list_configs
from manyheads.models.recipes import ModelConfig
from manyheads.train.distributed import Distributed
from manyheads.train.loop.model_wrapper import Recompute
from manyheads.train.objectives import (
    CausalLM,
    Contrastive,
    ImageClassification,
    MaskedLM,
    Objective,
    Seq2SeqLM,
    SequenceClassification,
    TokenClassification,
)
from manyheads.train.optim.optimisers import AdamW, OptimiserConfig
from manyheads.train.optim.schedules import Schedule, Stable
from manyheads.train.regularisers import HeadDiversity, L0Gates, L1Scales, Regularised
from manyheads.train.run_file.data_config import (
    Data,
    Images,
    Labelled,
    Pairs,
    Tagged,
    Texts,
    without_eos,
)
from manyheads.train.run_file.head_config import HeadOptions
from manyheads.train.run_file.phases import Phase, Phases, StepCount, TokenCount
from manyheads.train.run_file.toml_config import RUN_TABLES, apply_settings, read_toml

AnyObjective = (
    CausalLM
    | MaskedLM
    | Seq2SeqLM
    | SequenceClassification
    | TokenClassification
    | ImageClassification
    | Contrastive
)
AnyRegulariser = HeadDiversity | L1Scales | L0Gates


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The model to train: a known `size` with a `change`, a whole `config`, or a `folder`.

    The first two start with fresh weights, or with those of a smaller model in the folder `tile`,
    laid out over the larger one. The last goes on with what is there. `classes`, a number or names,
    puts a new head on any of them, which tells them apart. `heads` are changes of every attention.
    """

    size: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    tile: str = ""
    classes: int | tuple[str, ...] = 0
    heads: HeadOptions = HeadOptions()

    def __post_init__(self) -> None:
        given = [name for name in ("size", "config", "folder") if getattr(self, name)]
        if len(given) != 1:
            said = " and ".join(given) or "nothing"
            raise ConfigError(f"{said} names the model", "give one of size, config and folder")
        if self.change and not self.size:
            raise ConfigError("change is for a known size", "give size, or write config out")
        if self.tile and self.folder:
            raise ConfigError(
                "tile starts a new model and folder is one", "give size or config with tile"
            )

    def described(self) -> ModelConfig | None:
        """The config, unless a folder has it."""
        if self.folder:
            return None
        if self.config:
            config = CONFIG_JSON.decode(ModelConfig, self.config, "model.config")
            return self.heads.put_on(config)
        if self.size not in list_configs():
            raise ConfigError(f"model.size is {self.size!r}", f"use {', '.join(list_configs())}")
        recipe = get_recipe(self.size)
        change = RUN_TABLES.decode_arguments(recipe, self.change, "model.change")
        try:
            return self.heads.put_on(get_config(self.size, **change))
        except ManyheadsError as error:
            raise ConfigError(f"model.change: {error.problem}", error.remedy) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where and how the run goes; every so many steps, and 0 for never, unless said otherwise.

    `steps` or `tokens` end a run of one phase. `clip` bounds the gradient's norm, 0 leaves it.
    `recompute` names layers whose inside is computed again on the way back. Checkpoints: the last
    `keep` of every `checkpoint_every` steps, and for good those of every `keep_every` steps, of the
    end of each phase, and of the last step at the full rate.
    """

    folder: Path
    seed: int = 0
    steps: int = 0
    tokens: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    clip: float = 1.0
    recompute: Recompute = "none"
    device: str = "auto"
    distributed: Distributed = "ddp"
    checkpoint_every: int = 1000
    keep: int = 2
    keep_every: int = 0
    validate_every: int = 0
    telemetry_every: int = 0
    log_every: int = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "clip", "checkpoint_every", "keep_every"):
            _not_below(name, getattr(self, name), 0)
        for name in ("validate_every", "telemetry_every"):
            _not_below(name, getattr(self, name), 0)
        _not_below("keep", self.keep, 1)
        _not_below("log_every", self.log_every, 1)
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} has more than 64 bits", "use a smaller number")

    @property
    def half(self) -> bool:
        return self.precision == "bfloat16"


def _not_below(name: str, number: int | float, least: int) -> None:
    # Also what is no number.
    if not number >= least:
        raise ConfigError(f"{name}={number:g}", f"use {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One phase as the file says it; its schedule counts from its own start.

    `rotary` is the base of the layers that see the whole text.
    """

    name: str = ""
    steps: int = 0
    tokens: int = 0
    data: Data
    schedule: Schedule = Stable()
    rotary: float | Literal["kept"] = "kept"

    def __post_init__(self) -> None:
        if bool(self.steps) == bool(self.tokens) or min(self.steps, self.tokens) < 0:
            raise ConfigError(
                f"steps={self.steps} and tokens={self.tokens} say how long it is",
                "give one of both, above 0",
            )

    def phase(self, index: int, *, alone: bool = False) -> Phase:
        return Phase(
            name=self.name or ("" if alone else str(index)),
            length=self.data.length,
            batch=self.data.batch,
            duration=StepCount(self.steps) if self.steps else TokenCount(self.tokens),
            data=str(index),
            rotary=self.rotary,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole run file; `data` are those of each phase, `tables` are what was read."""

    model: Start
    objective: AnyObjective
    regulariser: tuple[AnyRegulariser, ...] = ()
    optimiser: OptimiserConfig = AdamW()
    phases: Phases
    data: tuple[Data, ...]
    run: Running
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for data in self.data:
            _check_answers(self.objective, data)
        if isinstance(self.objective, Contrastive):
            # Vectors are made of texts as the tokenizer leaves them, in training too.
            object.__setattr__(self, "data", tuple(map(without_eos, self.data)))

    @property
    def unit(self) -> str:
        """What a batch counts."""
        return "images" if isinstance(self.data[0], Images) else "tokens"

    @property
    def ends(self) -> tuple[int, ...]:
        """The step at which each phase ends."""
        return (*self.phases.starts[1:], self.phases.steps)

    @property
    def full_objective(self) -> Objective:
        """With what is added to the loss."""
        if not self.regulariser:
            return self.objective
        return Regularised(objective=self.objective, regularisers=self.regulariser)


def _check_answers(objective: AnyObjective, data: Data) -> None:
    """Refuse data that do not hold what an objective asks for."""
    wanted = ANSWERED_BY[type(objective)]
    if not isinstance(data, wanted):
        asks, has = type(objective).__name__, type(data).__name__.lower()
        named = " or ".join(f'"{each.__name__.lower()}"' for each in wanted)
        raise ConfigError(
            f'objective.kind="{asks}" cannot be asked of data.kind="{has}"',
            f"use data.kind={named}, or another objective",
        )


# Words can be asked for whatever else is known of a text.
ANSWERED_BY: dict[type, tuple[type, ...]] = {
    CausalLM: (Texts, Labelled, Tagged),
    MaskedLM: (Texts, Labelled, Tagged),
    Seq2SeqLM: (Pairs,),
    Contrastive: (Pairs,),
    SequenceClassification: (Labelled,),
    TokenClassification: (Tagged,),
    ImageClassification: (Images,),
}

OWN = ("model", "objective", "regulariser", "optimiser", "run")
SECTIONS = (*OWN, "data", "schedule", "phase")


def read_run(file: Path, settings: Sequence[str] = ()) -> Run:
    """The run of a TOML file, with `settings` such as `run.steps=100` in place of what it says."""
    tables = apply_settings(read_toml(file), settings)
    try:
        return run_of(tables)
    except ManyheadsError as error:
        raise ConfigError(f"{file}: {error.problem}", error.remedy) from None


def run_of(tables: Mapping[str, Any]) -> Run:
    """A run from the tables of a file."""
    for key in tables:
        if key not in SECTIONS:
            raise unknown_key(key, SECTIONS)
    stretches = list(_stretches(tables))
    known = {
        "phases": _phases(stretches),
        "data": tuple(each.data for each in stretches),
        "tables": tables,
    }
    own = {key: tables[key] for key in OWN if key in tables}
    found: Run = RUN_TABLES.decode_table(Run, own, known=known)
    found.model.described()
    return found


def phases_of(tables: Mapping[str, Any]) -> Phases:
    """The phases alone, of tables that may tell of more than a run."""
    return _phases(list(_stretches(tables)))


def _phases(stretches: Sequence[Stretch]) -> Phases:
    alone = len(stretches) == 1
    return Phases(tuple(each.phase(index, alone=alone) for index, each in enumerate(stretches)))


def _stretches(tables: Mapping[str, Any]) -> Iterator[Stretch]:
    """One for the whole run, or those of the file, which leave out what its own sections say."""
    running: Running = RUN_TABLES.decode_table(Running, tables.get("run", {}), "run")
    shared = {key: tables[key] for key in ("data", "schedule") if key in tables}
    listed = tables.get("phase", [])
    if not isinstance(listed, list):
        raise ConfigError("phase is one table", "write each phase under [[phase]]")
    if not listed:
        if bool(running.steps) == bool(running.tokens):
            raise ConfigError(
                f"run.steps={running.steps} and run.tokens={running.tokens} end the run",
                "give one of both",
            )
        yield _stretch({**shared, "steps": running.steps, "tokens": running.tokens}, "")
        return
    if running.steps or running.tokens:
        raise ConfigError(
            "run.steps and run.tokens are for a run of one phase", "give every phase its own"
        )
    for index, raw in enumerate(listed):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"phase.{index}={raw!r} is no table", "write [[phase]] and its keys")
        merged = {**shared, **raw}
        if isinstance(raw.get("data"), Mapping) and isinstance(shared.get("data"), Mapping):
            merged["data"] = {**shared["data"], **raw["data"]}
        yield _stretch(merged, f"phase.{index}")


def _stretch(table: dict[str, Any], where: str) -> Stretch:
    if isinstance(table.get("data"), Mapping):
        # Texts are what most are trained on.
        table["data"] = {"kind": "texts", **table["data"]}
    found: Stretch = RUN_TABLES.decode_table(Stretch, table, where)
    return found
