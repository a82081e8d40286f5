"""ONNX files of encoders: a dense graph with dynamic batch and length, for other runtimes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.attention import Attention
from manyheads.errors import InputError, MissingPackageError
from manyheads.formatting import kind_of
from manyheads.models.build import Model
from manyheads.models.encoder import Encoder
from manyheads.models.layer import Layer, Residual
from manyheads.models.provenance import SentenceConfig
from manyheads.models.readout import ClassHead, LanguageHead, ReadoutLayer, TransformLayer
from manyheads.parts import feedforward, masks
from manyheads.parts.norms import ChannelScale, LayerNorm, NoNorm, Normalize, PostNorm
from manyheads.parts.positions import Learned, NoPosition, Rotary
from manyheads.parts.positions.rotary import NoScaling

WeightFormat = Literal["float32", "float16", "int8"]
OPSET = 17
# A protobuf file cannot be larger.
LARGEST = 2**31 - 1
# Scores of keys that a query does not see.
HIDDEN_SCORE = -1e30
# Lengths on which a file is compared with its model, in one padded batch.
CHECKED = (7, 3, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """A file that was written: its outputs, its size, and the largest difference from the model.

    The difference is that of the outputs under onnxruntime from the model's own; None where
    onnxruntime is not installed.
    """

    path: Path
    outputs: tuple[str, ...]
    bytes: int
    difference: float | None

    def __str__(self) -> str:
        size = f"{self.bytes / 2**20:.1f} MiB"
        checked = "not checked, onnxruntime is not installed"
        if self.difference is not None:
            checked = f"differs from the model by at most {self.difference:.1e} under onnxruntime"
        return f"{self.path}: {size}, outputs {', '.join(self.outputs)}; {checked}"


def save_onnx(model: Model, path: str | Path, weights: WeightFormat = "float32") -> OnnxFile:
    """Write an encoder as an ONNX file, and compare the two.

    Inputs are `input_ids` and `attention_mask` (batch, length), and `token_type_ids` where the
    model has types; any batch and length. Outputs are `last_hidden_state`, `sentence_embedding`
    for a model of sentence-transformers, and `logits` for one with a head. `weights` in float16 or
    int8 (one scale per row) make the file two or four times smaller; the arithmetic is float32.
    """
    target = Path(path)
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("an ONNX file", "onnx") from None
    encoder = _checked_encoder(model)
    check_writable(target)
    graph = _Graph(weights)
    outputs = _EncoderGraph(graph, encoder).build()
    onnx_model = graph.model(outputs, types=encoder.config.embedding.types > 0)
    size = onnx_model.ByteSize()
    if size > LARGEST:
        raise InputError(
            f"the file would have {size / 2**30:.1f} GiB, and ONNX files end at 2 GiB",
            "use float16 or int8 weights",
        )
    onnx.checker.check_model(onnx_model)
    with atomic_write(target) as temporary:
        temporary.write_bytes(onnx_model.SerializeToString())
    return OnnxFile(
        path=target,
        outputs=tuple(outputs),
        bytes=target.stat().st_size,
        difference=_difference(encoder, target),
    )


def _checked_encoder(model: Model) -> Encoder:
    """The model, if a dense graph can be made of it."""
    if not model.native or not isinstance(model, Encoder):
        kind = "a wrapped model" if not model.native else kind_of(model)
        raise InputError(
            f"{kind} cannot be written as ONNX, only encoders that manyheads opens itself",
            "write a folder instead, or choose an encoder such as BERT, ModernBERT or MiniLM",
        )
    if not isinstance(model.config.embedding.position, Learned | NoPosition):
        _refuse(type(model.config.embedding.position).__name__)
    if model.config.embedding.projected:
        _refuse("a projected embedding")
    if model.config.stack.halting is not None:
        _refuse("halting")
    for index, layer in enumerate(model.stack.layers):
        reason = _why_not(cast(Layer, layer))
        if reason is not None:
            _refuse(f"{reason} in layer {index}")
    return model


def _refuse(what: str) -> None:
    raise InputError(
        f"{what} is not supported in ONNX files", "write a folder instead: leave out .onnx"
    )


def _why_not(layer: Layer) -> str | None:
    if layer.parallel:
        return "a parallel feed-forward"
    if layer.convolution is not None:
        return "a convolution"
    if layer.feedforward is not None and not isinstance(layer.feedforward, feedforward.FeedForward):
        return "a mixture of experts"
    if layer.mixer is not None:
        return type(layer.mixer.config).__name__
    if layer.attention is None:
        return None
    config = layer.attention.config
    rotary = config.position
    names = {
        "a gate": bool(config.gates),
        "a norm of queries or keys": not isinstance(config.query_norm, NoNorm)
        or not isinstance(config.key_norm, NoNorm),
        "a norm of head outputs": not isinstance(config.output_norm, NoNorm),
        "a cap on scores": config.score_cap is not None,
        "a learned sink": config.sink != "none",
        "a scale per head": config.head_scale != "none",
        type(config.mask).__name__: not isinstance(config.mask, masks.Full | masks.Window),
        type(rotary).__name__: not isinstance(rotary, Rotary | NoPosition),
        "rotary scaling": isinstance(rotary, Rotary) and not isinstance(rotary.scaling, NoScaling),
    }
    return next((name for name, has in names.items() if has), None)


class _Graph:
    """Nodes and weights of a graph; every method adds nodes and returns the name of the result."""

    def __init__(self, weights: WeightFormat) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._tables: dict[int, tuple[str, str | None]] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        from onnx import helper

        names = [f"Split_{len(self.nodes)}_{index}" for index in range(len(sizes))]
        inputs = [x, self.constant(np.array(sizes, dtype=np.int64))]
        self.nodes.append(helper.make_node("Split", inputs, names, name=names[0], axis=-1))
        return names

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        key = str(array.dtype), array.tobytes(), array.shape
        if key not in self._constants:
            self._constants[key] = self._initializer(array)
        return self._constants[key]

    def _initializer(self, array: Any) -> str:
        from onnx import numpy_helper

        name = f"w{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def linear(self, x: str, weight: Tensor, bias: Tensor | None) -> str:
        """x W' + b, with the weight as it is stored."""
        product = self.op("MatMul", x, self._matrix(_array(weight).T))
        return product if bias is None else self.op("Add", product, self.constant(_array(bias)))

    def _matrix(self, array: Any) -> str:
        if self.weights == "float32":
            return self.constant(array)
        if self.weights == "float16":
            return self._float(self.constant(_half(array)))
        stored, scale = _quantized(array, axis=0)
        zero = self.constant(np.zeros(len(scale), dtype=np.int8))
        return self.op(
            "DequantizeLinear", self.constant(stored), self.constant(scale), zero, axis=1
        )

    def rows(self, table: Tensor, ids: str) -> str:
        """Rows of a table, which stays small until they are taken."""
        if id(table) not in self._tables:
            array = _array(table)
            if self.weights == "int8":
                stored, scale = _quantized(array, axis=1)
                self._tables[id(table)] = self._initializer(stored), self._initializer(scale)
            else:
                half = self.weights == "float16"
                self._tables[id(table)] = self._initializer(_half(array) if half else array), None
        stored, scales = self._tables[id(table)]
        rows = self.op("Gather", stored, ids)
        rows = rows if self.weights == "float32" else self._float(rows)
        if scales is None:
            return rows
        return self.op(
            "Mul", rows, self.op("Unsqueeze", self.op("Gather", scales, ids), self.axes(-1))
        )

    def tied(self, x: str, table: Tensor, bias: Tensor | None) -> str:
        """x W' + b with the table that `rows` has stored."""
        stored, scales = self._tables[id(table)]
        whole = stored if self.weights == "float32" else self._float(stored)
        if scales is not None:
            whole = self.op("Mul", whole, self.op("Unsqueeze", scales, self.axes(-1)))
        product = self.op("MatMul", x, self.op("Transpose", whole, perm=[1, 0]))
        return product if bias is None else self.op("Add", product, self.constant(_array(bias)))

    def axes(self, *axes: int) -> str:
        return self.constant(np.array(axes, dtype=np.int64))

    def _float(self, x: str) -> str:
        return self.op("Cast", x, to=1)

    def norm(self, module: nn.Module, x: str) -> str:
        if isinstance(module, nn.Identity):
            return x
        if isinstance(module, ChannelScale):
            return self.op("Mul", x, self.constant(_array(module.weight)))
        assert isinstance(module, Normalize), "norms are LayerNorm or RMSNorm"
        config = module.config
        weight = _array(module.weight) + (1 if config.centered else 0)
        bias = np.zeros_like(weight) if module.bias is None else _array(module.bias)
        if isinstance(config, LayerNorm):
            names = self.constant(weight), self.constant(bias)
            return self.op("LayerNormalization", x, *names, axis=-1, epsilon=config.eps)
        squares = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", squares, self.constant(np.float32(config.eps))))
        scaled = self.op("Mul", self.op("Div", x, root), self.constant(weight))
        return self.op("Add", scaled, self.constant(bias))

    def activation(self, name: str, x: str) -> str:
        match name:
            case "relu" | "tanh":
                return self.op(name.capitalize(), x)
            case "silu":
                return self.op("Mul", x, self.op("Sigmoid", x))
            case "quick_gelu":
                steeper = self.op("Mul", x, self.constant(np.float32(1.702)))
                return self.op("Mul", x, self.op("Sigmoid", steeper))
            case "gelu":
                inner = self.op("Erf", self.op("Div", x, self.constant(np.float32(math.sqrt(2)))))
            case _:
                cubed = self.op("Mul", self.op("Mul", x, x), x)
                cubed = self.op("Mul", cubed, self.constant(np.float32(0.044715)))
                root = self.constant(np.float32(math.sqrt(2 / math.pi)))
                inner = self.op("Tanh", self.op("Mul", self.op("Add", x, cubed), root))
        half = self.op("Mul", x, self.constant(np.float32(0.5)))
        return self.op("Mul", half, self.op("Add", inner, self.constant(np.float32(1))))

    def model(self, outputs: dict[str, tuple[str, list[str]]], *, types: bool) -> Any:
        """The finished model; outputs by name are a result and the names of its axes."""
        from onnx import TensorProto, helper

        names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
            for name in names
        ]
        results = []
        for name, (result, axes) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [result], [name], name=name))
            sizes = [int(axis) if axis.isdigit() else axis for axis in axes]
            results.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
        graph = helper.make_graph(self.nodes, "encoder", inputs, results, self.initializers)
        opset = [helper.make_opsetid("", OPSET)]
        # The version of the file format that belongs to this opset, so that older runtimes read it.
        return helper.make_model(
            graph, opset_imports=opset, ir_version=8, producer_name="manyheads"
        )


