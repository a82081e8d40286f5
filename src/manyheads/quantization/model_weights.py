"""Integer weights for a whole model: which layers get them, and by which text they are rounded."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import checked
from manyheads.errors import ConfigError, NativeModelError
from manyheads.formatting import kind_of
from manyheads.models.build import Model, build
from manyheads.models.embedding import TokenEmbedding
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import LanguageHead, ReadoutLayer
from manyheads.models.recipes import ModelConfig
from manyheads.parts.feedforward import FeedForward
from manyheads.progress import Progress
from manyheads.quantization.error_compensation import compensated_codes
from manyheads.quantization.integer_codes import IntegerCodes, Layout, WeightName, round_weight
from manyheads.quantization.integer_layers import (
    IntegerEmbedding,
    IntegerLinear,
    IntegerWeight,
    empty_codes,
)
from manyheads.ragged import Ragged
from manyheads.tokenizers import plain_copy

Method = Literal["compensated", "searched", "nearest"]
# Smaller layers, such as routers of experts, take no time, and their errors decide much.
MIN_SIZE = 32
# The name of the language head's integer weights, if it has a matrix of its own.
READOUT = "readout.product"
# Of a text, so that no learned position is missing and attention stays cheap.
MAX_TOKENS = 512


@checked
def quantize_weights(model: Model, weights: WeightName, *, method: Method = "compensated") -> None:
    """Round the weights of a model on the CPU to integers, in place.

    "int8" has a scale per row; "int4" one per 32 columns. Linear layers, the token embedding and
    the language head are rounded; norms, biases, positions, experts and classes are not. In "int4"
    tokens and the second matrix of feed-forwards, which loses most, keep eight bits. Four bits are
    rounded by GPTQ (arXiv 2210.17323) on a text that comes with manyheads; "searched" leaves the
    compensation of errors out, and "nearest" also the search for scales.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=64, heads=2, vocabulary=99, seed=0).eval()
    >>> quantize_weights(model, "int8")
    >>> model.stack.layers[0].attention.project.weight_name
    'int8'
    """
    _check_plain(model)
    linears = dict(_large_linears(model))
    formats = {name: _format_in(weights, model, name) for name in linears}
    if weights == "int4" and method == "compensated":
        codes = _calibrated(model, linears, formats)
    else:
        search = method != "nearest"
        codes = {
            name: round_weight(linear.weight, formats[name], search=search)
            for name, linear in linears.items()
        }
    for name, linear in linears.items():
        _replace(model, name, IntegerLinear(codes.pop(name), linear.bias))
    _replace_vocabularies(model, lambda table: round_weight(table, "int8"))


@checked
def dequantize_weights(model: Model) -> None:
    """Give a model ordinary layers again, with the weights that its integers stand for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, ReadoutLayer):
            product, module.product = module.product, None
            if isinstance(product, IntegerLinear):
                module.weight = nn.Parameter(product.weight)
        elif isinstance(module, IntegerLinear) and not name.endswith(READOUT):
            linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            linear.weight, linear.bias = nn.Parameter(module.weight), module.bias
            _replace(model, name, linear.eval())
        elif isinstance(module, IntegerEmbedding):
            shape = module.num_embeddings, module.embedding_dim
            _replace(model, name, nn.Embedding(*shape, _weight=module.weight).eval())


def weights_of(model: nn.Module) -> WeightName | None:
    """The format of a model's linear layers; None if it has no integer weights."""
    names = [part.weight_name for part in model.modules() if isinstance(part, IntegerWeight)]
    return "int4" if "int4" in names else names[0] if names else None


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    """How the integer weights of a model are stored, by the name of the module."""
    modules = model.named_modules()
    return {
        name: part.integer_codes.layout for name, part in modules if isinstance(part, IntegerWeight)
    }


def format_of(model: Model) -> WeightName | dict[str, Layout] | None:
    """What describes all integer weights: a name if that is the format of every linear layer."""
    weights, layouts = weights_of(model), layouts_of(model)
    if weights is None:
        return None
    plain = build(cast(ModelConfig, model.config), device="meta")
    make_integer_layers(plain, weights)
    return weights if layouts_of(plain) == layouts else layouts


def make_integer_layers(model: Model, weights: WeightName | Mapping[str, Layout]) -> None:
    """Give a model on the meta device linear layers of one format, or those named theirs.

    Tokens have eight bits with a single format. Names without a matrix are left out.
    """
    if not isinstance(weights, str):
        for name, layout in weights.items():
            matrix = matrix_of(model, name)
            if matrix is not None:
                set_codes(model, name, empty_codes(len(matrix), matrix.shape[1], layout))
        return
    for name, linear in list(_large_linears(model)):
        codes = empty_codes(linear.out_features, linear.in_features, weights)
        _replace(model, name, IntegerLinear(codes, linear.bias))
    _replace_vocabularies(model, lambda table: empty_codes(len(table), table.shape[1], "int8"))


