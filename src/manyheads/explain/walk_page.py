"""The walk through a layer as a page on the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.console import TerminalPage, heat, short, visible
from manyheads.explain.layer_walk import TOLERANCE, Stage, Walk
from manyheads.taps import Head

MAX_WORD = 14
MAX_KEYS = 12
MAX_TOKENS = 24
MAX_TERMS = 8


def token_tables(walk: Walk, positions: range, names: Sequence[str], width: int) -> list[Table]:
    """Positions, words and ids in columns, in as many tables as the width requires."""
    words, ids = [visible(word) for word in walk.tokens], walk.ids[walk.sentence]
    margin = max(map(cell_len, names)) + 2
    sized = [(at, max(3, cell_len(words[at])) + 2) for at in positions]
    tables = []
    for line in _lines(sized, width - margin):
        table = Table.grid(padding=(0, 2, 0, 0))
        rows = (
            [Text(str(at), style="dim") for at in line],
            [Text(words[at], style="bold" if at == walk.position else "") for at in line],
            [Text(str(ids[at])) for at in line],
        )
        for name, row in zip(names, rows, strict=True):
            table.add_row(Text(name, style="dim"), *row)
        tables.append(table)
    return tables


def _lines(sized: Sequence[tuple[int, int]], width: int) -> list[list[int]]:
    """Positions in lines that fit the width of the page."""
    lines: list[list[int]] = [[]]
    used = 0
    for position, size in sized:
        if lines[-1] and used + size > width:
            lines.append([])
            used = 0
        lines[-1].append(position)
        used += size
    return lines


def batch_table(walk: Walk, padding: str, width: int) -> Table:
    """The padded sentences, as many columns as fit the width."""
    longest = max(map(len, walk.sentences))
    filler = Text(padding, style="dim")
    rows = [[Text(visible(word)) for word in sentence] for sentence in walk.sentences]
    rows = [row + [filler] * (longest - len(row)) for row in rows]
    widths = _widths(rows, width - 16)
    complete = len(widths) == longest
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for position, column in enumerate(widths):
        table.add_column(str(position), no_wrap=True, width=column, overflow="ellipsis")
    table.add_column("" if complete else f"… {longest - 1}", no_wrap=True)
    for index, row in enumerate(rows):
        chosen = index == walk.sentence
        number = f"{'▸' if chosen else ' '} {index}"
        more = Text("" if complete else "…", style="dim")
        table.add_row(number, *row[: len(widths)], more, style="bold" if chosen else "")
    return table


def _widths(rows: list[list[Text]], width: int) -> list[int]:
    """The widths of the columns that fit; the first is always shown."""
    widths: list[int] = []
    for column in zip(*rows, strict=True):
        widest = min(MAX_WORD, max(3, *[cell.cell_len for cell in column]))
        width -= widest + 2
        if width < 0 and widths:
            break
        widths.append(widest)
    return widths


def scores_table(walk: Walk, keys: range, names: Mapping[str, str], width: int) -> Table:
    """The scores of the chosen token, by hand and by the kernel."""
    kernel = walk[Stage.SCORES].model[walk.head, walk.position].tolist()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, title in names.items():
        if name == "key":
            table.add_column(title, no_wrap=True, max_width=max(8, min(24, width - 58)))
        else:
            table.add_column(title, no_wrap=True, justify="right")
    for key in keys:
        cell = walk.cell(key)
        table.add_row(
            Text(visible(walk.tokens[key])),
            f"{cell.product:.4f}",
            f"{cell.score:.4f}",
            f"{kernel[key]:.4f}",
            f"{abs(cell.score - kernel[key]):.1e}",
            style="bold" if key == walk.strongest_key else "",
        )
    return table


def weights_table(walk: Walk, window: range, sum_name: str, width: int) -> Table:
    """The attention pattern of the chosen head, or a window of it, as a heat map."""
    pattern = walk[Stage.WEIGHTS].model[walk.head]
    words = [visible(word) for word in walk.tokens]
    label = min(16, max(map(cell_len, words))) + 1
    column = max(6, min(11, (width - label - 10) // len(window)))
    table = Table.grid()
    header = [Text(short(words[key], column - 1) + " ", style="dim") for key in window]
    table.add_row("", "", *header, Text(f" {sum_name}", style="dim"))
    largest = float(pattern.max())
    for query in window:
        chosen = query == walk.position
        weights = pattern[query][window.start : window.stop].tolist()
        table.add_row(
            "▸ " if chosen else "  ",
            Text(short(words[query], label)),
            *(Text(f"{weight:.3f}".center(column), heat(weight / largest)) for weight in weights),
            f" {pattern[query].sum():.3f}",
            style="bold" if chosen else "",
        )
    return table


PROJECTED = (Stage.QUERY, Stage.KEY, Stage.VALUE)
# The section of the words, the formula, the shape and the stages of each step.
STEPS: tuple[tuple[str, str, str, tuple[Stage, ...]], ...] = (
    ("tokens", "", "n", ()),
    ("embeddings", "√{width}·E[id]", "n × c", (Stage.EMBEDDINGS,)),
    ("positions", "x = √{width}·E[id] + P[position]", "n × c", (Stage.POSITIONS, Stage.INPUT)),
    ("projections", "Q = x·W_Q + b_Q, …", "n × c → 3 × n × h × d", PROJECTED),
    ("scores", "S = Q·Kᵀ / √{size}", "h × n × n", ()),
    ("weights", "A = softmax(S)", "h × n × n", (Stage.WEIGHTS,)),
    ("heads", "A·V", "n × h × d", (Stage.HEAD_OUTPUTS,)),
    ("concatenated", "[H0 … H{last_head}]", "n × h × d → n × c", (Stage.CONCATENATED,)),
    ("output", "[H0 … H{last_head}]·W_O + b_O", "n × c", (Stage.ATTENTION_OUTPUT,)),
    (
        "attention_norm",
        "LayerNorm(x + attention)",
        "n × c",
        (Stage.ATTENTION_SUM, Stage.ATTENTION_NORMED),
    ),
    (
        "feedforward",
        "ReLU(x·W₁ + b₁)·W₂ + b₂",
        "n × c → n × f → n × c",
        (Stage.NEURONS, Stage.FEEDFORWARD_OUTPUT),
    ),
    (
        "feedforward_norm",
        "LayerNorm(x + feed-forward)",
        "n × c",
        (Stage.FEEDFORWARD_SUM, Stage.FEEDFORWARD_NORMED),
    ),
)
# The steps that show the chosen token at some stages, by the words of each row.
ROWS = {
    "positions": {
        "positions.embedding": Stage.EMBEDDINGS,
        "positions.position": Stage.POSITIONS,
        "positions.sum": Stage.INPUT,
    },
    "output": {"output.row": Stage.ATTENTION_OUTPUT},
    "attention_norm": {
        "rows.x": Stage.INPUT,
        "attention_norm.attention": Stage.ATTENTION_OUTPUT,
        "rows.sum": Stage.ATTENTION_SUM,
        "rows.normed": Stage.ATTENTION_NORMED,
    },
    "feedforward": {
        "feedforward.neurons": Stage.NEURONS,
        "feedforward.output": Stage.FEEDFORWARD_OUTPUT,
    },
    "feedforward_norm": {
        "rows.x": Stage.ATTENTION_NORMED,
        "feedforward_norm.feedforward": Stage.FEEDFORWARD_OUTPUT,
        "rows.sum": Stage.FEEDFORWARD_SUM,
        "rows.normed": Stage.FEEDFORWARD_NORMED,
    },
}


class WalkPage:
    """Prints a walk in numbered steps."""

    def __init__(
        self, walk: Walk, words: Mapping[str, str], console: Console, *, seed: int
    ) -> None:
        self.walk, self.words, self.page = walk, words, TerminalPage(console)
        self.tokens = [visible(token) for token in walk.tokens]
        self.heads, self.size = walk[Stage.QUERY].model.shape[1:]
        self.width, self.hidden = self.heads * self.size, walk[Stage.NEURONS].model.shape[1]
        active = walk[Stage.NEURONS].model > 0
        self.facts: dict[str, object] = {
            "sentences": len(walk.sentences),
            "sentence": walk.sentence,
            "width": self.width,
            "heads": self.heads,
            "size": self.size,
            "hidden": self.hidden,
            "seed": seed,
            "head": Head(0, walk.head),
            "last_head": self.heads - 1,
            "position": walk.position,
            "last_position": len(walk.tokens) - 1,
            "token": self.tokens[walk.position],
            "other": self.tokens[walk.strongest_key],
            "active": int(active[walk.position].sum()),
            "fraction": float(active.float().mean()),
        }

    def show(self) -> None:
        """Print all steps, and whether model and hand agree."""
        is_batch = len(self.walk.sentences) > 1
        self.page.title(self._word("start.batch_title" if is_batch else "start.title"))
        self.page.paragraph(self._word("start.model"))
        self.page.paragraph(self._word("start.untrained"), "yellow")
        self.page.paragraph(self._word("start.choice"))
        steps = {
            "tokens": self._tokens,
            "embeddings": self._embeddings,
            "projections": self._projections,
            "scores": self._scores,
            "weights": self._weights,
            "heads": self._heads,
            "concatenated": self._concatenated,
        }
        roots = {"embeddings": math.sqrt(self.width), "scores": math.sqrt(self.size)}
        for number, (name, formula, shape, stages) in enumerate(STEPS, start=1):
            title = f"{number:2} {self._word(f'{name}.title')}"
            self.page.heading(title, formula.format(**self.facts), self._sizes(shape))
            self.page.paragraph(self._word(f"{name}.text", root=roots.get(name)))
            if name in ROWS:
                self._show_token(ROWS[name])
            else:
                steps[name]()
            if stages:
                difference = max(self.walk[stage].difference for stage in stages)
                key = "agreement.step" if difference <= TOLERANCE else "agreement.step_differs"
                self._print_agreement(self._word(key, difference=difference), difference)
        self._result()

    def draw(self, path: Path) -> None:
        """Draw all heads of the sentence."""
        from manyheads.pictures import HeadMapLabels, draw_heads

        names = ("title", "subtitle", "queries", "keys", "weight")
        draw_heads(
            self.walk[Stage.WEIGHTS].model.numpy(),
            self.tokens,
            path,
            names=[str(Head(0, head)) for head in range(self.heads)],
            entropies=self.walk.entropies().tolist(),
            labels=HeadMapLabels(
                **{name: self._word(f"picture.{name}") for name in names},
                entropy=self.words["picture.entropy"],
            ),
        )
        self.page.paragraph(self._word("picture.written", path=path))

    def _tokens(self) -> None:
        lengths = [len(sentence) for sentence in self.walk.sentences]
        if len(lengths) > 1:
            self.page.show(batch_table(self.walk, self._word("tokens.padding"), self.page.width))
            starts = ", ".join(str(sum(lengths[:index])) for index in range(len(lengths)))
            self.page.paragraph(self._word("tokens.batch", tokens=sum(lengths), starts=starts))
            self.page.blank_line()
        names = [self._word(f"tokens.{name}") for name in ("position", "word", "id")]
        for table in token_tables(self.walk, self._window(MAX_TOKENS), names, self.page.width):
            self.page.show(table)
        self._describe_window(MAX_TOKENS)

    def _embeddings(self) -> None:
        window = self._window(MAX_KEYS)
        values = self.walk[Stage.EMBEDDINGS].model
        rows = [(self.tokens[position], values[position].tolist()) for position in window]
        self.page.number_rows(rows, strong=window.index(self.walk.position))
        self._describe_window(MAX_KEYS)

    def _projections(self) -> None:
        rows = []
        for stage in PROJECTED:
            values = self.walk[stage].model[self.walk.position, self.walk.head]
            rows.append((self._word(f"projections.{stage.value}"), values.tolist()))
        self.page.number_rows(rows)

    def _scores(self) -> None:
        walk, cell = self.walk, self.walk.cell(self.walk.strongest_key)
        columns = ("key", "product", "hand", "kernel", "difference")
        names = {name: self._word(f"scores.{name}") for name in columns}
        self.page.show(scores_table(walk, self._window(MAX_KEYS), names, self.page.width))
        self._describe_window(MAX_KEYS)
        self.page.paragraph(self._word("scores.cell"))
        terms = [_times(q, k) for q, k in zip(cell.query, cell.key, strict=True)]
        self.page.paragraph(f"q·k = {' + '.join(terms)} = {cell.product:.4f}", "cyan")
        step = walk[Stage.SCORES]
        kernel = float(step.model[walk.head, walk.position, walk.strongest_key])
        by_hand = f"{cell.product:.4f} / √{self.size} = {cell.product:.4f} / {cell.root:g}"
        name = self._word("scores.kernel")
        self.page.paragraph(f"{by_hand} = {cell.score:.4f}   ({name}: {kernel:.4f})", "cyan")
        facts = {"count": step.model.numel(), "difference": step.difference}
        self._print_agreement(self._word("agreement.scores", **facts), step.difference)

    def _weights(self) -> None:
        self.page.blank_line()
        window = self._window(MAX_KEYS)
        sum_name = self._word("weights.sum")
        self.page.show(weights_table(self.walk, window, sum_name, self.page.width))
        self.page.blank_line()
        self._describe_window(MAX_KEYS)
        self.page.paragraph(self._word("weights.cell"))
        powers = self.walk.powers()
        terms = [f"e^{_signed(math.log(power))}" for power in powers]
        top, total = self.walk.strongest_key, sum(powers)
        self.page.paragraph(f"{terms[top]} / ({_sum_of(terms)})", "cyan")
        weight = f"{powers[top]:.3f} / {total:.3f} = {powers[top] / total:.4f}"
        self.page.paragraph(f"= {weight}", "cyan")

    def _heads(self) -> None:
        walk = self.walk
        pairs = walk.first_channel()
        total = sum(weight * value for weight, value in pairs)
        self.page.paragraph(f"{_sum_of([_times(*pair) for pair in pairs])} = {total:.3f}", "cyan")
        outputs = walk[Stage.HEAD_OUTPUTS].model[walk.position].tolist()
        rows = [(str(Head(0, index)), output) for index, output in enumerate(outputs)]
        self.page.number_rows(rows, strong=walk.head)

    def _concatenated(self) -> None:
        outputs = self.walk[Stage.CONCATENATED].model[self.walk.position].tolist()
        table = Table(box=box.MINIMAL, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
        for head in range(self.heads):
            table.add_column(str(Head(0, head)), no_wrap=True)
        table.add_row(*[f"{first:.2f} …" for first in outputs[:: self.size]])
        self.page.show(table)

    def _result(self) -> None:
        step, agrees = self.walk[Stage.RESULT], self.walk.agrees
        self.page.heading(f" {'✓' if agrees else '✗'} {self._word('agreement.title')}")
        self.page.paragraph(f"explain_kernels: {self.walk.kernels_explained}", "dim")
        key = "agreement.result" if agrees else "agreement.result_differs"
        facts = {"kernel": self.walk.kernel, "count": step.model.numel()}
        text = self._word(key, difference=step.difference, **facts)
        self.page.paragraph(text, "bold green" if agrees else "bold red")

    def _word(self, key: str, **more: object) -> str:
        return self.words[key].format(**{**self.facts, **more})

    def _sizes(self, shape: str) -> str:
        """A shape with its sizes: `n × c` becomes `7 × 128`."""
        sizes = {"n": len(self.tokens), "c": self.width, "h": self.heads, "d": self.size}
        sizes["f"] = self.hidden
        return " ".join(str(sizes.get(part, part)) for part in shape.split())

    def _window(self, size: int) -> range:
        """At most `size` positions, with the chosen one in the middle where possible."""
        count = len(self.tokens)
        first = max(0, min(self.walk.position - size // 2, count - size))
        return range(first, min(count, first + size))

    def _describe_window(self, size: int) -> None:
        window, count = self._window(size), len(self.tokens)
        if len(window) < count:
            facts = {"first": window[0], "last": window[-1], "count": count}
            self.page.paragraph(self._word("tokens.part", **facts), "dim")

    def _show_token(self, stages: Mapping[str, Stage]) -> None:
        """Print the chosen token at some stages, and its mean and deviation around a norm."""
        position = self.walk.position
        values = {key: self.walk[stage].model[position] for key, stage in stages.items()}
        self.page.number_rows([(self._word(key), row.tolist()) for key, row in values.items()])
        moments = []
        for stage in (stages[key] for key in ("rows.sum", "rows.normed") if key in stages):
            row = self.walk[stage].hand[position]
            # Adding zero turns -0.000 into 0.000.
            mean, deviation = round(float(row.mean()), 3) + 0.0, float(row.std(correction=0))
            moments.append(self._word("rows.moments", mean=mean, deviation=deviation))
        if moments:
            self.page.paragraph(" → ".join(moments))

    def _print_agreement(self, text: str, difference: float) -> None:
        good = difference <= TOLERANCE
        self.page.paragraph(f"{'✓' if good else '✗'} {text}", "green" if good else "bold red")


def _signed(number: float) -> str:
    """
    >>> _signed(0.5), _signed(-0.5), _signed(-0.001)
    ('0.50', '(-0.50)', '0.00')
    """
    number = round(number, 2) + 0.0
    return f"{number:.2f}" if number >= 0 else f"({number:.2f})"


def _sum_of(terms: Sequence[str]) -> str:
    more = ["…"] if len(terms) > MAX_TERMS else []
    return " + ".join([*terms[:MAX_TERMS], *more])


def _times(a: float, b: float) -> str:
    return f"{_signed(a)}×{_signed(b)}"
