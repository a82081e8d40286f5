import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from manyheads.errors import InputError, MissingPackageError
from manyheads.lens.circuit_discovery.rasp_programs import (
    compile_program,
    evaluate,
    library_programs,
    tracr,
)

needs_tracr = pytest.mark.skipif(find_spec("tracr") is None, reason="tracr is not installed")


def test_missing_package_is_named_with_a_command_that_leaves_jax_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tracr", None)
    for name in [name for name in sys.modules if name.startswith("tracr.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackageError, match="pip install --no-deps tracr-pypi"):
        tracr("rasp.rasp")


def test_extra_installs_all_that_tracr_imports_but_tracr_itself() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    assert project["optional-dependencies"]["tracr"] == ["absl-py", "networkx"]


@needs_tracr
def test_library_programs_have_one_direction_per_output() -> None:
    programs = {program.name: program for program in library_programs()}
    assert len(programs) >= 15
    entry = programs["hist"]
    weights = compile_program(entry.program, entry.vocabulary, entry.max_length)
    assert weights.outputs == tuple(range(entry.max_length + 1))
    assert (weights.unembed.sum(0) == 1).all()
    assert len(weights.layers) == 1
    assert [len(heads) for heads, _ in weights.layers] == [1]


@needs_tracr
def test_beginning_has_no_index_and_every_token_has_the_constant_one() -> None:
    entry = next(program for program in library_programs() if program.name == "length")
    weights = compile_program(entry.program, entry.vocabulary, entry.max_length)
    assert not weights.positions[0].any()
    assert (weights.embed.sum(1) == 2).all()
    assert np.linalg.matrix_rank(weights.positions) == entry.max_length


@needs_tracr
def test_program_that_tracr_cannot_compile_is_refused_with_its_reason() -> None:
    rasp = tracr("rasp.rasp")
    program = rasp.numerical(rasp.Map(lambda x: x, rasp.tokens))
    means = rasp.Aggregate(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.TRUE), program)
    with pytest.raises(InputError, match="Tracr cannot compile"):
        compile_program(means, (1, 2, 3), 4)


@needs_tracr
def test_categorical_mean_of_different_values_has_no_output() -> None:
    rasp = tracr("rasp.rasp")
    everything = rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.TRUE)
    program = rasp.Aggregate(everything, rasp.tokens)
    assert evaluate(program, (2, 2)) == [2, 2]
    assert evaluate(program, (1, 3)) is None
    assert evaluate(program, (1, 3), causal=True) is None
    assert evaluate(program, (3,), causal=True) == [3]