def matrix_of(model: Model, name: str) -> Tensor | None:
    """The matrix of a module that can have integer weights, by the name it has with them."""
    readout = model.readout
    if name == READOUT:
        language = readout is not None and isinstance(readout.config, LanguageHead)
        return readout.weight if readout is not None and language else None
    module = dict(model.named_modules()).get(name)
    tables = {id(part.tokens) for part in model.modules() if isinstance(part, TokenEmbedding)}
    if isinstance(module, nn.Embedding) and id(module) in tables:
        return module.weight
    large = type(module) is nn.Linear and min(module.weight.shape) >= MIN_SIZE
    return module.weight if isinstance(module, nn.Linear) and large else None


def set_codes(model: Model, name: str, codes: IntegerCodes) -> None:
    """Give the module of this name these codes for its matrix."""
    readout = model.readout
    if name == READOUT:
        assert readout is not None
        readout.weight, readout.product = None, IntegerLinear(codes)
        return
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear):
        _replace(model, name, IntegerLinear(codes, module.bias))
        return
    table = IntegerEmbedding(codes)
    tied = readout is not None and readout.weight is None and module is model.table_layer
    _replace(model, name, table)
    if tied and readout is not None:
        readout.product = table.multiply


def _large_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and min(module.weight.shape) >= MIN_SIZE:
            yield name, module


def _format_in(weights: WeightName, model: nn.Module, name: str) -> WeightName:
    """The format of one linear layer of a model with such weights.

    Rounded to four bits, the matrices in which feed-forwards contract make nine tenths of the
    squared errors of all layers of SmolLM2, so they keep eight.
    """
    owner, _, own = name.rpartition(".")
    contracts = own == "contract" and isinstance(model.get_submodule(owner), FeedForward)
    return "int8" if contracts else weights


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


def _replace_vocabularies(model: Model, round_table: Callable[[Tensor], IntegerCodes]) -> None:
    """The embedding and the language head in eight bits, which are the same table if it is tied."""
    for module in list(model.modules()):
        if isinstance(module, TokenEmbedding):
            module.tokens = IntegerEmbedding(round_table(module.tokens.weight))
    readout, table = model.readout, model.table_layer
    if readout is None or not isinstance(readout.config, LanguageHead):
        return
    if readout.weight is None:
        assert isinstance(table, IntegerEmbedding), "a tied head reads text"
        readout.product = table.multiply
    else:
        codes, readout.weight = round_table(readout.weight), None
        readout.product = IntegerLinear(codes)


def _check_plain(model: Model) -> None:
    if not model.native:
        raise NativeModelError("rounding weights to integers")
    problem = ""
    for name, module in model.named_modules():
        if isinstance(module, IntegerWeight):
            problem = f"{name} already has {module.weight_name} weights"
        elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            problem = f"{name} is {kind_of(module)}, not a plain Linear"
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            problem = f"the model is in {parameter.dtype} on {parameter.device}"
    if problem:
        raise ConfigError(problem, "load the model in float32 on the CPU, without adapters")
    model.eval()


def _calibrated(
    model: Model, linears: dict[str, nn.Linear], formats: dict[str, WeightName]
) -> dict[str, IntegerCodes]:
    """Codes; those of four bits by the inputs that a layer gets from rounded layers before it.

    A layer is rounded when the text reaches it, and computes with its new weights from then on.
    """
    codes: dict[str, IntegerCodes] = {}
    originals = {name: linear.weight.data for name, linear in linears.items()}
    bar = Progress("rounding", total=len(linears), unit="layers")

    def round_layer(name: str, linear: nn.Linear, x: Float[Tensor, "*n columns"]) -> None:
        if name in codes:
            return
        if formats[name] == "int8":
            codes[name] = round_weight(linear.weight, "int8")
        else:
            inputs = x.detach().flatten(0, -2)
            codes[name] = compensated_codes(linear.weight, inputs.T @ inputs)
        linear.weight.data = codes[name].values()
        bar.advance(1)

    def hook(name: str) -> Any:
        return lambda linear, args: round_layer(name, linear, args[0])

    hooks = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        inputs = text_inputs(model, built_in_texts("calibration"))
        if inputs is not None:
            with bar, torch.no_grad():
                model.run_inputs(inputs)
    finally:
        for handle in hooks:
            handle.remove()
        for name, linear in linears.items():
            linear.weight.data = originals[name]
    rest = {name: linear for name, linear in linears.items() if name not in codes}
    return codes | {
        name: round_weight(linear.weight, formats[name]) for name, linear in rest.items()
    }


def built_in_texts(name: Literal["calibration", "evaluation"]) -> list[str]:
    """The texts that weights are rounded by, or those that the loss is measured on.

    >>> len(built_in_texts("calibration")), len(built_in_texts("evaluation"))
    (12, 6)
    """
    text = files(__package__).joinpath("texts.toml").read_text("utf-8")
    return list(tomllib.loads(text)[name])


def text_inputs(model: Model, texts: Sequence[str]) -> ModelInputs | None:
    """The texts as a model reads them; None if it reads no text."""
    if model.tokenizer is None or model.reads_images:
        return None
    encodings = plain_copy(model.tokenizer).encode_batch(list(texts))
    tables = (part for part in model.modules() if isinstance(part, TokenEmbedding))
    longest = (getattr(table.config.position, "longest", MAX_TOKENS) for table in tables)
    length = min(MAX_TOKENS, *longest)
    ids = Ragged.from_list([torch.tensor(code.ids[:length]) for code in encodings])
    return ModelInputs(ids=ids, source=ids if model.reads_pairs else None)
