"""Train a model from a run file: `train(read_run("run.toml"))`, or `manyheads train run.toml`.

Names are imported when they are first used: the training loop loads torch.distributed.checkpoint,
which takes more than a second, and surgery needs only the optimizers and objectives.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.train.loop.checkpoint import TrainingState
    from manyheads.train.loop.reporting import MetricsLog
    from manyheads.train.loop.session import TrainResult, train
    from manyheads.train.objectives import (
        CausalLM,
        Contrastive,
        Distillation,
        ImageClassification,
        MaskedLM,
        MultiLabelClassification,
        Objective,
        Seq2SeqLM,
        SequenceClassification,
        TokenClassification,
    )
    from manyheads.train.optim.optimizers import AdamW, Muon, StableAdamW
    from manyheads.train.optim.param_groups import RateFactor
    from manyheads.train.optim.schedules import (
        BatchGrowth,
        Cosine,
        Decay,
        InverseSqrt,
        Stable,
        WarmupStableDecay,
    )
    from manyheads.train.regularizers import HeadDiversity, L0Gates, L1Scales
    from manyheads.train.run_file.run_config import Run, parse_run, read_run
    from manyheads.train.shape_search import (
        EncoderShape,
        RankedShape,
        measure_shape,
        search_shapes,
    )
    from manyheads.train.tiling import tile

__all__ = [
    "AdamW",
    "BatchGrowth",
    "CausalLM",
    "Contrastive",
    "Cosine",
    "Decay",
    "Distillation",
    "EncoderShape",
    "HeadDiversity",
    "ImageClassification",
    "InverseSqrt",
    "L0Gates",
    "L1Scales",
    "MaskedLM",
    "MetricsLog",
    "MultiLabelClassification",
    "Muon",
    "Objective",
    "RankedShape",
    "RateFactor",
    "Run",
    "Seq2SeqLM",
    "SequenceClassification",
    "Stable",
    "StableAdamW",
    "TokenClassification",
    "TrainResult",
    "TrainingState",
    "WarmupStableDecay",
    "measure_shape",
    "read_run",
    "parse_run",
    "search_shapes",
    "tile",
    "train",
]

# Light modules first: a name is looked up in one after another.
_HOMES = (
    *("objectives", "optim.optimizers", "optim.param_groups", "optim.schedules", "regularizers"),
    *("tiling", "shape_search", "run_file.run_config", "loop.session", "loop.reporting"),
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def __dir__() -> list[str]:
    return sorted(__all__)
