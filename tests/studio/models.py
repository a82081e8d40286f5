"""Small models with tokenizers of their own, as a studio opens them."""

from dataclasses import replace
from typing import Any

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.models.build import build
from manyheads.models.readout import NoReadout

WORDS = "The cat sat on the mat and the dog sat on the log while it rained in Paris and Rome. "


def tokenizer() -> Any:
    return train_tokenizer(
        InMemoryTexts((WORDS * 4, "Привет, мир! 你好")), size=320, progress=False
    )


def decoder(*, layers: int = 3, width: int = 32, heads: int = 4, seed: int = 0) -> Any:
    """Rotary, so that a text may be of any length."""
    model = build(
        "llama-1b-shape",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads // 2,
        head_size=width // heads,
        hidden=2 * width,
        vocabulary=320,
        theta=10_000.0,
        seed=seed,
    )
    # Drawn so small, all words would be about as likely, whatever heads do.
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.tokenizer = tokenizer()
    return model


def learned(*, positions: int = 16) -> Any:
    """One with a last position."""
    model = build("gpt2", layers=2, width=32, heads=4, vocabulary=320, positions=positions, seed=1)
    model.tokenizer = tokenizer()
    return model


def encoder() -> Any:
    model = build("bert-base", layers=2, width=32, heads=4, hidden=64, vocabulary=324, seed=2)
    model.tokenizer = tokenizer()
    return model


def vectors() -> Any:
    """An encoder that predicts nothing."""
    model = build(replace(encoder().config, readout=NoReadout()), seed=2)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.tokenizer = tokenizer()
    return model


def masked() -> Any:
    """An encoder whose tokenizer has a mask."""
    model = encoder()
    model.tokenizer.add_special_tokens(["[MASK]"])
    return model


def vision(image: int = 32) -> Any:
    return build(
        "vit-b16", layers=2, width=32, heads=4, hidden=64, image=image, patch=8, classes=5, seed=3
    )
