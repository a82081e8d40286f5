"""What every model has, whatever it reads, and one batch of inputs of any model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.models import padding, provenance, stack
from manyheads.models.readout import ClassHead, LanguageHead, ReadoutLayer, TokenHead
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher

# The next token, the token at a position, a class per token, or one class.
PredictedOutput = Literal["next token", "masked token", "token classes", "classes", "none"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModelInputs:
    """The inputs of a model: `ids`, with their `source` for a `Seq2Seq`, or `images`.

    `examples` are all inputs by name of a wrapped model that reads something else, one at a time.
    """

    ids: Ragged | None = None
    source: Ragged | None = None
    images: tuple[Tensor, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()

    def __len__(self) -> int:
        if self.examples:
            return len(self.examples)
        return len(self.images) if self.ids is None else len(self.ids)

    def sizes(self, model: "ModelInterface") -> list[int]:
        """The number of tokens of each text or patches of each image, source included."""
        if self.ids is not None:
            source = [0] * len(self) if self.source is None else self.source.lengths.each
            return [ids + more for ids, more in zip(self.ids.lengths.each, source, strict=True)]
        if self.examples:
            return [1] * len(self)
        return [model.image_tokens(image) for image in self.images]

    def lengths(self, model: "ModelInterface") -> Lengths:
        """The lengths of the sequences that the readout sees."""
        if self.ids is not None:
            return self.ids.lengths
        return Lengths.of(self.sizes(model), self.images[0].device)

    def select(self, texts: Sequence[int]) -> "ModelInputs":
        return ModelInputs(
            ids=None if self.ids is None else self.ids.select(texts),
            source=None if self.source is None else self.source.select(texts),
            images=tuple(self.images[text] for text in texts) if self.images else (),
            examples=tuple(self.examples[text] for text in texts) if self.examples else (),
        )

    def repeat(self, copies: int) -> "ModelInputs":
        """The inputs, `copies` times one after another."""
        return ModelInputs(
            ids=None if self.ids is None else repeat_batch(self.ids, copies),
            source=None if self.source is None else repeat_batch(self.source, copies),
            images=self.images * copies,
            examples=self.examples * copies,
        )


def repeat_batch(x: Ragged, copies: int) -> Ragged:
    """The batch, repeated `copies` times."""
    if copies == 1:
        return x
    values = x.values.repeat(copies, *[1] * (x.values.dim() - 1))
    return Ragged(values, Lengths.of(x.lengths.each * copies, x.device))


class ModelInterface(nn.Module, provenance.Provenance):
    """What every model has, so that a caller need not know its class.

    `native` is whether manyheads computes the model itself. `reads_images` and `reads_pairs` say
    what one input is: an image, or a (source, target) pair of texts; otherwise it is one text.
    `generates` is whether it has a decoder, and `readout_stack` names the stack of the readout.
    """

    native: bool = True
    reads_token_ids: bool = True
    reads_images: bool = False
    reads_pairs: bool = False
    generates: bool = False
    readout_stack: str = "main"
    readout: ReadoutLayer | None

    def stacks(self) -> dict[str, stack.Stack]:
        """The stacks by name: "main", or "encoder" and "decoder"."""
        raise NotImplementedError

    @property
    def table_layer(self) -> nn.Embedding | None:
        """The layer of the token embedding; None for a model of images."""
        return None

    @property
    def table(self) -> Float[Tensor, "v c"] | None:
        """The token embedding, which a tied readout scores with; None for a model of images."""
        return None

    @property
    def predicts_next_token(self) -> bool:
        """Whether its logits are those of the next token."""
        return self.predicted_output == "next token"

    @property
    def predicted_output(self) -> PredictedOutput:
        """What its readout gives probabilities to."""
        match None if self.readout is None else self.readout.config:
            case LanguageHead():
                return "next token" if self.generates else "masked token"
            case TokenHead():
                return "token classes"
            case ClassHead():
                return "classes"
            case _:
                return "none"

    def run_inputs(self, inputs: ModelInputs, watch: Watcher | None = None) -> padding.Output:
        """The output of the model for a batch of any inputs."""
        raise NotImplementedError

    def run_hidden(self, inputs: ModelInputs, watch: Watcher) -> None:
        """Run the model for a watcher alone, without the readout where it can be left out."""
        self.run_inputs(inputs, watch)

    def _read(self, hidden: Ragged) -> Ragged | Tensor | None:
        if self.readout is None:
            return None
        # A table of integers would be unpacked for nothing.
        table = self.table if self.readout.product is None else None
        return self.readout(hidden, table)

    def image_tokens(self, image: Tensor) -> int:
        """The number of tokens that the model makes of an image."""
        raise NotImplementedError
