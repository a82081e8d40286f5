"""A sentence walked through one attention layer, and why scores are divided by sqrt(d)."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files


def load_words(language: str) -> Mapping[str, str]:
    """The texts of one language, by section and name, as in `scores.title`."""
    source = files("manyheads.explain").joinpath("words.toml")
    return {
        f"{section}.{name}": text
        for section, texts in tomllib.loads(source.read_text("utf-8"))[language].items()
        for name, text in texts.items()
    }
