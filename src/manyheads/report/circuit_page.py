"""A page about one circuit."""

from html import escape

from manyheads.lens.circuit_discovery.circuit import Circuit
from manyheads.report import page


def render_circuit(circuit: Circuit, *, name: str, origin: str = "") -> str:
    """Render a page about a circuit of the model with that name; it opens without a network."""
    shared = ("language.js", "dom.js", "format.js", "theme.js", *page.CIRCUIT_SCRIPTS)
    script = page.join_scripts(shared, (page.CIRCUIT_SECTION, "circuit_page.js"))
    style = page.page_style() + page.read_part(page.CIRCUIT_STYLE, "pictures")
    values = {
        "policy": page.content_policy(script, style),
        "name": escape(name),
        "made": escape(origin),
        "style": style,
        "section": page.circuit_section(circuit),
        "script": script,
    }
    return page.fill_page(page.read_part("circuit.html"), values)
