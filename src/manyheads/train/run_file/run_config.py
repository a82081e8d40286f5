"""The run file: everything that decides a run, as frozen values, checked before any work."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from manyheads.annotations import DropoutRate, NonNegativeFloat, NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.native import CONFIG_JSON
from manyheads.checkpoints.files import MAX_TOML_BYTES, parse_toml, read_small
from manyheads.dataclass_codec import DataclassCodec, unknown_key
from manyheads.errors import ConfigError, InputError, ManyheadsError, short_repr
from manyheads.models.build import Model, build, get_config, get_recipe, list_configs
from manyheads.models.recipes import ModelConfig
from manyheads.renamed_keys import KEYS, with_new_keys
from manyheads.train import objectives
from manyheads.train.distributed import Distributed, Recompute
from manyheads.train.objectives.text_similarity import TextSimilarity
from manyheads.train.optim.optimizers import AdamW, OptimizerConfig
from manyheads.train.regularizers import HeadDiversity, L0Gates, L1Scales, Regularized
from manyheads.train.run_file import data_config
from manyheads.train.run_file.phases import Phase, Phases

# In a run file a table names its class by `kind`.
RUN_TABLES = DataclassCodec(tag="kind")


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file that must exist."""
    try:
        return parse_toml(read_small(file, MAX_TOML_BYTES), str(file))
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            problem = f"{file} is a folder" if file.is_dir() else f"there is no {file}"
        raise ConfigError(problem, "name a run file, such as run.toml") from None
    except InputError as error:
        raise ConfigError(error.problem, error.remedy) from None


