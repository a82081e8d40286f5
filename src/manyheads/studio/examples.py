"""Texts to try on the page, with what they show.

`tests/studio/test_examples.py` checks what is said about the bundled models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A text, what it shows, the heads that do it, and another prompt to patch them from."""

    name: str
    text: str
    about: str = ""
    heads: tuple[str, ...] = ()
    source: str | None = None


TRONDHEIM = Example(
    name="Repeated name",
    text="Trondheim lies on a fjord in Norway. In 1921 the harbour of Trond",
    source="Trondelag lies on a fjord in Norway. In 1921 the harbour of Trond",
)
VERSAILLES = Example(
    name="Repeated treaty",
    text="The Treaty of Versailles was signed in 1919. The Treaty of Vers",
    source="The Treaty of Versalius was signed in 1919. The Treaty of Vers",
)
PHRASE = Example(
    name="Known phrase",
    text="He was born in the United",
    about="Nothing is repeated here: the model completes a phrase of its training texts.",
)

BUNDLED = {
    "house-gpt": (
        replace(
            TRONDHEIM,
            about="“Trond” came before, and “he” followed. The induction heads L2H6 and L2H7 "
            "attend to that “he”, so the model predicts it again; L1H0, which attends to the "
            "previous token, lets them find it. Switch them off and see.",
            heads=("L2H6", "L2H7", "L1H0"),
        ),
        replace(
            VERSAILLES,
            about="“Vers” came before, and “a” followed: the induction heads L2H6 and L2H7 attend "
            "to that “a”. Without L1H0, which attends to the previous token, they do not find it.",
            heads=("L2H6", "L2H7", "L1H0"),
        ),
        replace(PHRASE, heads=("L1H0", "L1H5")),
    ),
    "house-gpt-gated": (
        replace(
            TRONDHEIM,
            about="“Trond” came before, and “he” followed. The induction head L3H7 attends to that "
            "“he”; L2H5, which attends to the previous token, lets it find it.",
            heads=("L3H7", "L2H5"),
        ),
        replace(VERSAILLES, heads=("L3H7", "L2H5")),
        PHRASE,
    ),
    "house-bert": (
        Example(
            name="Repeated name",
            text="Trondheim lies on a fjord. The harbour of Trond[MASK]im is old.",
            about="The model fills in [MASK]. “Trondheim” came before: L3H1 attends to its “he”, "
            "L2H4 and L2H1 to the neighbors. Tokens of this model begin with their space: type "
            "none before [MASK].",
            heads=("L3H1", "L2H4", "L2H1"),
        ),
        Example(
            name="Repeated word",
            text="The battle was fought in May 1940. The[MASK] lasted ten days.",
            about="“battle” is predicted again, although nothing else says what lasted.",
            heads=("L3H1", "L2H4", "L2H1"),
        ),
        Example(
            name="Known phrase",
            text="It is one of the[MASK] cities in Europe.",
            about="The neighbors on both sides decide: L2H4 attends to the previous token, "
            "L2H1 to the next.",
            heads=("L2H4", "L2H1"),
        ),
    ),
}

NEXT_TOKEN = (
    Example(
        name="Names",
        text="When Mary and John went to the shop, John gave a bottle of milk to",
        source="When Mary and John went to the shop, Mary gave a bottle of milk to",
        about="Who gets the milk? Heads that copy names attend to the one that is not repeated.",
    ),
    Example(
        name="Repetition",
        text="The quick brown fox met a lazy dog. The quick brown fox met a lazy",
        source="The quick brown fox met a lazy cat. The quick brown fox met a lazy",
        about="The second time, induction heads attend to what followed the first time.",
    ),
    Example(
        name="A story",
        text="Once upon a time there was a little girl who lived in a house by the sea. "
        "Every morning she",
    ),
)
MASKED = (
    Example(name="A capital", text="Paris is the capital of {mask}."),
    Example(
        name="Repetition",
        text="The battle was fought in May 1940. The {mask} lasted ten days.",
        about="Heads that find copies attend to “battle”.",
    ),
    Example(
        name="A pronoun", text="The animal did not cross the street because {mask} was too tired."
    ),
)
PLAIN = (
    Example(
        name="A pronoun",
        text="The animal did not cross the street because it was too tired.",
        about="Select “it” to see which heads attend to “animal”.",
    ),
    NEXT_TOKEN[1],
    Example(name="A question", text="Which river flows through Paris? The Seine flows through it."),
)


def examples_for(
    name: str, output: str, mask: str | None, count_tokens: Callable[[str], int]
) -> tuple[Example, ...]:
    """The examples of a model, by its name or by what it predicts."""
    if name in BUNDLED:
        return BUNDLED[name]
    if output == "next token":
        return tuple(_with_equal_length(example, count_tokens) for example in NEXT_TOKEN)
    if output == "masked token" and mask is not None:
        return tuple(_with_mask(example, mask, count_tokens) for example in MASKED)
    return tuple(replace(example, source=None) for example in PLAIN)


def _with_equal_length(example: Example, count_tokens: Callable[[str], int]) -> Example:
    """Patching needs prompts of equal length, which depends on the tokenizer."""
    if example.source and count_tokens(example.source) != count_tokens(example.text):
        return replace(example, source=None)
    return example


def _with_mask(example: Example, mask: str, count_tokens: Callable[[str], int]) -> Example:
    """Some tokenizers make a token of the space before a mask: then there is none."""
    spaced = example.text.replace("{mask}", mask)
    closed = example.text.replace(" {mask}", mask)
    return replace(example, text=closed if count_tokens(closed) < count_tokens(spaced) else spaced)
