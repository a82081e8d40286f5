"""Texts to try on the page, with what they show.

`tests/studio/test_examples.py` checks what is said about the models that have a name of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A text, what it shows, the heads that do it, and another prompt to patch them from.

    `ablate` are the heads that the button of this name switches off, to see what they are for.
    """

    name: str
    text: str
    about: str = ""
    heads: tuple[str, ...] = ()
    source: str | None = None
    ablate: tuple[str, ...] = ()
    button: str = ""


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
REPETITION = Example(
    name="Repetition",
    text="The quick brown fox met a lazy dog. The quick brown fox met a lazy",
    source="The quick brown fox met a lazy cat. The quick brown fox met a lazy",
    about="The second time, induction heads attend to what followed the first time.",
)
NAMES = Example(
    name="Names",
    text="When Mary and John went to the shop, John gave a bottle of milk to",
    source="When Mary and John went to the shop, Mary gave a bottle of milk to",
    about="Who gets the milk? The name that is not repeated. Patch each head in turn, below, to "
    "see which heads decide.",
)
STORY = Example(
    name="A story",
    text="Once upon a time there was a little girl who lived in a house by the sea. Every morning "
    "she",
)
PRONOUN = Example(
    name="A pronoun",
    text="The animal did not cross the street because it was too tired.",
    about="What does “it” mean? Look for heads that attend from “it” to “animal”.",
)
QUESTION = Example(
    name="A question", text="Which river flows through Paris? The Seine flows through it."
)

# What the bundled models are, from their model cards.
ABOUT = {
    "house-gpt": "A small language model made to study heads. It was trained on the start of the "
    "English Wikipedia of 2006 and knows few facts.",
    "house-gpt-gated": "The twin of house-gpt with a gate on the outputs of its heads, trained on "
    "the same start of the English Wikipedia of 2006.",
    "house-bert": "A small masked language model made to study heads, trained on the start of the "
    "English Wikipedia of 2006.",
}
BUNDLED = {
    "house-gpt": (
        replace(
            TRONDHEIM,
            about="“Trond” came before, and “he” followed. The induction heads L2H6 and L2H7 "
            "attend to that “he”, so the model predicts it again; L1H0, which attends to the "
            "previous token, lets them find it.",
            heads=("L2H6", "L2H7", "L1H0"),
            ablate=("L2H6", "L2H7"),
            button="Switch off both induction heads",
        ),
        replace(
            VERSAILLES,
            about="“Vers” came before, and “a” followed: the induction heads L2H6 and L2H7 attend "
            "to that “a”. Without L1H0, which attends to the previous token, they do not find it.",
            heads=("L2H6", "L2H7", "L1H0"),
            ablate=("L2H6", "L2H7", "L1H0"),
            button="Switch off all three heads",
        ),
        replace(PHRASE, heads=("L1H0", "L1H5")),
    ),
    "house-gpt-gated": (
        replace(
            TRONDHEIM,
            about="“Trond” came before, and “he” followed. The induction head L3H7 attends to that "
            "“he”; L2H5, which attends to the previous token, lets it find it.",
            heads=("L3H7", "L2H5"),
            ablate=("L3H7",),
            button="Switch off the induction head",
        ),
        replace(
            VERSAILLES,
            heads=("L3H7", "L2H5"),
            ablate=("L3H7", "L2H5"),
            button="Switch off both heads",
        ),
        PHRASE,
    ),
    "house-bert": (
        Example(
            name="Repeated name",
            text="Trondheim lies on a fjord. The harbour of Trond[MASK]im is old.",
            about="The model fills in [MASK]. “Trondheim” came before: L3H1 attends to its “he”, "
            "L2H4 and L2H1 to the neighbors.",
            heads=("L3H1", "L2H4", "L2H1"),
        ),
        Example(
            name="Repeated word",
            text="The battle was fought in May 1940. The [MASK] lasted ten days.",
            about="“battle” is predicted again, although nothing else says what lasted.",
            heads=("L3H1", "L2H4", "L2H1"),
            ablate=("L3H1", "L2H4", "L2H1"),
            button="Switch off all three heads",
        ),
        Example(
            name="Known phrase",
            text="It is one of the [MASK] cities in Europe.",
            about="The neighbors on both sides decide: L2H4 attends to the previous token, "
            "L2H1 to the next.",
            heads=("L2H4", "L2H1"),
            ablate=("L2H4", "L2H1"),
            button="Switch off both heads",
        ),
    ),
    "smollm2": (
        replace(
            REPETITION,
            about="“lazy” came before, and “dog” followed: the induction heads L17H4 and L17H5 "
            "attend to that “dog”, and the model predicts it. L16H0 attends to the previous token. "
            "Many heads do the same here, so that one of them alone changes little.",
            heads=("L17H4", "L17H5", "L16H0"),
        ),
        replace(
            NAMES,
            about="Who gets the milk? L20H0 and L23H3 attend to the second “John”, so that the "
            "model does not repeat him; with them and L29H1 switched off, “Mary” becomes much less "
            "likely.",
            heads=("L23H3", "L29H1", "L20H0"),
            ablate=("L23H3", "L29H1", "L20H0"),
            button="Switch off all three heads",
        ),
        STORY,
    ),
    "minilm": (
        replace(
            PRONOUN,
            about="What does “it” mean? L3H1 and L5H11 attend from “it” to “animal”. Switch them "
            "off and see how far the vector moves.",
            heads=("L3H1", "L5H11"),
            ablate=("L3H1", "L5H11"),
            button="Switch off both heads",
        ),
        replace(REPETITION, source=None),
        QUESTION,
    ),
}

NEXT_TOKEN = (
    REPETITION,
    NAMES,
    STORY,
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
    PRONOUN,
    REPETITION,
    QUESTION,
)
# The word to select at first in an example of a model that predicts nothing.
SELECTED = {PRONOUN.text: "it"}


def examples_for(
    name: str, output: str, mask: str | None, count_tokens: Callable[[str], int]
) -> tuple[Example, ...]:
    """The examples of a model, by its name or by what it predicts."""
    if name in BUNDLED:
        return BUNDLED[name]
    if output == "next token":
        return tuple(_with_equal_length(example, count_tokens) for example in NEXT_TOKEN)
    if output == "masked token" and mask is not None:
        return tuple(
            replace(example, text=example.text.replace("{mask}", mask)) for example in MASKED
        )
    return tuple(replace(example, source=None) for example in PLAIN)


def _with_equal_length(example: Example, count_tokens: Callable[[str], int]) -> Example:
    """Patching needs prompts of equal length, which depends on the tokenizer."""
    if example.source and count_tokens(example.source) != count_tokens(example.text):
        return replace(example, source=None)
    return example
