"""Models of `transformers` that every function of the lens takes, unconverted."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.bridge.example_inputs import example_inputs, explained
from manyheads.bridge.structure import (
    ReadoutFacts,
    Structure,
    find_structure,
    hidden_of_output,
    linear_weight,
)
from manyheads.bridge.watched_run import ResidualEntry, WatchedRun
from manyheads.bridge.wrapped_parts import Outside, WrappedReadout, WrappedStack
from manyheads.errors import (
    InputError,
    MissingPackageError,
    NativeModelError,
    WrappedModelWarning,
)
from manyheads.formatting import kind_of
from manyheads.models import decoder, embedding, seq2seq, vision
from manyheads.models.encoder import Encoder, EncoderConfig, TextConfig
from manyheads.models.model_interface import ModelInputs, ModelInterface
from manyheads.models.padding import BatchLayout, Output, to_ragged
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    Readout,
    ReadoutLayer,
    TokenHead,
)
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.positions import Learned, NoPosition
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Record, Tap, WatchContext, Watcher

# The axes of an input with its batch, by name.
AXES = {
    **dict.fromkeys(("input_ids", "attention_mask", "decoder_input_ids", "input_values"), 2),
    "input_features": 3,
    "pixel_values": 4,
}
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")


class WrappedModel(Outside, ModelInterface):
    """A model of `transformers` under the lens; see `wrap`."""

    native = False
    inner: Any
    config: Any
    readout: ReadoutLayer | None

    def __init__(self, inner: Any, structure: Structure, tokenizer: Any) -> None:
        nn.Module.__init__(self)
        self.inner, self.structure = inner, structure
        self.wrapped_stacks = nn.ModuleDict(
            {name: WrappedStack(facts) for name, facts in structure.stacks.items()}
        )
        usual = (name for name in ("main", "decoder", "text") if name in structure.stacks)
        self.readout_stack = next(usual, list(structure.stacks)[-1])
        self.tokenizer = tokenizer
        self.source_config = _source_config(inner)
        generation = getattr(inner, "generation_config", None)
        self.generation = {} if generation is None else generation.to_dict()
        self._accepts = set(signature(inner.forward).parameters)
        self.reads_token_ids = "input_ids" in self._accepts
        readout = _readout_config(structure.readout, inner, self.vocabulary)
        self.readout = (
            None
            if isinstance(readout, NoReadout) or structure.readout is None
            else WrappedReadout(structure.readout, readout)
        )
        self.config = self._describe(readout)
        # Under the names that native models have for them; they hold no weights.
        names = {"encoder": "encoder", "decoder": "decoder"}
        names = names if self.reads_pairs else {"stack": self.readout_stack}
        for attribute, name in names.items():
            if name in self.wrapped_stacks:
                setattr(self, attribute, self.wrapped_stacks[name])

    def _describe(self, readout: Readout) -> Any:
        raise NotImplementedError

    def _embedding(self, width: int) -> embedding.Embedding:
        longest = (self.source_config or {}).get("max_position_embeddings")
        learned = isinstance(longest, int) and any(
            isinstance(module, nn.Embedding) and ("position" in name or "wpe" in name)
            for name, module in self.inner.named_modules()
        )
        return embedding.Embedding(
            vocabulary=self.vocabulary,
            width=width,
            position=Learned(count=cast(int, longest)) if learned else NoPosition(),
        )

    def stacks(self) -> dict[str, Stack]:
        return cast("dict[str, Stack]", dict(self.wrapped_stacks.items()))

    @property
    def main_stack(self) -> WrappedStack:
        """The stack that the readout reads."""
        return cast(WrappedStack, self.wrapped_stacks[self.readout_stack])

    @property
    def vocabulary(self) -> int:
        try:
            weight = getattr(self.inner.get_input_embeddings(), "weight", None)
        except NotImplementedError:
            weight = None
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return int(weight.shape[0])
        config = getattr(self.inner.config, "text_config", self.inner.config)
        return int(getattr(config, "vocab_size", 1)) if self.reads_token_ids else 1

    @property
    def table(self) -> Float[Tensor, "v c"]:
        return cast(Tensor, self.inner.get_input_embeddings().weight)

    def read(self, inputs: ModelInputs) -> tuple[dict[str, Any], dict[str, Lengths]]:
        """The arguments of the model, and the lengths of its padded sequences by stack."""
        if inputs.examples:
            return self._batch(inputs.examples)
        if inputs.ids is None:
            return {"pixel_values": torch.stack(list(inputs.images))}, {}
        if not self.reads_token_ids:
            raise InputError(
                f"{type(self.inner).__name__} reads {self.inner.main_input_name}, not token ids",
                "pass for each example the dict of inputs that its processor gives",
            )
        lengths = {self.readout_stack: inputs.ids.lengths}
        if inputs.source is not None:
            lengths["encoder"] = inputs.source.lengths
        return self._padded(inputs.ids, inputs.source), lengths

    def run_inputs(
        self,
        inputs: ModelInputs,
        watch: Watcher | None = None,
        *,
        logits: bool = True,
        entry: ResidualEntry | None = None,
    ) -> Output:
        """Ragged hidden states and logits, from the residual stream of an `entry` if there is one.

        Without `logits` the readout may be left out.
        """
        arguments, lengths = self.read(inputs)
        if "use_cache" in self._accepts:
            arguments["use_cache"] = False
        running = self._running(watch, lengths, logits=logits, entry=entry)
        return self._output(running, running.run(self.inner, arguments))

    def run_hidden(self, inputs: ModelInputs, watch: Watcher) -> None:
        self.run_inputs(inputs, watch, logits=False)

    def call(self, arguments: Mapping[str, Any], watch: Watcher | None = None) -> Any:
        """The output of the `transformers` model on its own arguments, under a watcher."""
        accepted = {name: value for name, value in arguments.items() if name in self._accepts}
        if "use_cache" in self._accepts:
            accepted["use_cache"] = True
        return self._running(watch, {}, logits=True).run(self.inner, accepted)

    def _running(
        self,
        watch: Watcher | None,
        lengths: Mapping[str, Lengths],
        *,
        logits: bool,
        entry: ResidualEntry | None = None,
    ) -> WatchedRun:
        watcher = Record(()) if watch is None else watch
        return WatchedRun(self.structure, watcher, lengths, self.readout_stack, logits, entry)

    @contextmanager
    def watching(self, watch: Watcher, lengths: Mapping[str, Lengths]) -> Iterator[None]:
        """A watcher sees the forwards that somebody else runs inside the block."""
        with self._running(watch, lengths, logits=True).listen(self.inner):
            yield

    def _output(self, running: WatchedRun, output: Any) -> Output:
        if running.final is None:
            hidden = hidden_of_output(output)
            if hidden is None or hidden.dim() != 3:
                # What no single linear layer reads is taken where the layers end.
                hidden = running.after_layers
            if hidden is None:
                raise InputError(
                    f"{type(self.inner).__name__} returned no hidden states",
                    "wrap a model of one task, or its base model",
                )
            packed = running.packing(self.readout_stack, hidden).pack(hidden)
            return Output(WatchContext(running.watcher, self.readout_stack).at(Tap.FINAL, packed))
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 3:
            logits = running.packing(self.readout_stack, logits).pack(logits)
        return Output(running.final, logits)

    def _padded(self, ids: Ragged, source: Ragged | None) -> dict[str, Tensor]:
        """Padded ids and their masks, by the names that the model accepts."""
        fill = self._padding_id
        named = {"": ids} if source is None else {"": source, "decoder_": ids}
        arguments = {}
        for prefix, batch in named.items():
            arguments[f"{prefix}input_ids"] = batch.to_padded(fill=fill)
            ones = batch.with_values(torch.ones_like(batch.values))
            arguments[f"{prefix}attention_mask"] = ones.to_padded()
        return {name: tensor for name, tensor in arguments.items() if name in self._accepts}

    def read_examples(self, texts: Any) -> tuple[Mapping[str, Any], ...]:
        """Inputs by name, one dict per example; () if these are not such."""
        if isinstance(texts, Mapping):
            texts = [texts]
        if isinstance(texts, Ragged | Tensor | str) or not isinstance(texts, Sequence):
            return ()
        return tuple(texts) if texts and all(isinstance(text, Mapping) for text in texts) else ()

    def ids_of_examples(self, examples: Sequence[Mapping[str, Any]]) -> Ragged | None:
        """The token ids among the inputs, those of the decoder if there is one."""
        for name in ("decoder_input_ids", "input_ids"):
            if all(name in example for example in examples):
                device = next(self.parameters()).device
                rows = [torch.as_tensor(example[name]).flatten() for example in examples]
                return Ragged.from_list(rows).to(device)
        return None

    def _batch(
        self, examples: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Lengths]]:
        """Examples along the first axis, token ids padded, and the lengths of what was padded."""
        device, arguments = next(self.parameters()).device, {}
        lengths: dict[str, Lengths] = {}
        for name in examples[0]:
            rows = [torch.as_tensor(example[name]).to(device) for example in examples]
            rows = [row[None] if row.dim() == AXES.get(name, 0) - 1 else row for row in rows]
            if len({row.shape[1:] for row in rows}) > 1:
                if not all(row.shape[0] == 1 and row.dim() == 2 for row in rows):
                    shapes = " and ".join(sorted({str(tuple(row.shape)) for row in rows}))
                    raise InputError(
                        f"{name} of these examples has the shapes {shapes}",
                        "pass examples of equal shapes, or one at a time",
                    )
                ragged = Ragged.from_list([row[0] for row in rows])
                ids = name in ("input_ids", "decoder_input_ids")
                arguments[name] = ragged.to_padded(fill=self._padding_id if ids else 0)
                side = "encoder" if "decoder_input_ids" in examples[0] else self.readout_stack
                if ids:
                    lengths[side if name == "input_ids" else self.readout_stack] = ragged.lengths
                    mask = name.replace("input_ids", "attention_mask")
                    ones = ragged.with_values(torch.ones_like(ragged.values))
                    if mask in self._accepts:
                        arguments.setdefault(mask, ones.to_padded())
                continue
            arguments[name] = torch.cat(rows)
        return arguments, lengths

    @property
    def _padding_id(self) -> int:
        pad = getattr(self.inner.config, "pad_token_id", None)
        return pad if isinstance(pad, int) and 0 <= pad < self.vocabulary else 0


class WrappedText(WrappedModel):
    """What wrapped encoders and decoders share."""

    config_type: type[TextConfig]

    def _describe(self, readout: Readout) -> TextConfig:
        return self.config_type(
            embedding=self._embedding(self.main_stack.config.width),
            stack=self.main_stack.config,
            readout=readout,
        )

    def forward(
        self,
        ids: Any,
        mask: Tensor | None = None,
        *,
        types: Any = None,
        cache: Any = None,
        watch: Watcher | None = None,
    ) -> Output:
        if types is not None or cache is not None:
            raise NativeModelError("a forward with token types or a cache of ours")
        batch, layout = to_ragged(ids, mask)
        return _restored(self.run_inputs(ModelInputs(ids=batch), watch), layout)

    def hidden(
        self, ids: Ragged, types: Any = None, *, watch: Watcher | None = None
    ) -> tuple[Ragged, tuple[()]]:
        del types
        return _ragged(self.run_inputs(ModelInputs(ids=ids), watch, logits=False)), ()


class WrappedEncoder(WrappedText, Encoder):
    """A wrapped model whose tokens see each other, or one that reads something else than text."""

    config_type = EncoderConfig


class WrappedDecoder(WrappedText, decoder.Decoder):
    """A wrapped model that predicts the next token."""

    config_type = decoder.DecoderConfig


class WrappedSeq2Seq(WrappedModel, seq2seq.Seq2Seq):
    """A wrapped encoder-decoder."""

    def _describe(self, readout: Readout) -> seq2seq.Seq2SeqConfig:
        # The attentions of an encoder may not be seen, and its width may be another.
        width = self.main_stack.config.width
        encoder = StackConfig(width=width, layers=())
        if "encoder" in self.wrapped_stacks:
            config = cast(WrappedStack, self.wrapped_stacks["encoder"]).config
            encoder = config if config.width == width else encoder
        return seq2seq.Seq2SeqConfig(
            embedding=self._embedding(self.main_stack.config.width),
            encoder=encoder,
            decoder=self.main_stack.config,
            readout=readout,
        )

    def forward(  # type: ignore[override]
        self,
        source: Any,
        target: Any,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        watch: Watcher | None = None,
    ) -> Output:
        batch, layout = to_ragged(target, target_mask, "target ids")
        read = to_ragged(source, source_mask, "source ids")[0]
        return _restored(self.run_inputs(ModelInputs(ids=batch, source=read), watch), layout)

    def hidden(  # type: ignore[override]
        self, source: Ragged, target: Ragged, *, watch: Watcher | None = None
    ) -> tuple[Ragged, tuple[()]]:
        inputs = ModelInputs(ids=target, source=source)
        return _ragged(self.run_inputs(inputs, watch, logits=False)), ()


class WrappedVision(WrappedModel, vision.Vision):
    """A wrapped vision transformer, of square images and patches."""

    def _describe(self, readout: Readout) -> vision.VisionConfig:
        config = getattr(self.inner.config, "vision_config", self.inner.config)
        return vision.VisionConfig(
            patches=vision.Patches(
                width=self.main_stack.config.width,
                image=config.image_size,
                size=config.patch_size,
                channels=getattr(config, "num_channels", 3),
            ),
            stack=self.main_stack.config,
            readout=readout,
        )

    # The "embedding" that transformers names is the convolution of the patches.
    table = None  # type: ignore[assignment]

    def forward(self, images: Any, *, watch: Watcher | None = None) -> Output:
        return self.run_inputs(ModelInputs(images=tuple(images)), watch)


def _ragged(output: Output) -> Ragged:
    assert isinstance(output.hidden, Ragged), "a wrapped model runs on ragged batches"
    return output.hidden


def _restored(output: Output, layout: BatchLayout) -> Output:
    hidden = layout.restore(output.hidden)
    assert hidden is not None
    return Output(hidden, layout.restore(output.logits))


def wrap(model: Any, tokenizer: Any = None, *, example: Mapping[str, Any] | None = None) -> Any:
    """A `transformers` model as every function of the lens takes it, unconverted.

    One short forward finds its layers and heads: on random tokens, pixels or sounds, or on
    `example`, the inputs of one example by name, where the model needs more. The model is not
    changed: while it runs under a watcher, its attention is computed by our function. A model that
    does not compute it through the attention interface of `transformers` is read through
    `output_attentions=True`, which is slower; a `WrappedModelWarning` says what that costs, and
    what will not work.

    Texts need a `tokenizer`, of `transformers` (fast) or of `tokenizers`. A model that reads more
    than token ids or images takes each text as the dict that its processor gives.
    """
    # A model compiled by torch.compile holds the one that it was made of.
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, WrappedModel):
        return model
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise MissingPackageError("manyheads.wrap", "transformers") from None
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"{kind_of(model)} is not a model of transformers",
            "pass a PreTrainedModel, or build or load a model with manyheads",
        )
    inputs = example_inputs(model) if example is None else dict(example)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with explained(model, inputs, made_up=example is None):
            structure = find_structure(model, inputs)
    finally:
        for module in training:
            module.training = True
    kind = _kind(model, structure)
    wrapped = kind(model, structure, _plain_tokenizer(tokenizer))
    wrapped.training = model.training
    if structure.by_weights:
        attentions = [facts for stack in structure.stacks.values() for facts, _ in stack.attentions]
        heads, projected = (
            sum(facts.heads for facts in attentions),
            [f.projection for f in attentions],
        )
        less = "" if all(projected) else "; head outputs are not seen, so that no head is ablated"
        warnings.warn(
            f"{type(model).__name__} does not use the attention interface of transformers, so its "
            f"weights are read by output_attentions=True, which is slower and stores n x n weights "
            f"of all {heads} heads: {heads * 4:,} MiB for a text of 1,024 tokens, four times that "
            f"for one of twice the length. Weights, queries and keys cannot be changed{less}",
            WrappedModelWarning,
            stacklevel=2,
        )
    for name, stack in structure.stacks.items():
        if stack.unseen:
            warnings.warn(
                f"ablation, patching and whatever else resumes at a layer of the {name} stack of "
                f"{type(model).__name__} will not work, since {stack.unseen}; statistics, patterns "
                "and kinds do",
                WrappedModelWarning,
                stacklevel=2,
            )
    return wrapped


def _kind(model: Any, structure: Structure) -> type[WrappedModel]:
    stacks, names = structure.stacks, set(structure.stacks)
    if model.config.is_encoder_decoder and "decoder" in names:
        crosses = any(facts.cross for facts, _ in stacks["decoder"].attentions)
        return WrappedSeq2Seq if crosses else WrappedDecoder
    if model.main_input_name == "pixel_values" and len(stacks) == 1:
        config = getattr(model.config, "vision_config", model.config)
        sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
        if all(isinstance(size, int) for size in sizes) and sizes[0] % sizes[1] == 0:  # type: ignore[operator]
            return WrappedVision
    return WrappedDecoder if structure.causal else WrappedEncoder


def _readout_config(readout: ReadoutFacts | None, model: Any, vocabulary: int) -> Readout:
    if readout is None:
        return NoReadout()
    outputs, bias = linear_weight(readout.linear).shape[0], readout.linear.bias is not None
    if not readout.by_token:
        return ClassHead(classes=outputs, bias=bias)
    head = model.get_output_embeddings()
    if head is readout.linear or outputs == vocabulary:
        return LanguageHead(tied=False, bias=bias)
    return TokenHead(classes=outputs, bias=bias)


def _source_config(model: Any) -> dict[str, Any]:
    """Its config.json, with the number of positions under the usual name."""
    config = getattr(model.config, "text_config", model.config)
    config_json = model.config.to_dict()
    counts = [getattr(config, name, None) for name in POSITIONS]
    # XLNet says -1 for any number.
    longest = next((count for count in counts if isinstance(count, int) and count > 0), None)
    if longest is None:
        return config_json
    for module in model.modules():
        # RoBERTa counts positions from behind its padding token.
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            longest = table.num_embeddings - table.padding_idx - 1
    return {**config_json, "max_position_embeddings": longest}


def _plain_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None or hasattr(tokenizer, "encode_batch_fast"):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        raise InputError(
            f"{kind_of(tokenizer)} has no fast tokenizer behind it",
            "load it with AutoTokenizer.from_pretrained(..., use_fast=True)",
        )
    return backend
