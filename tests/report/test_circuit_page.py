"""A circuit as a page: what it says, what its script reads, and that nothing else runs."""

import json
import re
from collections import Counter
from dataclasses import replace

from manyheads.report import page, render_circuit
from tests.report.small import EVIL, circuit
from tests.report.test_page import Seen


def test_the_page_has_the_edges_their_layouts_and_the_curve() -> None:
    seen = Seen(render_circuit(circuit(), name="small", origin="Today."))
    data = json.loads(seen.scripts[0])
    first, _, error = circuit().ranked()[0]
    assert data["view"]["edges"][0][0] == first.writer
    assert data["view"]["edges"][0][4] == error
    assert data["view"]["total"] == len(circuit().ranked())
    assert data["curve"][1] == [20, 0.8, 0.05]
    assert "CPR 0.900" in render_circuit(circuit(), name="small")


def test_a_name_is_harmless_and_nothing_is_requested() -> None:
    text = render_circuit(circuit(), name=EVIL)
    names = [tag for tag, _ in Seen(text).tags]
    assert names.count("script") == 2
    assert "img" not in names
    assert "default-src 'none'" in text
    assert "https://" not in text


def test_noise_is_named_and_a_circuit_without_a_curve_has_none() -> None:
    metadata = {"texts": 1, "effect": 0.1, "effect_error": 0.2, "agreement": float("nan")}
    text = render_circuit(replace(circuit(), metadata=metadata), name="small")
    assert "Beware:" in text
    assert "CPR" not in text
    assert json.loads(Seen(text).scripts[0])["curve"] == []


def test_no_name_of_a_report_with_a_circuit_is_declared_twice() -> None:
    shared, own = (
        (*page.SHARED_SCRIPTS, *page.CIRCUIT_SCRIPTS),
        (*page.SCRIPTS, "circuit_section.js"),
    )
    script = page.join_scripts(shared, own)
    names = Counter(re.findall(r"^(?:function|const|let|class) (\w+)", script, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []
