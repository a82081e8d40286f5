"""The heads of a model on one text, in a notebook: the head view of the report in a frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from manyheads.atomic_write import atomic_write
from manyheads.bridge.automatic import wrapping_models
from manyheads.formatting import pluralise
from manyheads.lens.attention_maps.patterns import top_keys
from manyheads.lens.head_kinds.kinds import kinds as find_kinds
from manyheads.lens.inspection import Inspection, summarize_model
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results import html_tables
from manyheads.models import build
from manyheads.report.data import MAX_KEYS, MAX_WEIGHTS, MIN_KEYS, list_measures
from manyheads.report.inputs import ReportInput, read_text_input
from manyheads.report.page import (
    HEAD_SCRIPTS,
    SHARED_SCRIPTS,
    content_policy,
    fill_page,
    join_scripts,
    page_data,
    page_style,
    read_part,
    to_json,
)

MAX_TOKENS = 1024
HEIGHT = 720


@dataclass(frozen=True, slots=True, repr=False)
class HeadView:
    """A page that a notebook displays in a frame; it needs no server and no network.

    It stays in notebooks that are exported. `save` writes it as an HTML file.
    """

    title: str
    page: str
    height: int = HEIGHT

    def save(self, path: Path | str) -> None:
        with atomic_write(Path(path)) as beside:
            beside.write_bytes(self.page.encode("utf-8", errors="replace"))

    def show(self) -> None:
        """Display the view in a notebook, or print what it is."""
        html_tables.display(self)

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.page)}" '
            f'sandbox="allow-scripts" style="width:100%;height:{self.height}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{self.title}: displayed in a notebook, or save() it as an HTML file"


@wrapping_models
def show(
    model: build.Model,
    text: str | tuple[str, str] | Sequence[int],
    *,
    name: str = "the model",
    kinds: bool = False,
    height: int = HEIGHT,
    progress: bool = True,
) -> HeadView:
    """Show where every head of a model looks on a text, in a notebook.

    All heads as a grid, colored by any measure, and one of them on the text: as shades, as lines
    and as a map. `text` may also be token ids, or for an encoder-decoder a (source, target) pair.
    With `kinds` the kinds of heads are measured too, which takes longer. Only the largest weights
    of each query are stored, so that the view of 12 x 12 heads on 128 tokens takes less than a
    megabyte.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    >>> show(model, [5, 6, 7, 5, 6], name="mine", progress=False)
    2 heads of mine on 5 tokens: displayed in a notebook, or save() it as an HTML file
    """
    if isinstance(text, str) or isinstance(text[0], str):
        texts: Any = [text]
        source = read_text_input(model, name, texts, measured=MAX_TOKENS, shown=MAX_TOKENS)
    else:
        numbers = tuple(map(int, text))
        source = ReportInput((list(numbers),), numbers, tuple(map(str, numbers)))
    measured = statistics(model, source.shown, progress=progress)
    classified = find_kinds(model, source.shown, progress=progress) if kinds else None
    inspection = Inspection(
        model=summarize_model(model),
        statistics=measured,
        kinds=classified,
        metadata={"complete": True, "seed": 0, "default_texts": False},
    )
    weights = MAX_WEIGHTS // max(1, len(inspection.addresses) * len(source))
    largest = top_keys(model, source.shown, top_k=max(MIN_KEYS, min(MAX_KEYS, weights)))
    title = f"{len(inspection.addresses)} heads of {name} on {pluralise(len(source), 'token')}"
    script = join_scripts(SHARED_SCRIPTS, HEAD_SCRIPTS)
    values = {
        "policy": content_policy(script, page_style()),
        "name": escape(name),
        "about": escape(f"{name}: {inspection.model}"),
        "style": page_style(),
        "head_section": read_part("head_section.html"),
        "data": to_json(page_data(source, inspection, list_measures(inspection), largest)),
        "script": script,
    }
    return HeadView(title, fill_page(read_part("notebook.html"), values), height)
