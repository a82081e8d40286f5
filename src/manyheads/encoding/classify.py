"""Texts to classes, by a model with a head for them."""

import warnings
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.encode import Encoded, Options, read_pooled
from manyheads.encoding.reading import Texts, reads_texts
from manyheads.errors import CutWarning, InputError
from manyheads.models.build import Model
from manyheads.models.readout import ClassHead, ReadoutLayer, TokenHead
from manyheads.ragged import Ragged

__all__ = ["Classes", "classify", "classify_counted", "names_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """For each text the share of each class, which add up to one; `names` are of the classes."""

    shares: Float[Tensor, "b classes"]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The likeliest class of each text."""
        return tuple(self.names[int(place)] for place in self.shares.argmax(1))


def classify(
    model: Model,
    texts: Texts,
    *,
    batch_tokens: int | None = None,
    longest: int | None = None,
    progress: bool = True,
) -> Classes:
    """The class of each text, in the order of the texts; a string alone is a list of one.

    Texts are given, cut and batched as for `encode`.

    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.models.build import build
    >>> model = with_classes(build("council", seed=0), ("even", "odd"))
    >>> found = classify(model, [[5, 6, 7], [8]])
    >>> found.shares.shape, found.names
    (torch.Size([2, 2]), ('even', 'odd'))
    """
    options = Options(
        batch_tokens=batch_tokens, longest=longest, progress=progress, doing="classifying"
    )
    classes, done = classify_counted(model, texts, options)
    if done.cut:
        warnings.warn(done.told, CutWarning, stacklevel=2)
    return classes


def classify_counted(model: Model, texts: Texts, options: Options) -> tuple[Classes, Encoded]:
    """The classes of `classify` with the counts beside them, and no warning."""
    reader = reads_texts(model)
    head, readout = model.config.readout, getattr(reader, "readout", None)
    if not isinstance(head, ClassHead) or not isinstance(readout, ReadoutLayer):
        if isinstance(head, TokenHead):
            raise InputError("the model tells classes of tokens, not of texts", "use manyheads.tag")
        raise InputError(
            "the model tells no classes apart", "train one that does, with model.classes"
        )

    def pooled(read: Ragged) -> Tensor:
        logits = readout(read, None)
        assert isinstance(logits, Tensor)
        return logits.float().softmax(1)

    done = read_pooled(reader, texts, options, pooled, head.classes)
    empty = (done.vectors.sum(1) == 0).nonzero()
    if len(empty):
        raise InputError(f"text {int(empty[0])} has no token to tell a class by", "leave it out")
    return Classes(done.vectors, names_of(model, head)), done


def names_of(model: Model, head: ClassHead | TokenHead) -> tuple[str, ...]:
    """What the classes are called, or else their numbers."""
    return model.class_names or tuple(str(place) for place in range(head.classes))
