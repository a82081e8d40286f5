"""Gates for a trained model: added without changing its output, then trained."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.bridge.automatic import native_models_only, require_native
from manyheads.errors import ConfigError, InputError
from manyheads.formatting import kind_of
from manyheads.lens.inputs import cached_run, evaluation_inputs, metrics
from manyheads.lens.inputs.texts import batch_ranges, read_inputs
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import attention_at
from manyheads.models import decoder, encoder, readout, recipes
from manyheads.models.build import Model, build, eval_mode
from manyheads.models.layer import Branch
from manyheads.parts.gates import ACTIVATIONS, Gate
from manyheads.progress import Progress
from manyheads.surgery import rebuild
from manyheads.surgery.finetune import loop, trainable
from manyheads.taps import Site, Sublayer, Tap
from manyheads.tokenizers import surrogates_refused
from manyheads.train.optim import optimizers
from manyheads.train.tiling import input_parts

# silu is 1 here.
OPEN_SILU = 1.2784645427610738
# sigmoid is near zero here and can still be trained; adding a half would lose small numbers.
CLOSED_SIGMOID = -4.0
# Tokens per batch when scoring.
BATCH_TOKENS = 8192


@native_models_only
def add_gates(
    model: rebuild.AnyModel,
    gate: Gate,
    layers: tuple[int, ...] | Literal["all"] = "all",
    *,
    sublayer: Literal[Sublayer.ATTENTION, Sublayer.CROSS] = Sublayer.ATTENTION,
    stack: Literal["all", "main", "encoder", "decoder"] = "all",
) -> rebuild.AnyModel:
    """A copy of the model with a gate in these layers, and the same output.

    The gate's weights start at zero, so that it has the same value for every token, and the weights
    before it (for an output gate, after it) are scaled or shifted to undo that value: a sigmoid is
    a half, so they are doubled. Only a multiplied silu and an added sigmoid need biases, which are
    then added to the layer. A gate that reads itself cannot be undone in this way.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> gated = add_gates(model, Gate(at="output"), (1,))
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> torch.allclose(gated(ids).logits, model(ids).logits, atol=1e-6)
    True
    """
    rebuild.check_own_weights(model)
    chosen = _chosen(model, layers, sublayer, stack)
    config: Any = model.config
    for name in {name for name, _ in chosen}:
        held = getattr(config, rebuild.FIELDS[name])
        configs = list(held.layers)
        for index in [index for stack_name, index in chosen if stack_name == name]:
            branch: Branch[AttentionConfig] = getattr(configs[index], sublayer.value)
            inner = _gated(branch.inner, gate, index)
            configs[index] = replace(
                configs[index], **{sublayer.value: replace(branch, inner=inner)}
            )
        config = replace(config, **{rebuild.FIELDS[name]: replace(held, layers=tuple(configs))})
    fresh = build(cast(recipes.ModelConfig, config), device="meta")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, index in chosen:
        field = rebuild.FIELDS[name]
        if getattr(config, field).owners[index] != index:
            continue
        old, new = (attention_at(owner.stacks()[name], index, sublayer) for owner in (model, fresh))
        own = _weights(old, new, gate)
        state |= rebuild.prefixed(f"{field}.layers.{index}.{sublayer.value}", own)
    fresh.load_state_dict(state, assign=True)
    fresh.copy_provenance(model)
    return cast(rebuild.AnyModel, fresh.train(model.training))


def _chosen(
    model: Model, layers: tuple[int, ...] | Literal["all"], sublayer: Sublayer, stack: str
) -> list[tuple[str, int]]:
    """Stacks and layers that have this sublayer; raises if a named layer does not."""
    stacks = model.stacks()
    if stack != "all" and stack not in stacks:
        raise ConfigError(f"the model has no stack {stack!r}", f"use {', '.join(stacks)}")
    chosen = []
    for name, module in stacks.items():
        if stack not in ("all", name):
            continue
        having = [
            index
            for index, layer in enumerate(module.config.layers)
            if getattr(layer, sublayer.value) is not None
        ]
        indices = having if layers == "all" else layers
        # Only one of two stacks has cross-attention.
        for index in indices if having else ():
            if index not in having:
                raise ConfigError(
                    f"layer {index} of {name} has no {sublayer.value}",
                    f"use {', '.join(map(str, having))}",
                )
            chosen.append((name, index))
    layer_configs = [layer for module in stacks.values() for layer in module.config.layers]
    mixers = {type(layer.mixer.inner).__name__ for layer in layer_configs if layer.mixer}
    if not chosen and mixers and sublayer is Sublayer.ATTENTION:
        raise ConfigError(
            f"no layer has attention to gate: the layers mix tokens by {', '.join(sorted(mixers))}",
            "use a model with attention in some layers",
        )
    if not chosen:
        raise ConfigError(f"no layer has {sublayer.value}", "choose another sublayer or stack")
    return chosen


def _initial(gate: Gate) -> tuple[float, float]:
    """The logit that a gate starts with, and the value that it then has."""
    match gate.operation, gate.activation:
        case "multiply", "sigmoid":
            return 0.0, 0.5
        case "multiply", "raised_sigmoid":
            return 0.0, 0.75
        case "add", "silu":
            return 0.0, 0.0
        case "multiply", "silu":
            return OPEN_SILU, float(F.silu(torch.tensor(OPEN_SILU)))
        case _:
            value = ACTIVATIONS[gate.activation](torch.tensor(CLOSED_SIGMOID))
            return CLOSED_SIGMOID, float(value)


def _gated(config: AttentionConfig, gate: Gate, index: int) -> AttentionConfig:
    if any(existing.at == gate.at for existing in config.gates):
        raise ConfigError(
            f"layer {index} already has a gate at {gate.at!r}", "choose another position"
        )
    if gate.reads == "itself":
        raise ConfigError(
            "a gate that reads itself changes the output of a trained model",
            'use reads="input" or "nothing", or build a model with it and train that',
        )
    logit, value = _initial(gate)
    inputs, output = config.bias in ("inputs", "all"), config.bias in ("output", "all")
    adds = gate.operation == "add" and value != 0.0
    inputs |= logit != 0.0 and gate.reads == "input"
    inputs |= adds and gate.at in ("query", "key", "value")
    output |= adds and gate.at in ("output", "final")
    bias: Any = {(0, 0): "none", (1, 0): "inputs", (0, 1): "output", (1, 1): "all"}[inputs, output]
    return replace(config, gates=(*config.gates, gate), bias=bias)


@torch.no_grad()
def _weights(old: Attention, new: Attention, gate: Gate) -> dict[str, Tensor]:
    """The projections of the gated attention by name."""
    weights, biases = input_parts(old, "weight"), input_parts(old, "bias")
    (logit, value), output = _initial(gate), old.output.weight.clone()
    for name, count in new.config.rows().items():
        weights.setdefault(name, output.new_zeros(count, new.config.width))
        biases.setdefault(name, output.new_zeros(count))
    gate_logits = output.new_full((gate.rows(*new.config.gate_shape(gate.at)),), logit)
    biases[f"gate_{gate.at}"] = gate_logits
    bias: Tensor | None = old.output.bias
    output_bias = output.new_zeros(len(output)) if bias is None else bias.clone()
    match gate.operation, gate.at:
        case "multiply", "output":
            output = output / value
        case "multiply", "final":
            output, output_bias = output / value, output_bias / value
        case "multiply", name:
            weights[name], biases[name] = weights[name] / value, biases[name] / value
        case "add", "output":
            output_bias = output_bias - value * output.sum(1)
        case "add", "final":
            output_bias = output_bias - value
        case "add", name:
            biases[name] = biases[name] - value
    tensors = {"output.weight": output, "output.bias": output_bias}
    # Used where the gate is a parameter instead of rows of the projection.
    tensors[f"gate_{gate.at}"] = gate_logits
    for layer, _, names in new.input_layers:
        tensors[f"{layer}.weight"] = torch.cat([weights[name] for name in names])
        tensors[f"{layer}.bias"] = torch.cat([biases[name] for name in names])
    used = new.state_dict().keys()
    return {name: tensor for name, tensor in tensors.items() if name in used}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFigures:
    """The numbers that the gated-attention paper (arXiv 2505.06708) reports.

    The mean attention to the first token, the largest activation of the residual stream, and the
    perplexity, of masked tokens for an encoder.
    """

    first_token: float
    largest: float
    perplexity: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatedModel:
    """A model with trained gates, and its figures before and after."""

    model: Model
    gate: Gate
    trained: int
    texts: int
    before: GateFigures
    after: GateFigures

    def __str__(self) -> str:
        lines = [f"{'':26}{'before':>12}{'after':>12}"]
        for title, name, digits in (
            ("attention to first token", "first_token", ".4f"),
            ("largest activation", "largest", ".4g"),
            ("perplexity", "perplexity", ".3f"),
        ):
            figures = (getattr(side, name) for side in (self.before, self.after))
            lines.append(f"{title:26}" + "".join(f"{f'{n:{digits}}':>12}" for n in figures))
        lines.append(f"over {self.texts:,} held-out texts; {self.trained:,} parameters trained")
        return "\n".join(lines)


@native_models_only
def train_gates(
    model: Model,
    gate: Gate,
    texts: Sequence[Any],
    held_out: Sequence[Any],
    *,
    layers: tuple[int, ...] | Literal["all"] = "all",
    train: Literal["gates", "all"] = "gates",
    steps: int = 100,
    lr: float = 1e-3,
    batch_tokens: int = 2048,
    seed: int = 0,
    progress: bool = True,
) -> GatedModel:
    """A copy of the model with trained gates; both are measured on the held-out texts."""
    require_native(model, "a gate")
    if not isinstance(model, decoder.Decoder | encoder.Encoder) or not isinstance(
        model.config.readout, readout.LanguageHead
    ):
        raise InputError(
            f"gates cannot be trained on plain texts in {kind_of(model)} with "
            f"{type(model.config.readout).__name__}",
            "use surgery.add_gates, and train the model with another objective",
        )
    for name, number in (("steps", steps), ("batch_tokens", batch_tokens)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, got {number}", "use 1 or more")
    gated = add_gates(model, gate, layers)
    before = _figures(model, held_out, seed, progress)
    if train == "gates":
        trained = trainable.freeze_except_gates(gated)
    else:
        trained = sum(parameter.numel() for parameter in gated.parameters())
    model_inputs = read_inputs(gated, texts)
    loop.finetune(
        gated,
        model_inputs,
        loop.objective_for(gated, model_inputs, None),
        loop.RecoveryConfig(
            optimizer=optimizers.AdamW(lr=lr, decay=0.0), batch_tokens=batch_tokens
        ),
        steps=steps,
        seed=seed,
        progress=progress,
        label="training gates",
    )
    trainable.unfreeze_all(gated)
    return GatedModel(
        model=gated,
        gate=gate,
        trained=trained,
        texts=len(held_out),
        before=before,
        after=_figures(gated, held_out, seed, progress),
    )


def _figures(
    model: decoder.Decoder | encoder.Encoder, texts: Sequence[Any], seed: int, progress: bool
) -> GateFigures:
    """The perplexity is that of next tokens, or of tokens masked by the seed."""
    measured = statistics(model, texts, progress=progress)
    inputs = evaluation_inputs.prepare_inputs(model, texts, seed=seed)
    model_inputs, sizes = inputs.model_inputs, inputs.model_inputs.sizes(model)
    last, total, count = Site(-1, Tap.FINAL), 0.0, 0.0
    with (
        torch.no_grad(),
        eval_mode(model),
        Progress("scoring", total=sum(sizes), unit="tokens", enabled=progress) as bar,
    ):
        for batch in batch_ranges(sizes, BATCH_TOKENS):
            judged = metrics.bind_metric(model, model_inputs, batch, "loss", inputs.targets)
            activations = cached_run.ActivationEditor({}, [last])
            model.run_inputs(model_inputs.select(batch), activations)
            total += float((judged(activations[last])[0].double() * judged.weights).sum())
            count += float(judged.weights.sum())
            bar.advance(sum(sizes[text] for text in batch))
    return GateFigures(
        first_token=float(measured["first_token"].means.mean()),
        largest=max(activation.largest for activation in measured.activations),
        perplexity=math.exp(min(total / max(count, 1.0), 700.0)),
    )


def split_chunks(
    tokenizer: Any, texts: Iterable[str], length: int, max_chunks: int, held_out: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Up to `max_chunks` chunks of the texts for training, and a held-out fraction of them.

    Every n-th chunk is held out, so that both parts cover the whole file.
    """
    if tokenizer is None:
        raise InputError("the model has no tokenizer", "use a folder with a tokenizer.json")
    if not 0 < held_out <= 0.5:
        raise InputError(
            f"held_out must be in (0, 0.5], got {held_out:g}", "use a fraction such as 0.1"
        )
    if length < 2:
        raise InputError(f"length must be at least 2, got {length}", "use 2 or more")

    def cut() -> Iterable[list[int]]:
        for text in texts:
            with surrogates_refused([text]):
                ids = tokenizer.encode(text).ids
            for start in range(0, len(ids), length):
                if len(chunk := ids[start : start + length]) > 1:
                    yield chunk

    chunks = list(islice(cut(), max_chunks))
    every = max(2, round(1 / held_out))
    training = [chunk for index, chunk in enumerate(chunks) if index % every]
    held = chunks[::every]
    if not training:
        raise InputError(
            f"the text has only {len(chunks)} chunks of {length} tokens", "give a longer text"
        )
    return training, held
