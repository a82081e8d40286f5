"""Whisper in a folder of CTranslate2 (faster-whisper), as the model of `transformers`.

The format, version 6, in little-endian numbers: the version (uint32), the name of the model class,
its revision and the number of variables (uint32 each). A variable is its name, the number of its
axes (uint8), their sizes (uint32), its type (uint8), its bytes (uint32) and the data. Then come the
number of aliases and for each its name and that of its variable. A name is its length (uint16) and
as many bytes, the last of which is 0. Nothing in it is code.
"""

import json
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.errors import InputError, MissingPackageError

MODEL, VERSION, SPEC = "model.bin", 6, "WhisperSpec"
DTYPES = dict(
    enumerate((torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16))
)
DAMAGED = "copy or download it again"
# The modules of a layer in the file, and those of `transformers`, of which some are joined.
LAYER: dict[str, tuple[str, ...]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
NORMS = {"gamma": "weight", "beta": "bias"}
TOP = {
    "embeddings/weight": "embed_tokens.weight",
    "position_encodings/encodings": "embed_positions.weight",
    **{f"layer_norm/{own}": f"layer_norm.{name}" for own, name in NORMS.items()},
    **{f"conv{n}/{kind}": f"conv{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")},
}
IN_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(\w+/\w+)/(gamma|beta|weight|bias)")


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder has a Whisper model of CTranslate2."""
    file = folder / MODEL
    if not file.is_file() or any(folder.glob("*.safetensors")):
        return False
    with file.open("rb") as opened:
        return opened.read(6 + len(SPEC))[6:] == SPEC.encode()


def read_variables(file: Path) -> dict[str, Tensor]:
    """All variables of a file by name, aliases included."""
    reader = _ByteReader(file)
    version, spec, _ = reader.number("I"), reader.text(), reader.number("I")
    if version != VERSION or spec != SPEC:
        raise InputError(
            f"{file} is a {spec!r:.50} of version {version} of CTranslate2",
            f"use a {SPEC} of version {VERSION}",
        )
    variables = dict(reader.variable() for _ in range(reader.number("I")))
    for _ in range(reader.number("I")):
        alias, name = reader.text(), reader.text()
        if name not in variables:
            raise InputError(
                f"{file} has no {name!r:.100}, the variable of {alias!r:.100}", DAMAGED
            )
        variables[alias] = variables[name]
    return variables


class _ByteReader:
    """Reads a file from its beginning and never past its end."""

    def __init__(self, file: Path) -> None:
        self.file, self.data, self.offset = file, bytearray(file.read_bytes()), 0

    def take(self, size: int) -> int:
        """Go on by so many bytes, and give where they start."""
        if size > len(self.data) - self.offset:
            raise InputError(f"{self.file} is truncated or damaged", DAMAGED)
        start, self.offset = self.offset, self.offset + size
        return start

    def number(self, letter: str) -> int:
        layout = struct.Struct(f"<{letter}")
        return int(layout.unpack_from(self.data, self.take(layout.size))[0])

    def text(self) -> str:
        size = self.number("H")
        start = self.take(size)
        return self.data[start : start + size].rstrip(b"\0").decode("utf-8", "replace")

    def variable(self) -> tuple[str, Tensor]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype, size = DTYPES.get(self.number("B")), self.number("I")
        start = self.take(size)
        if dtype is None or prod(shape) * dtype.itemsize != size or size == 0:
            raise InputError(
                f"{self.file}: {name!r:.100} of shape {tuple(shape)} has {size} bytes", DAMAGED
            )
        flat = torch.frombuffer(self.data, dtype=dtype, count=prod(shape), offset=start)
        # A copy: variables of one byte leave the next ones unaligned.
        return name, flat.clone().reshape(shape)


def whisper_tensors(variables: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The state of WhisperForConditionalGeneration."""
    quantized = next((name for name in variables if name.endswith("weight_scale")), None)
    if quantized is not None:
        raise InputError(
            f"{file} is quantized to 8 bits ({quantized})", "use one in float32 or float16"
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in variables.items():
        stack, _, rest = name.partition("/")
        if match := IN_LAYER.fullmatch(name):
            stack, layer, module, kind = match.groups()
            modules = LAYER.get(module, ())
            for target, part in zip(modules, tensor.chunk(len(modules) or 1), strict=False):
                whole = f"model.{stack}.layers.{layer}.{target}.{NORMS.get(kind, kind)}"
                # Keys have no bias, and the file has zeros for it.
                if not whole.endswith("k_proj.bias"):
                    tensors[whole] = part.clone()
        elif rest in TOP:
            tensors[f"model.{stack}.{TOP[rest]}"] = tensor
    tensors["proj_out.weight"] = tensors.get("model.decoder.embed_tokens.weight", torch.empty(0))
    return tensors


def load_whisper(folder: Path, dtype: torch.dtype | None, device: torch.device) -> WrappedModel:
    """The model of a folder of CTranslate2, run by `transformers` and wrapped."""
    try:
        import transformers
    except ImportError:
        raise MissingPackageError(f"the Whisper model of {folder}", "transformers") from None
    file = folder / MODEL
    variables = read_variables(file)
    tensors = whisper_tensors(variables, file)
    try:
        config = transformers.WhisperConfig(**_sizes(variables), **_token_ids(folder))
    except KeyError as error:
        raise InputError(f"{file} has no {error!s:.100}", DAMAGED) from None
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [name for name, size in expected.items() if tuple(_shape(tensors, name)) != size]
    if wrong or len(tensors) != len(expected):
        raise InputError(f"{file}: {wrong[0] if wrong else 'a tensor'} does not fit", DAMAGED)
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(**_generation(folder, config))
    return wrap(model.to(device, dtype or torch.float32).eval())


def _shape(tensors: dict[str, Tensor], name: str) -> tuple[int, ...]:
    return tuple(tensors[name].shape) if name in tensors else ()


def _sizes(variables: dict[str, Tensor]) -> dict[str, int]:
    """The sizes of the model, from its variables."""
    vocabulary, width = variables["decoder/embeddings/weight"].shape
    sizes = {
        "vocab_size": vocabulary,
        "d_model": width,
        "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
    }
    for stack in ("encoder", "decoder"):
        layers = {name.split("/")[1] for name in variables if name.startswith(f"{stack}/layer_")}
        sizes |= {
            f"{stack}_layers": len(layers - {"layer_norm"}),
            f"{stack}_attention_heads": int(variables[f"{stack}/num_heads"]),
            f"{stack}_ffn_dim": len(variables[f"{stack}/layer_0/ffn/linear_0/weight"]),
        }
    return sizes


def _token_ids(folder: Path) -> dict[str, int]:
    """The tokens that begin and end a text."""
    file = folder / "tokenizer.json"
    try:
        added = json.loads(file.read_text("utf-8"))["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
        end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{file} has no tokens that begin and end a text", DAMAGED) from None
    return {
        **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), end),
        "decoder_start_token_id": start,
    }


def _generation(folder: Path, config: Any) -> dict[str, Any]:
    """What config.json of CTranslate2 has for generation, by the names of `transformers`."""
    file = folder / "config.json"
    try:
        stored = dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        raise InputError(f"{file} cannot be read", DAMAGED) from None
    names = {
        "alignment_heads": "alignment_heads",
        "suppress_ids": "suppress_tokens",
        "suppress_ids_begin": "begin_suppress_tokens",
    }
    tokens = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
    return {
        **{name: stored[key] for key, name in names.items() if key in stored},
        **{name: getattr(config, name) for name in tokens},
    }
