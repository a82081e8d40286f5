"""Encoder-decoder models: the decoder attends to the output of the encoder."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.cache import Cache, DynamicCache, StaticCache
from manyheads.errors import ConfigError, InputError
from manyheads.models.decoder import check_decodes
from manyheads.models.embedding import Embedding, TokenEmbedding
from manyheads.models.encoder import check_embedding, last_tokens
from manyheads.models.initialization import Initialization, initialize
from manyheads.models.model_interface import ModelInputs, ModelInterface
from manyheads.models.padding import Output, to_ragged
from manyheads.models.readout import LanguageHead, Readout, make_readout
from manyheads.models.stack import KernelChoices, Stack, StackConfig
from manyheads.parts.halting import AddedLoss
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer, Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig:
    """The config of an encoder-decoder; both sides share one embedding table if `shared`."""

    embedding: Embedding
    encoder: StackConfig
    decoder: StackConfig
    shared: bool = True
    readout: Readout = LanguageHead()
    init: Initialization = Initialization()

    def __post_init__(self) -> None:
        for stack in (self.encoder, self.decoder):
            check_embedding(self.embedding, stack)
        if not any(Sublayer.CROSS in layer.branches for layer in self.decoder.layers):
            remedy = "give one a cross-attention branch"
            raise ConfigError("no decoder layer attends to the encoder", remedy)


class Seq2Seq(ModelInterface):
    """A model that reads one text and generates another.

    Its sites name their stack, "encoder" or "decoder".
    """

    reads_pairs = generates = True
    readout_stack = "decoder"

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.embedding)
        self.target_embedding = None if config.shared else TokenEmbedding(config.embedding)
        self.encoder = Stack(config.encoder, name="encoder")
        self.decoder = Stack(config.decoder, name="decoder")
        vocabulary = config.embedding.vocabulary
        self.readout = make_readout(config.readout, config.decoder.width, vocabulary)
        initialize(self, config.init)

    def forward(
        self,
        source: Ragged | Tensor | None,
        target: Ragged | Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        watch: Watcher | None = None,
    ) -> Output:
        """`hidden` and `logits` are the decoder's; with a filled cache the source may be None."""
        filled = cache is not None and bool(cache.seen)
        if source is None and not filled:
            raise InputError("there is no source to attend to", "give a source for the first step")
        if source is not None and filled:
            raise InputError("the cache already holds a source", "pass source=None, or a new cache")
        batch, layout = to_ragged(target, target_mask, "target ids")
        read = None if source is None else to_ragged(source, source_mask, "source ids")[0]
        hidden, router = self.hidden(read, batch, cache=cache, watch=watch)
        return layout.output(hidden, self._read(hidden), router)

    def hidden(
        self,
        source: Ragged | None,
        target: Ragged,
        *,
        cache: Cache | None = None,
        watch: Watcher | None = None,
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        """The decoder's hidden states before the readout.

        The router losses are those of both stacks, the encoder's first.
        """
        memory, read = (None, ()) if source is None else self._encode(source, watch)
        hidden, written = self._decode(target, memory, cache, watch)
        return hidden, (*read, *written)

    def next_logits(
        self, source: Ragged | None, target: Ragged, cache: Cache
    ) -> Float[Tensor, "b v"]:
        """The logits of the token after each target; no other position is scored.

        The target ids are not checked, which would wait for the device at every step.
        """
        memory = None if source is None else self.encode(source)
        hidden, _ = self._decode(target, memory, cache, None, checked=False)
        read = self._read(last_tokens(hidden))
        assert isinstance(read, Ragged), "callers check that there is a language head"
        return read.values

    def encode(
        self, source: Ragged | Tensor, mask: Tensor | None = None, *, watch: Watcher | None = None
    ) -> Ragged:
        """The output of the encoder."""
        return self._encode(to_ragged(source, mask, "source ids")[0], watch)[0]

    def stacks(self) -> dict[str, Stack]:
        return {"encoder": self.encoder, "decoder": self.decoder}

    def run_inputs(self, inputs: ModelInputs, watch: Watcher | None = None) -> Output:
        return self(inputs.source, inputs.ids, watch=watch)

    def run_hidden(self, inputs: ModelInputs, watch: Watcher) -> None:
        assert inputs.ids is not None, "the target of a Seq2Seq is token ids"
        self.hidden(inputs.source, inputs.ids, watch=watch)

    @property
    def table_layer(self) -> nn.Embedding:
        return self._target_side().tokens

    @property
    def table(self) -> Float[Tensor, "v c"]:
        """The target embedding, which a tied readout scores with."""
        return self._target_side().tokens.weight

    def new_cache(self, config: DynamicCache | StaticCache = DynamicCache()) -> Cache:
        check_decodes(self.config.decoder)
        return self.decoder.new_cache(config)

    def explain_kernels(
        self,
        source: Ragged | Tensor,
        target: Ragged | Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> KernelChoices:
        """Which kernel each layer would use for this batch, and why."""
        reads = to_ragged(source, source_mask)[0].lengths
        writes = to_ragged(target, target_mask)[0].lengths
        encoder = self.encoder.explain_kernels(reads)
        return KernelChoices(encoder.choices + self.decoder.explain_kernels(writes, reads).choices)

    def _encode(
        self, source: Ragged, watch: Watcher | None
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        return self.encoder(self.embedding(source, source.lengths.positions), watch=watch)

    def _decode(
        self,
        batch: Ragged,
        memory: Ragged | None,
        cache: Cache | None,
        watch: Watcher | None,
        *,
        checked: bool = True,
    ) -> tuple[Ragged, tuple[AddedLoss, ...]]:
        plan = None if cache is None else cache.plan(batch.lengths)
        positions = batch.lengths.positions if plan is None else plan.positions
        side = self._target_side()
        x = (side if checked else side.embed)(batch, positions)
        hidden, router = self.decoder(
            x, positions=positions, memory=memory, cache=cache, plan=plan, watch=watch
        )
        if cache is not None and plan is not None:
            cache.finish(plan)
        return hidden, router

    def _target_side(self) -> TokenEmbedding:
        return self.embedding if self.target_embedding is None else self.target_embedding
