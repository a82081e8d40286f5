"""Values by head: addressed, ranked, told, framed, saved whole."""

import json
import math
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import save_file

from manyheads import lens
from manyheads.errors import InputError, MissingPackageError, ShapeError
from manyheads.lens.attention_maps.patterns import Pattern
from manyheads.lens.attribution.gradients import TokenAttribution
from manyheads.lens.causal.patching import Patch, Patching
from manyheads.lens.result_types import RESULT_TYPES
from manyheads.lens.results.addresses import Address, Block, blocks_of
from manyheads.lens.results.files import Result
from manyheads.lens.results.tables import ByHead
from manyheads.ragged import Ragged
from manyheads.taps import Head, Sublayer
from tests.messages import refuses
from tests.models.zoo import DECODERS, SEQ2SEQS, small

BLOCKS = (Block(0, 2), Block(2, 1), Block(3, 3))


def result(**changes: object) -> ByHead:
    inputs: dict[str, object] = {
        "kind": "example",
        "blocks": BLOCKS,
        "means": {
            "entropy": np.array([3.0, 1.0, np.nan, 2.0, 5.0, 4.0]),
            "sink": np.arange(6.0) / 8,
        },
        "errors": {"entropy": np.array([0.1, 0.2, np.nan, 0.4, 0.5, 0.6])},
        "metadata": {"texts": 7, "note": "Möwe"},
    }
    return ByHead(**(inputs | changes))  # type: ignore[arg-type]


def printed(shown: object) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_head_has_its_value() -> None:
    column = result()["entropy"]
    assert (column.of(Head(0, 1)), column.of(Head(3, 2))) == (1.0, 4.0)
    assert column.error_of(Head(3, 0)) == 0.4
    assert result().of(Head(3, 1)) == {"entropy": 5.0, "sink": 0.5}
    assert np.isnan(result()["sink"].error_of(Head(0, 0)))


def test_layers_may_differ_in_heads() -> None:
    layers = result()["sink"].layers()
    assert {layer: len(means) for layer, means in layers.items()} == {0: 2, 2: 1, 3: 3}
    assert layers[3].tolist() == [0.375, 0.5, 0.625]


def test_heads_without_a_value_have_no_rank() -> None:
    column = result()["entropy"]
    assert [str(address) for address, _ in column.ranked()] == [
        "L3H1",
        "L3H2",
        "L0H0",
        "L3H0",
        "L0H1",
    ]
    assert column.ranked(smallest=True)[0] == (Address(Head(0, 1)), 1.0)


def test_blocks_follow_the_model() -> None:
    uneven = blocks_of(small(DECODERS["uneven"]))
    assert [(block.layer, block.heads) for block in uneven] == [(0, 8), (2, 3), (3, 2)]
    both = blocks_of(small(SEQ2SEQS["one layer looks back"]))
    assert [(each.stack, each.layer, each.sublayer) for each in both] == [
        ("encoder", 0, Sublayer.ATTENTION),
        ("decoder", 0, Sublayer.ATTENTION),
        ("decoder", 1, Sublayer.CROSS),
        ("decoder", 2, Sublayer.ATTENTION),
    ]


def test_it_reads_well() -> None:
    message = str(result())
    assert message.splitlines()[0] == "example of 6 heads in 3 attentions"
    assert "entropy  mean 3, from 1 (L0H1) to 5 (L3H1)" in message


def test_a_column_and_its_ranking_print_names_of_heads() -> None:
    column = result()["entropy"]
    assert repr(column).startswith("entropy of 6 heads: mean ")
    assert len(repr(column)) < 100
    (address, value), *_ = column.ranked()
    assert str(column.ranked()[0]) == f"({address}, {value})"


def test_a_table_has_a_row_a_head() -> None:
    shown = printed(result().table())
    assert "3.00 ±0.1" in shown
    assert "L3H2" in shown
    by_entropy = printed(result().table(["entropy"], by="entropy", max_rows=2))
    assert by_entropy.index("L3H1") < by_entropy.index("L3H2")
    assert "sink" not in by_entropy
    assert "3 more heads" in by_entropy


def test_rows_for_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = result().rows()
    assert len(rows) == 6
    assert rows[3] == {
        "stack": "main",
        "sublayer": "attention",
        "layer": 3,
        "head": 0,
        "entropy": 2.0,
        "entropy_error": 0.4,
        "sink": 0.375,
    }
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))  # type: ignore[arg-type]
    assert result().frame()[3] == rows[3]


