"""Why a document matched, on the terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from manyheads.console import TerminalPage
    from manyheads.tasks.search.match_result import MatchExplanation, MatchSide

# A word is colored if it adds at least this fraction of what the strongest adds.
COLORED = 0.15


def print_explanation(page: "TerminalPage", explained: "MatchExplanation") -> None:
    """The passage with its words colored by what they add, and the strongest words and heads."""
    from manyheads.console import visible

    for line in colored(explained.document).wrap(page.console, page.width):
        line.rstrip()
        page.show(line)
    page.blank_line()
    # The first line gives the kind of match, those after it words of both sides and heads.
    for sentence in str(explained).splitlines():
        page.paragraph(visible(sentence.strip()), style="dim")


def colored(side: "MatchSide") -> "Text":
    """The text with a background behind each word that adds to the score."""
    from rich.text import Text

    from manyheads.console import heat, visible

    text = Text(visible("".join(" " if letter.isspace() else letter for letter in side.text)))
    words = side.words()
    largest = max((word.contribution for word in words), default=0.0)
    for word in words:
        if largest > 0 and word.contribution >= COLORED * largest:
            text.stylize(heat(word.contribution / largest), word.start, word.end)
    return text