def apply_settings(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the tables with some values replaced, each written as `run.steps=100`.

    >>> apply_settings({"run": {"steps": 5}}, ["run.steps=7", "data.train=a.txt"])
    {'run': {'steps': 7}, 'data': {'train': 'a.txt'}}
    """
    result = with_new_keys(deepcopy(dict(tables)), SECTIONS)
    for setting in settings:
        path, equals, text = setting.partition("=")
        section, *keys = (key.strip() for key in path.split("."))
        keys = [section if section in result else KEYS.get(section, section), *keys]
        if not equals or not all(keys):
            raise ConfigError(f"--set {setting} has no value", "write it as run.steps=100")
        _put(result, keys, _parse(text.strip()), setting)
    return result


def _parse(text: str) -> Any:
    """The value that TOML reads; a word without quotes is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _put(tables: Any, keys: list[str], value: Any, setting: str) -> None:
    for depth, key in enumerate(keys):
        path, step = ".".join(keys[:depth]), cast(Any, key)
        if isinstance(tables, list):
            if not key.isdigit() or int(key) >= len(tables):
                problem = f"--set {setting}: {path} is a list of {len(tables)}"
                raise ConfigError(problem, f"count from {path}.0")
            step = int(key)
        elif not isinstance(tables, dict):
            raise ConfigError(
                f"--set {setting}: {path} is {short_repr(tables)}, not a table", f"set {path}"
            )
        if depth == len(keys) - 1:
            tables[step] = value
        else:
            tables = tables[step] if isinstance(tables, list) else tables.setdefault(step, {})


Config = TypeVar("Config")


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Changes to every attention layer of the model.

    `drop` is the fraction of heads dropped per sequence in training (DropHead, arXiv 2004.13342);
    `scale="learned"` multiplies the output of every head by a learned number, as `L1Scales` needs;
    `dropout` is the dropout of attention weights, which needs the attention pattern. "kept" keeps
    the setting of the model.
    """

    drop: DropoutRate | Literal["kept"] = "kept"
    scale: Literal["kept", "learned"] = "kept"
    dropout: DropoutRate | Literal["kept"] = "kept"

    @property
    def changes(self) -> dict[str, Any]:
        """The changes as fields of AttentionConfig."""
        values = {"drop_heads": self.drop, "head_scale": self.scale, "dropout": self.dropout}
        return {name: value for name, value in values.items() if value != "kept"}

    def apply_to_config(self, config: Config) -> Config:
        """A model config with these changes."""
        return _changed(config, lambda attention: replace(attention, **self.changes))

    def apply_to_model(self, model: Model) -> Model:
        """A model with these changes and its own weights."""
        if not self.changes:
            return model
        # New scales start at one.
        fresh = build(self.apply_to_config(cast(Any, model.config)))
        fresh.load_state_dict({**fresh.state_dict(), **model.state_dict()})
        fresh.copy_provenance(model)
        return fresh.to(next(iter(model.parameters())).dtype)


def without_head_dropping(config: Config) -> Config:
    """The config without head dropping, which is for training only and is not saved."""
    return _changed(config, lambda attention: replace(attention, drop_heads=0.0))


def _changed(value: Any, change: Callable[[AttentionConfig], AttentionConfig]) -> Any:
    """The same config with every AttentionConfig in it changed."""
    if isinstance(value, AttentionConfig):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.init}
        return replace(value, **{name: _changed(item, change) for name, item in inside.items()})
    return value


AnyObjective = (
    objectives.CausalLM
    | objectives.MaskedLM
    | objectives.Seq2SeqLM
    | objectives.SequenceClassification
    | objectives.MultiLabelClassification
    | objectives.TokenClassification
    | objectives.ImageClassification
    | objectives.Contrastive
    | objectives.Distillation
)
AnyRegularizer = HeadDiversity | L1Scales | L0Gates


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The model to train: a known `size` with a `change`, a full `config`, or a `folder`.

    The first two start with random weights, or with those of a smaller model in the folder `tile`.
    `classes`, a number or names, adds a new classification head; "data" takes the names from the
    labels of the training data. `heads` changes every attention layer.
    """

    size: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    tile: str = ""
    classes: int | Literal["data"] | tuple[str, ...] = 0
    heads: HeadOptions = HeadOptions()

    def __post_init__(self) -> None:
        sources = [name for name in ("size", "config", "folder") if getattr(self, name)]
        if len(sources) != 1:
            got = " and ".join(sources) or "none"
            raise ConfigError(
                f"the model needs exactly one of size, config and folder, got {got}", "set one"
            )
        if self.change and not self.size:
            raise ConfigError("change needs a known size", "set size, or write config out")
        if self.tile and self.folder:
            raise ConfigError("tile cannot be used with folder", "use size or config with tile")

    def model_config(self) -> ModelConfig | None:
        """The config of the model; None if it is in a folder."""
        if self.folder:
            return None
        if self.config:
            config = CONFIG_JSON.decode(ModelConfig, self.config, "model.config")
            return self.heads.apply_to_config(config)
        if self.size not in list_configs():
            raise ConfigError(
                f"model.size={self.size!r} is unknown", f"use {', '.join(list_configs())}"
            )
        recipe = get_recipe(self.size)
        change = RUN_TABLES.decode_arguments(recipe, self.change, "model.change")
        try:
            return self.heads.apply_to_config(get_config(self.size, **change))
        except ManyheadsError as error:
            raise ConfigError(f"model.change: {error.problem}", error.remedy) from None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where and how the run goes; `*_every` are numbers of steps, 0 means never.

    `steps` or `tokens` end a run of one phase. `clip` is the largest gradient norm, 0 for any.
    `recompute` are layers whose activations are recomputed in the backward pass. Each
    `context_parallel` processes share the texts of a micro-batch. The last `keep` checkpoints of
    every `checkpoint_every` steps are kept, and all those of every `keep_every` steps, of the end
    of each phase, and of the last step at the full rate.
    """

    folder: Path
    seed: int = 0
    steps: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    clip: NonNegativeFloat = 1.0
    recompute: Recompute = "none"
    device: str = "auto"
    distributed: Distributed = "ddp"
    context_parallel: PositiveInt = 1
    checkpoint_every: NonNegativeInt = 1000
    keep: PositiveInt = 2
    keep_every: NonNegativeInt = 0
    validate_every: NonNegativeInt = 0
    telemetry_every: NonNegativeInt = 0
    log_every: PositiveInt = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(
                f"seed={short_repr(self.seed)} has more than 64 bits", "use a smaller number"
            )

    @property
    def half(self) -> bool:
        return self.precision == "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run file; `data` has one entry per phase, and `tables` is the file as it was read."""

    model: ModelSource
    objective: AnyObjective
    regularizer: tuple[AnyRegularizer, ...] = ()
    optimizer: OptimizerConfig = AdamW()
    phases: Phases
    data: tuple[data_config.Data, ...]
    run: RunOptions
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for data in self.data:
            _check_data(self.objective, data)
        if isinstance(self.objective, TextSimilarity):
            # Sentence embeddings use texts as the tokenizer encodes them, in training too.
            object.__setattr__(self, "data", tuple(map(data_config.without_eos, self.data)))

    @property
    def unit(self) -> str:
        """The unit of batch sizes."""
        return "images" if isinstance(self.data[0], data_config.Images) else "tokens"

    @property
    def ends(self) -> tuple[int, ...]:
        """The step at which each phase ends."""
        return (*self.phases.starts[1:], self.phases.step_count)

    @property
    def full_objective(self) -> objectives.Objective:
        """The objective with its regularizers."""
        if not self.regularizer:
            return self.objective
        return Regularized(objective=self.objective, regularizers=self.regularizer)


def _check_data(objective: AnyObjective, data: data_config.Data) -> None:
    """Raise if the data have no labels for the objective."""
    suitable = DATA_FOR[type(objective)]
    if not isinstance(data, suitable):
        name, kind = type(objective).__name__, type(data).__name__.lower()
        kinds = " or ".join(f'"{kind.__name__.lower()}"' for kind in suitable)
        raise ConfigError(
            f'objective.kind="{name}" cannot be used with data.kind="{kind}"',
            f"use data.kind={kinds}, or another objective",
        )
    if isinstance(data, data_config.Pairs):
        if isinstance(objective, objectives.Distillation) and not data.scores:
            raise ConfigError(
                "Distillation needs the scores of a teacher",
                "set data.negatives and data.scores to their fields",
            )
        if isinstance(objective, objectives.Seq2SeqLM) and data.negatives:
            raise ConfigError("Seq2SeqLM cannot use data.negatives", "leave them out")


# Tokens can be predicted in any texts, with or without labels.
DATA_FOR: dict[type, tuple[type, ...]] = {
    objectives.CausalLM: (data_config.Texts, data_config.Labeled, data_config.Tagged),
    objectives.MaskedLM: (data_config.Texts, data_config.Labeled, data_config.Tagged),
    objectives.Seq2SeqLM: (data_config.Pairs,),
    objectives.Contrastive: (data_config.Pairs,),
    objectives.Distillation: (data_config.Pairs,),
    objectives.SequenceClassification: (data_config.Labeled,),
    objectives.MultiLabelClassification: (data_config.Labeled,),
    objectives.TokenClassification: (data_config.Tagged,),
    objectives.ImageClassification: (data_config.Images,),
}

OWN = ("model", "objective", "regularizer", "optimizer", "run")
SECTIONS = (*OWN, "data", "schedule", "phase")


def read_run(file: Path, settings: Sequence[str] = ()) -> Run:
    """Read a run file; `settings` such as `run.steps=100` override its values."""
    tables = apply_settings(read_toml(file), settings)
    try:
        return parse_run(tables)
    except ManyheadsError as error:
        raise ConfigError(f"{file}: {error.problem}", error.remedy) from None


def parse_run(tables: Mapping[str, Any]) -> Run:
    """A run from the tables of a run file."""
    tables = with_new_keys(tables, SECTIONS)
    for key in tables:
        if key not in SECTIONS:
            raise unknown_key(key, SECTIONS)
    phases = parse_phases(tables)
    data = tuple(phase.data for phase in phases.each)
    sections = {"phases": phases, "data": data, "tables": tables}
    own = {key: tables[key] for key in OWN if key in tables}
    run: Run = RUN_TABLES.decode_table(Run, own, known=sections)
    # This also checks the model section.
    run.model.model_config()
    return run


def parse_phases(tables: Mapping[str, Any]) -> Phases:
    """The phases alone, from tables that may have other sections too."""
    phases = list(_decoded_phases(tables))
    if len(phases) > 1:
        names = (phase.name or str(index) for index, phase in enumerate(phases))
        phases = [replace(phase, name=name) for phase, name in zip(phases, names, strict=True)]
    return Phases(tuple(phases))


def _decoded_phases(tables: Mapping[str, Any]) -> Iterator[Phase]:
    """One for the whole run, or those of the file, which inherit `data` and `schedule`."""
    options: RunOptions = RUN_TABLES.decode_table(RunOptions, tables.get("run", {}), "run")
    shared = {key: tables[key] for key in ("data", "schedule") if key in tables}
    listed = tables.get("phase", [])
    if not isinstance(listed, list):
        raise ConfigError("phase must be a list of tables", "write each phase under [[phase]]")
    if not listed:
        if bool(options.steps) == bool(options.tokens):
            raise ConfigError(
                f"the run needs either run.steps or run.tokens, got steps={options.steps} and "
                f"tokens={options.tokens}",
                "set one of them",
            )
        yield _decoded_phase({**shared, "steps": options.steps, "tokens": options.tokens}, "")
        return
    if options.steps or options.tokens:
        raise ConfigError(
            "run.steps and run.tokens cannot be used with phases", "set them in each phase"
        )
    for index, raw in enumerate(listed):
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"phase.{index} must be a table, got {short_repr(raw)}",
                "write [[phase]] and its keys",
            )
        merged = {**shared, **raw}
        if isinstance(raw.get("data"), Mapping) and isinstance(shared.get("data"), Mapping):
            merged["data"] = {**shared["data"], **raw["data"]}
        yield _decoded_phase(merged, f"phase.{index}")


def _decoded_phase(table: dict[str, Any], path: str) -> Phase:
    if isinstance(table.get("data"), Mapping):
        table["data"] = {"kind": "texts", **table["data"]}
    phase: Phase = RUN_TABLES.decode_table(Phase, table, path)
    return phase