def test_a_frame_without_pandas_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refuses(MissingPackageError, "a DataFrame", "pip install pandas"):
        result().frame()


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_saved_and_loaded_is_the_same(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / f"result.{ending}"
    result().save(path)
    loaded = lens.load(path)
    assert loaded.blocks == BLOCKS
    assert loaded.names == ("entropy", "sink")
    assert loaded.metadata == result().metadata
    for name in loaded.names:
        np.testing.assert_array_equal(loaded.means[name], result().means[name])
    np.testing.assert_array_equal(loaded.errors["entropy"], result().errors["entropy"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_json_holds_no_nan(tmp_path: Path) -> None:
    result().save(tmp_path / "result.json")
    read = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert read["arrays"]["means/entropy"][2] is None


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    result().save(path)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        result(metadata={}).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_refusals() -> None:
    with refuses(InputError, "'entrpy' was not measured: use entropy, sink."):
        result()["entrpy"]
    with refuses(InputError, "there is no head L1H0", "use L0H0 to"):
        result().of(Head(1, 0))
    decoder = result(blocks=(Block(0, 6, "decoder"),))
    with refuses(InputError, "there is no head L0H0: use decoder L0H0 to decoder L0H5."):
        decoder.of(Address(Head(0, 0), "main"))
    assert decoder.of(Head(0, 0)) == decoder.of("decoder L0H0")
    with refuses(ShapeError, "sink has shape (2,)", "6 heads"):
        result(means={"sink": np.zeros(2)}, errors={})


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(InputError) as caught:
            lens.load(path)
        for word in (str(path), *words):
            assert word in str(caught.value)

    with pytest.raises(InputError, match=r"x\.csv.*\.json or \.safetensors"):
        result().save("x.csv")
    refused(tmp_path / "none.json", "does not exist", "save()")
    for name, content in (("list.json", "[1]"), ("other.json", '{"kind": "ByHead"}')):
        (tmp_path / name).write_text(content)
        refused(tmp_path / name, "no lens result", "save()")
    (tmp_path / "cut.json").write_text('{"kind": "By')
    refused(tmp_path / "cut.json", "damaged", "save the result again")
    save_file({"weight": np.zeros(2)}, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "no lens result", "save()")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:9])
    refused(tmp_path / "cut.safetensors", "damaged", "save the result again")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "Portrait"}, "Portrait"),
        ({"arrays": {}}, "damaged"),
        ({"fields": {"kind": "example"}}, "damaged"),
        ({"arrays": {"means/entropy": [1.0], "means/sink": [1.0]}}, "damaged"),
        ({"arrays": [1.0]}, "no lens result"),
        ({"fields": [1.0]}, "no lens result"),
        ({"deep": [[[[]]]]}, "64 levels"),
        ({"fields": {"kind": ["example"], "means": {}, "errors": {}, "blocks": []}}, "a string"),
        # A million bytes for each number.
        ({"fields": {"means": {"sink": "S1000000"}}, "arrays": {"means/sink": [1]}}, "dtype"),
    ],
)
def test_a_result_with_missing_or_foreign_content_is_refused(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    result().save(path)
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text.replace("[[[[]]]]", "[" * 100_000 + "]" * 100_000))
    with pytest.raises(InputError, match=word) as caught:
        lens.load(path)
    assert str(path) in str(caught.value)


def test_every_result_type_is_in_the_table_under_its_own_name() -> None:
    def below(kind: type[Result]) -> Iterator[type[Result]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    # What the cache of kinds stores is no result of its own.
    abstract = ("Tabular", "PathAttribution", "StoredTest", "TaskHeads")
    concrete = {each.__name__: each for each in below(Result) if each.__name__ not in abstract}
    ours = {
        name: each
        for name, each in concrete.items()
        if each.__module__.startswith("manyheads.lens")
    }
    assert ours == RESULT_TYPES
    assert {*ours} <= {*lens.__all__}


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_types_of_values_survive(ending: str, tmp_path: Path) -> None:
    weights = torch.tensor([[1.0, -torch.inf], [torch.nan, 0.25]])
    pattern = Pattern(
        Address(Head(2, 0), "decoder", Sublayer.CROSS),
        3,
        range(4, 6),
        weights,
        torch.ones(2, 2, dtype=torch.bool),
    )
    patched = Patching(
        clean=1.0,
        corrupted=math.nan,
        recovered={Patch("head", 1, 0): 0.5, Patch("residual", 2): 1.0},
    )
    tokens = TokenAttribution(
        tokens=Ragged.from_list([torch.zeros(3), torch.ones(1)]),
        expected=torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        steps=4,
    )
    for each in (pattern, patched, tokens):
        each.save(tmp_path / f"{type(each).__name__}.{ending}")
    again = lens.load(tmp_path / f"Pattern.{ending}")
    assert (again.address, again.text, again.rows) == (pattern.address, 3, range(4, 6))
    torch.testing.assert_close(again.weights, weights, equal_nan=True)
    assert again.visible.dtype is torch.bool
    again = lens.load(tmp_path / f"Patching.{ending}")
    assert again.recovered == patched.recovered
    assert math.isnan(again.corrupted)
    again = lens.load(tmp_path / f"TokenAttribution.{ending}")
    assert again.of(0).tolist() == [0.0] * 3
    assert again.expected.dtype is torch.bfloat16
    assert again.expected.tolist() == [1.0, 2.0]
