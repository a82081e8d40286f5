import gzip
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from manyheads.errors import InputError
from manyheads.report.page import (
    FORMAT,
    pack,
    quantize,
    read_part,
    render_report,
    write_report,
)
from tests.architecture.house import PACKAGE, ROOT
from tests.report.small import circuit, report


class Seen(HTMLParser):
    """Every tag of a page with its attributes, and what stands inside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)


def page() -> str:
    return render_report(report(), model_path="some where", text_file="it's.txt", made="Today.")


def test_whatever_a_text_holds_is_harmless() -> None:
    seen = Seen(page())
    names = [tag for tag, _ in seen.tags]
    assert names.count("script") == 2
    assert "img" not in names
    assert not any(name.startswith("on") for _, inputs in seen.tags for name in inputs)
    data, script = seen.scripts
    assert "".join(json.loads(data)["tokens"]["main"]).startswith("</script><script>alert(1)")
    assert "alert" not in script
    assert "a &lt;b&gt;model&lt;/b&gt;" in page()


def test_nothing_is_requested_from_elsewhere() -> None:
    assert not re.search(r"(src|href)=\"(?!#)", page())
    assert "https://" not in page()
    assert "@import" not in page()
    assert "default-src 'none'" in page()
    assert "unsafe" not in page()
    assert " style=" not in page()


def test_every_head_has_a_row_a_pattern_and_a_value_of_each_measure() -> None:
    data = json.loads(Seen(page()).scripts[0])
    assert len(data["heads"]) == len(data["patterns"]) == 4
    assert all(len(each["values"]) == 4 for each in data["measures"])
    assert page().count('<th scope="row"') == 4


def test_nothing_is_left_to_be_filled_in() -> None:
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page(), flags=re.S)
    assert "{{" not in without_data


def test_commands_quote_paths_for_a_shell() -> None:
    assert "manyheads studio &#x27;some where&#x27;" in page()


def test_each_measure_has_a_definition() -> None:
    data = json.loads(Seen(page()).scripts[0])
    assert all(len(each["about"]) > 20 for each in data["measures"])
    assert "arXiv 1905.10650" in page()


def test_scripts_are_those_of_the_studio_without_exports() -> None:
    script = Seen(page()).scripts[1]
    assert "function sequential(" in script
    assert "function percent(" in script
    assert not re.search(r"^(export|import) ", script, flags=re.MULTILINE)


def test_a_page_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    assert write_report("<p>ö</p>", path) == 9
    assert path.read_text("utf-8") == "<p>ö</p>"
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["report.txt", "report"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"must end in \.html"):
        write_report("", tmp_path / name)


def unpack(packed: str, length: int) -> list[dict[int, float]]:
    raw = np.frombuffer(gzip.decompress(b64decode(packed)), dtype=np.uint8).astype(int)
    counts, rest = raw[:length], raw[length:]
    low, high, small = np.split(rest, 3)
    rows, start = [], 0
    for count in counts:
        some = slice(start, start + count)
        keys = np.cumsum(low[some] + 256 * high[some])
        rows.append(dict(zip(keys.tolist(), ((small[some] / 255) ** 2).tolist(), strict=True)))
        start += count
    return rows


def test_weights_come_back_within_half_a_step_of_their_root() -> None:
    generator = np.random.default_rng(0)
    weights = np.sort(generator.dirichlet(np.full(8, 0.3), size=700))[:, ::-1].astype(np.float32)
    keys = np.stack([generator.permutation(700)[:8] for _ in range(700)])
    rows = unpack(pack(keys, weights), 700)
    for row, mine, values in zip(rows, keys, weights, strict=True):
        inputs = dict(zip(mine.tolist(), values.tolist(), strict=True))
        assert row.keys() <= inputs.keys()
        for key, weight in row.items():
            assert abs(weight**0.5 - inputs[key] ** 0.5) <= 0.5 / 255 + 1e-6
        left_out = sum(inputs[key] for key in inputs.keys() - row.keys())
        assert left_out < 0.021


def test_the_same_pattern_is_the_same_text() -> None:
    keys, weights = np.array([[0, 1]]), np.array([[0.7, 0.3]])
    assert pack(keys, weights) == pack(keys, weights)


def test_no_weight_is_no_byte() -> None:
    assert quantize(np.zeros((1, 1)))[0, 0] == 0
    assert unpack(pack(np.array([[3, 1]]), np.array([[1.0, 0.0]])), 1) == [{3: 1.0}]


IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./([\w.]+)"', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("room", ["report/page", "report/atlas", "studio/page", "pictures/page"])
def test_whatever_a_script_imports_is_exported(room: str) -> None:
    shared = PACKAGE / "pictures" / "page"
    for script in sorted((PACKAGE / room).glob("*.js")):
        for names, module in IMPORT.findall(script.read_text("utf-8")):
            home = next(
                path for folder in (script.parent, shared) if (path := folder / module).is_file()
            )
            exported = set(EXPORT.findall(home.read_text("utf-8")))
            missing = {name.split(" as ")[0].strip() for name in names.split(",") if name.strip()}
            assert missing <= exported, f"{script.name} imports {missing - exported} of {module}"


def test_the_sample_in_the_docs_has_the_format_and_the_sections_of_today() -> None:
    """Made by the command in docs/guides/report.md."""
    sample = (ROOT / "docs" / "samples" / "report.html").read_text("utf-8")
    assert f'content="manyheads report, format {FORMAT}"' in sample
    assert len(sample.encode()) < 1_000_000
    titles = re.findall(r"<h2>([^{<]+)</h2>", read_part("page.html"))
    assert [title for title in titles if f"<h2>{title}</h2>" not in sample] == []


def test_a_report_has_a_circuit_only_if_it_gets_one() -> None:
    with_circuit = render_report(report(), model_path="it", text_file="text.txt", circuit=circuit())
    assert "<h2>A circuit</h2>" in with_circuit
    assert len(Seen(with_circuit).scripts) == 3
    assert "A circuit" not in page()
