"""What a model is, in a sentence: its kind, its layers and heads, its sizes."""

from dataclasses import dataclass

from manyheads.lens.addresses import blocks_of, stacks_of
from manyheads.models.build import Model
from manyheads.models.vision import Vision

__all__ = ["Portrait", "portray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portrait:
    """The kind of a model, how many layers and heads each stack has, and how large it is.

    >>> from manyheads.models.build import build
    >>> print(portray(build("gpt2", layers=2, width=32, heads=4, vocabulary=60, seed=0)))
    A Decoder of 2 layers with 4 heads each: 8 heads, width 32, vocabulary 60, 60,160 parameters.
    """

    type: str
    stacks: dict[str, list[int]]
    width: int
    vocabulary: int | None
    parameters: int

    def __str__(self) -> str:
        layers = "; ".join(
            ("" if name == "main" else f"{name}: ") + _layers(heads)
            for name, heads in self.stacks.items()
        )
        total = sum(sum(heads) for heads in self.stacks.values())
        words = "" if self.vocabulary is None else f"vocabulary {self.vocabulary:,}, "
        article = "An" if self.type[0] in "AEIOU" else "A"
        return (
            f"{article} {self.type} of {layers}: {total:,} heads, width {self.width:,}, "
            f"{words}{self.parameters:,} parameters."
        )


def portray(model: Model) -> Portrait:
    """The facts of a model, told from its configuration."""
    stacks = stacks_of(model)
    heads = {name: [0] * len(stack.config.layers) for name, stack in stacks.items()}
    for block in blocks_of(model):
        heads[block.stack][block.layer] += block.heads
    words = None if isinstance(model, Vision) else model.config.embedding.vocabulary
    return Portrait(
        type=type(model).__name__,
        stacks=heads,
        width=next(iter(stacks.values())).config.width,
        vocabulary=words,
        parameters=sum(each.numel() for each in model.parameters()),
    )


def _layers(heads: list[int]) -> str:
    """
    >>> _layers([4, 4]), _layers([4, 3, 0]), _layers([4])
    ('2 layers with 4 heads each', '3 layers with 0 to 4 heads', '1 layer with 4 heads')
    """
    if len(heads) == 1:
        return f"1 layer with {heads[0]} heads"
    if min(heads) == max(heads):
        return f"{len(heads)} layers with {heads[0]} heads each"
    return f"{len(heads)} layers with {min(heads)} to {max(heads)} heads"
