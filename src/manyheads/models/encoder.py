"""Encoders of text, and what they share with decoders: embedding, stack and readout."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import ConfigError, InputError
from manyheads.models.embedding import Embedding, TokenEmbedding
from manyheads.models.initialization import Initialization, initialize
from manyheads.models.model_interface import ModelInputs, ModelInterface
from manyheads.models.padding import Output, to_ragged
from manyheads.models.readout import LanguageHead, NoReadout, Readout, make_readout
from manyheads.models.stack import KernelChoices, Stack, StackConfig
from manyheads.parts.halting import AddedLoss
from manyheads.parts.positions import Learned
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The config of a model of text: embedding, stack and readout."""

    embedding: Embedding
    stack: StackConfig
    readout: Readout = NoReadout()
    init: Initialization = Initialization()

    def __post_init__(self) -> None:
        check_embedding(self.embedding, self.stack)
        check_tied(self.embedding, self.readout, self.stack.output_width)


def check_tied(embedding: Embedding, readout: Readout, features: int) -> None:
    """Refuse a tied head whose features cannot be multiplied with the token vectors."""
    if not isinstance(readout, LanguageHead) or not readout.tied:
        return
    transform = readout.transform
    width = "same" if transform is None else transform.width
    width = features if width == "same" else width
    if width != embedding.size:
        raise ConfigError(
            f"a tied language head has features of width {width}, and the token vectors have "
            f"{embedding.size} channels",
            f"use ReadoutTransform(width={embedding.size}), or tied=False",
        )


def check_embedding(embedding: Embedding, stack: StackConfig) -> None:
    """Refuse an embedding that does not fit the layers above it."""
    if embedding.width != stack.width:
        raise ConfigError(
            f"the embedding has width {embedding.width}, and the stack {stack.width}",
            "give both the same width",
        )
    if not isinstance(embedding.position, Learned):
        return
    for index in range(len(stack.layers)):
        attention = stack.attention(index)
        if attention is None:
            continue
        reach = attention.mask.reach
        for side, far in (("back", reach.before), ("ahead", reach.after)):
            if embedding.position.longest <= far < float("inf"):
                raise ConfigError(
                    f"layer {index} looks {far} tokens {side}, and the model has only "
                    f"{embedding.position.longest} positions",
                    f"use a window shorter than {embedding.position.longest}, "
                    f"or Learned(count={int(far) + 1 + embedding.position.offset})",
                )


def last_tokens(batch: Ragged) -> Ragged:
    """The last token of every sequence, as sequences of length one."""
    lengths = batch.lengths
    if lengths.uniform and lengths.longest == 1:
        return batch
    if 0 in lengths.each:
        raise InputError("an empty sequence has no last token", "give each at least one")
    ends = lengths.offsets[1:].long() - 1
    return Ragged(batch.values[ends], Lengths.of([1] * len(lengths), batch.device))


class TextModel(ModelInterface):
    """Token ids in, hidden states and logits out, in the layout of the input.

    The same batch always gives the same bits, and the tokens of one sequence never change a bit of
    another, except with a mixture of experts, whose groups of tokens then have other sizes. There,
    and in another order of the batch, beside other lengths or alone, a sequence gives the same
    numbers up to rounding, in float32 within 1e-5 of the largest.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.embedding)
        self.stack = Stack(config.stack)
        vocabulary = config.embedding.vocabulary
        self.readout = make_readout(config.readout, config.stack.output_width, vocabulary)
        initialize(self, config.init)

    def forward(
        self,
        ids: Ragged | Tensor,
        mask: Tensor | None = None,
        *,
        types: Ragged | Tensor | None = None,
        watch: Watcher | None = None,
    ) -> Output:
        batch, layout = to_ragged(ids, mask)
        type_ids = None if types is None else to_ragged(types, mask, "types")[0]
        hidden, router = self.hidden(batch, type_ids, watch=watch)
        return layout.output(hidden, self._read(hidden), router)

    def hidden(
        self, ids: Ragged, types: Ragged | None = None, *, watch: Watcher | None = None
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        """The hidden states before the readout, for callers that score only some of them."""
        x = self.embedding(ids, ids.lengths.positions, types)
        return self.stack(x, watch=watch)

    def stacks(self) -> dict[str, Stack]:
        return {self.stack.name: self.stack}

    def run_inputs(self, inputs: ModelInputs, watch: Watcher | None = None) -> Output:
        assert inputs.ids is not None, "a model of text reads token ids"
        return self(inputs.ids, watch=watch)

    def run_hidden(self, inputs: ModelInputs, watch: Watcher) -> None:
        assert inputs.ids is not None, "a model of text reads token ids"
        self.hidden(inputs.ids, watch=watch)

    @property
    def table_layer(self) -> nn.Embedding:
        return self.embedding.tokens

    @property
    def table(self) -> Float[Tensor, "v c"]:
        """The token embedding, which a tied readout scores with."""
        return self.embedding.tokens.weight

    def explain_kernels(self, batch: Ragged | Tensor, mask: Tensor | None = None) -> KernelChoices:
        """Which kernel each layer would use for this batch, and why."""
        return self.stack.explain_kernels(to_ragged(batch, mask)[0].lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(TextConfig):
    """The config of an encoder such as BERT or ModernBERT."""

    def __post_init__(self) -> None:
        # super() without arguments fails in a class that slots=True makes anew.
        TextConfig.__post_init__(self)
        for index, layer in enumerate(self.stack.layers):
            if layer.mixer is not None and layer.mixer.inner.causal:
                raise ConfigError(
                    f"layer {index}, {type(layer.mixer.inner).__name__}, sees only earlier tokens, "
                    "and an encoder reads both ways",
                    "use a mixer with causal=False, or make it a decoder",
                )


class Encoder(TextModel):
    """A model that encodes text.

    >>> import torch
    >>> from manyheads.models.build import build
    >>> model = build("tiny-encoder", seed=0)
    >>> model(torch.tensor([[1, 2, 3]])).hidden.shape
    torch.Size([1, 3, 128])
    """