class _EncoderGraph:
    """Walks through an encoder and adds its parts to a graph."""

    def __init__(self, graph: _Graph, model: Encoder) -> None:
        self.graph, self.model = graph, model
        self._rotations: dict[tuple[Rotary, int], tuple[str, str]] = {}
        self._biases: dict[tuple[int, int] | None, str] = {}

    def build(self) -> dict[str, tuple[str, list[str]]]:
        g, model = self.graph, self.model
        self.mask = g.op("Cast", "attention_mask", to=1)
        counted = g.op("CumSum", "attention_mask", g.constant(np.int64(1)))
        first = g.op("Sub", counted, g.constant(np.int64(1)))
        # Padding in front of a text counts as its first token, which nobody sees.
        self.positions = g.op("Max", first, g.constant(np.int64(0)))
        x = self._embed()
        for layer in model.stack.layers:
            x = self._layer(cast(Layer, layer), x)
        x = g.norm(model.stack.final_norm, x)
        width = str(model.config.stack.width)
        outputs = {"last_hidden_state": (x, ["batch", "length", width])}
        if model.sentence is not None:
            size = str(model.sentence.width(int(width)))
            outputs["sentence_embedding"] = self._sentence(x, model.sentence), ["batch", size]
        if model.readout is not None:
            outputs["logits"] = self._logits(x, model.readout)
        return outputs

    def _embed(self) -> str:
        g, embedding = self.graph, self.model.embedding
        x = g.rows(embedding.tokens.weight, "input_ids")
        if embedding.config.scale != 1.0:
            x = g.op("Mul", x, g.constant(np.float32(embedding.config.scale)))
        if isinstance(embedding.config.position, Learned):
            assert embedding.positions is not None
            offset = g.constant(np.int64(embedding.config.position.offset))
            at = g.op("Add", self.positions, offset)
            x = g.op("Add", x, g.rows(embedding.positions.weight, at))
        if embedding.types is not None:
            x = g.op("Add", x, g.rows(embedding.types.weight, "token_type_ids"))
        return g.norm(embedding.norm, x)

    def _layer(self, layer: Layer, x: str) -> str:
        g = self.graph
        if layer.attention is not None:
            residual = layer.attention_residual
            written = self._attention(layer.attention, self._read(residual, x))
            x = self._write(residual, x, written)
        elif layer.attention_rest is not None:
            vector = g.constant(_array(layer.attention_rest.vector))
            x = self._write(layer.attention_residual, x, vector)
        if layer.feedforward is not None:
            assert isinstance(layer.feedforward, feedforward.FeedForward)
            read_x = self._read(layer.feedforward_residual, x)
            x = self._write(
                layer.feedforward_residual, x, self._feedforward(layer.feedforward, read_x)
            )
        return x

    def _read(self, residual: Residual, x: str) -> str:
        return x if isinstance(residual.placement, PostNorm) else self.graph.norm(residual.norm, x)

    def _write(self, residual: Residual, x: str, written: str) -> str:
        if residual.second_norm is not None:
            written = self.graph.norm(residual.second_norm, written)
        summed = self.graph.op("Add", x, written)
        return (
            self.graph.norm(residual.norm, summed)
            if isinstance(residual.placement, PostNorm)
            else summed
        )

    def _feedforward(self, module: feedforward.FeedForward, x: str) -> str:
        g, hidden = self.graph, module.config.hidden
        x = g.linear(x, module.expand.weight, module.expand.bias)
        if module.gated:
            gate, passed = g.split(x, [hidden, hidden])
            x = g.op("Mul", g.activation(module.config.activation, gate), passed)
        else:
            x = g.activation(module.config.activation, x)
        return g.linear(x, module.contract.weight, module.contract.bias)

    def _attention(self, module: Attention, x: str) -> str:
        g, config = self.graph, module.config
        joined = g.linear(x, module.project.weight, module.project.bias)
        parts = g.split(joined, list(module.our_rows.values()))
        heads = (config.heads, config.key_heads, config.key_heads)
        query, key, value = (
            self._heads(part, count, config.size) for part, count in zip(parts, heads, strict=True)
        )
        if isinstance(config.position, Rotary):
            query, key = (self._rotated(x, config.position, config.size) for x in (query, key))
        if config.key_heads < config.heads:
            owners = g.constant(np.array(config.owners, dtype=np.int64))
            key, value = (g.op("Gather", x, owners, axis=1) for x in (key, value))
        scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = g.op("Mul", scores, g.constant(np.float32(config.score_scale)))
        weights = g.op("Softmax", g.op("Add", scores, self._visible(module)), axis=-1)
        mixed = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        flat = g.op("Reshape", mixed, g.axes(0, 0, config.heads * config.size))
        return g.linear(flat, module.output.weight, module.output.bias)

    def _heads(self, x: str, heads: int, size: int) -> str:
        cut = self.graph.op("Reshape", x, self.graph.axes(0, 0, heads, size))
        return self.graph.op("Transpose", cut, perm=[0, 2, 1, 3])

    def _rotated(self, x: str, rotary: Rotary, size: int) -> str:
        g = self.graph
        if (rotary, size) not in self._rotations:
            frequencies = g.constant(rotary.frequencies(size).numpy().astype(np.float32))
            places = g.op("Unsqueeze", g.op("Cast", self.positions, to=1), g.axes(1, 3))
            angles = g.op("Mul", places, frequencies)
            self._rotations[rotary, size] = g.op("Cos", angles), g.op("Sin", angles)
        cos, sin = self._rotations[rotary, size]
        channels = rotary.rotated_channels(size)
        sizes = [channels // 2, channels // 2, *([size - channels] if size > channels else [])]
        first, second, *rest = g.split(x, sizes)
        turned_first = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
        turned_second = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
        return g.op("Concat", turned_first, turned_second, *rest, axis=-1)

    def _visible(self, module: Attention) -> str:
        """0 where a query sees a key, and a very small number elsewhere."""
        g, mask = self.graph, module.config.mask
        band = (mask.before, mask.after) if isinstance(mask, masks.Window) else None
        if band not in self._biases:
            visible = g.op("Unsqueeze", self.mask, g.axes(1, 2))
            if band is not None:
                queries = g.op("Unsqueeze", self.positions, g.axes(1, 3))
                keys = g.op("Unsqueeze", self.positions, g.axes(1, 2))
                back = g.op("Sub", queries, keys)
                near = g.op("LessOrEqual", back, g.constant(np.int64(band[0])))
                ahead = g.op("LessOrEqual", g.op("Neg", back), g.constant(np.int64(band[1])))
                within = g.op("Cast", g.op("And", near, ahead), to=1)
                visible = g.op("Mul", visible, within)
            hidden = g.op("Sub", g.constant(np.float32(1)), visible)
            self._biases[band] = g.op("Mul", hidden, g.constant(np.float32(HIDDEN_SCORE)))
        return self._biases[band]

    def _pooled(self, x: str, pooling: str, skip: int = 0) -> str:
        g = self.graph
        weights = self.mask
        if pooling in ("cls", "first", "last"):
            last = g.op("ReduceMax", self.positions, axes=[1], keepdims=1)
            place = last if pooling == "last" else g.constant(np.int64(0))
            chosen = g.op("Cast", g.op("Equal", self.positions, place), to=1)
            weights = g.op("Mul", weights, chosen)
        elif skip:
            later = g.op("GreaterOrEqual", self.positions, g.constant(np.int64(skip)))
            weights = g.op("Mul", weights, g.op("Cast", later, to=1))
        summed = g.op("MatMul", g.op("Unsqueeze", weights, g.axes(1)), x)
        total = g.op("ReduceSum", weights, g.axes(1), keepdims=1)
        total = g.op("Max", total, g.constant(np.float32(1)))
        return g.op("Div", g.op("Squeeze", summed, g.axes(1)), total)

    def _sentence(self, x: str, sentence: SentenceConfig) -> str:
        g = self.graph
        pooled = self._pooled(x, sentence.pooling)
        for dense in sentence.dense:
            pooled = g.linear(pooled, dense.weight, dense.bias)
            pooled = (
                pooled if dense.activation == "none" else g.activation(dense.activation, pooled)
            )
        if not sentence.normalize:
            return pooled
        norm = g.op("ReduceL2", pooled, axes=[-1], keepdims=1)
        return g.op("Div", pooled, g.op("Max", norm, g.constant(np.float32(1e-12))))

    def _logits(self, x: str, readout: ReadoutLayer) -> tuple[str, list[str]]:
        g, config = self.graph, readout.config
        axes = ["batch", "length"]
        if isinstance(config, ClassHead):
            axes = ["batch"]
            if config.pool == "first_and_mean":
                mean = self._pooled(x, "mean", config.mean_from)
                x = g.op("Concat", self._pooled(x, "first"), mean, axis=-1)
            else:
                x = self._pooled(x, config.pool)
        if isinstance(readout.transform, TransformLayer):
            transform = readout.transform
            x = g.linear(x, transform.dense.weight, transform.dense.bias)
            x = g.norm(transform.norm, g.activation(transform.config.activation, x))
        if readout.factor != 1.0:
            x = g.op("Mul", x, g.constant(np.float32(readout.factor)))
        if readout.weight is None:
            table = self.model.embedding.tokens.weight
            logits, count = g.tied(x, table, readout.bias), len(table)
        else:
            logits, count = g.linear(x, readout.weight, readout.bias), len(readout.weight)
        if isinstance(config, LanguageHead) and readout.softcap is not None:
            cap = g.constant(np.float32(readout.softcap))
            logits = g.op("Mul", g.op("Tanh", g.op("Div", logits, cap)), cap)
        return logits, [*axes, str(count)]


def _array(weight: Tensor) -> Any:
    return weight.detach().float().cpu().numpy()


def _half(array: Any) -> Any:
    if np.abs(array).max(initial=0) > np.finfo(np.float16).max:
        raise InputError("some weights are too large for float16", "use float32 or int8")
    return array.astype(np.float16)


def _quantized(array: Any, axis: int) -> tuple[Any, Any]:
    """Integers of 8 bits, and one scale for each vector along the axis."""
    scale = np.abs(array).max(axis=axis) / 127
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    rounded = np.round(array / np.expand_dims(scale, axis))
    return rounded.clip(-127, 127).astype(np.int8), scale


def _difference(model: Encoder, path: Path) -> float | None:
    """The largest difference of the outputs on a padded batch of random tokens."""
    try:
        import onnxruntime
    except ImportError:
        return None
    longest = max(CHECKED)
    if isinstance(model.config.embedding.position, Learned):
        longest = min(longest, model.config.embedding.position.longest)
    lengths = torch.tensor([min(length, longest) for length in CHECKED])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.embedding.vocabulary, (3, longest), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    fed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    if model.embedding.types is not None:
        fed["token_type_ids"] = np.zeros_like(fed["input_ids"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, fed), strict=True))
    device = next(model.parameters()).device
    with torch.inference_mode():
        output = model(ids.to(device), mask.to(device))
    expected = {"last_hidden_state": output.hidden, "logits": output.logits}
    largest = 0.0
    for name, tensor in expected.items():
        if name not in results or not isinstance(tensor, Tensor):
            continue
        expected_tensor, result = tensor.float().cpu(), torch.from_numpy(results[name])
        gap = (expected_tensor - result).abs()
        if gap.dim() == 3:
            gap = gap * mask[..., None]
        largest = max(largest, float(gap.max()))
    return largest
