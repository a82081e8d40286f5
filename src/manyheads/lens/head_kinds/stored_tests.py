"""Tests that were measured before, by the hash of a model: shipped with it, or in the cache.

`MANYHEADS_CACHE=src/manyheads/bundled` writes those that are shipped.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from manyheads.checkpoints.hub import BUNDLED_FOLDER
from manyheads.checkpoints.pip_models import cache_folder
from manyheads.encoding.fingerprints import exact_fingerprint
from manyheads.errors import ManyheadsError
from manyheads.lens.head_kinds.partners import InductionPartner
from manyheads.lens.head_kinds.scores_by_text import ScoresByText
from manyheads.lens.head_kinds.word_targets import WordTargetScores
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.files import Result, read_result
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import Model

# Part of every name: raise it when a test measures something else than before.
FORMAT = 1
# Smaller models are measured in seconds.
MIN_PARAMETERS = 1_000_000
# The oldest are removed beyond this, some for each model.
MAX_FILES = 500


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class StoredTest(Result):
    """What one test has measured: statistics by draw, words by task, scores of texts, and so on."""

    draws: tuple[Statistics, ...] = ()
    words: dict[str, WordTargetScores] = field(default_factory=dict)
    copying: ByHead | None = None
    texts: ScoresByText | None = None
    partners: dict[Address, InductionPartner] = field(default_factory=dict)


def storable_fingerprint(model: Model) -> str | None:
    """The hash that names the tests of a model; None where none are stored."""
    modules = list(model.modules())
    changed = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    small = sum(parameter.numel() for parameter in model.parameters()) < MIN_PARAMETERS
    if small or changed or not model.native:
        return None
    try:
        return exact_fingerprint(model)
    except (RuntimeError, TypeError):
        # Tensors without plain values, as of some quantized models.
        return None


def recall_test(
    fingerprint: str | None,
    name: str,
    inputs: object,
    measure: Callable[[], tuple[StoredTest, bool]],
    *,
    remeasure: bool = False,
) -> StoredTest:
    """The stored test of these inputs; else it is measured, and stored where it is complete.

    With `remeasure` it is measured in any case, and replaces the one in the cache.
    A damaged file is measured anew and replaced; a cache that cannot be written does no harm.
    """
    if fingerprint is None:
        return measure()[0]
    key = sha256(repr((FORMAT, inputs)).encode()).hexdigest()[:12]
    file = Path("kinds", f"{fingerprint}-{name}-{key}.safetensors")
    for folder in () if remeasure else (BUNDLED_FOLDER, cache_folder()):
        with suppress(ManyheadsError, OSError):
            result = read_result(folder / file, {StoredTest.__name__: StoredTest})
            assert isinstance(result, StoredTest)
            return result
    test, complete = measure()
    if complete:
        with suppress(OSError):
            test.save(cache_folder() / file)
            stored = (cache_folder() / "kinds").glob("*.safetensors")
            ages = sorted(stored, key=lambda path: path.stat().st_mtime)
            for old in ages[:-MAX_FILES]:
                old.unlink(missing_ok=True)
    return test
