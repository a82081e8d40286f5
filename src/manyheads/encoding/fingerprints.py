"""Which model an index, a run or a measurement was made with."""

import zlib
from dataclasses import MISSING, fields, is_dataclass
from hashlib import blake2b, sha256

import torch
from torch import Tensor

from manyheads.models.build import Model

# Values of each tensor that enter the fingerprint of a model.
SAMPLES = 64
# Values at both ends of each tensor, in files of earlier versions.
OLDER_SAMPLES = 1024


def model_fingerprint(model: Model) -> str:
    """A hash of some values of each weight, of the tokenizer and of how vectors are made.

    It does not depend on the device, nor on whether a model was loaded in bfloat16.
    """
    digest = blake2b(digest_size=12)
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {_described(weight)}".encode())
    digest.update(repr([_described(model.sentence), _described(model.late)]).encode())
    if model.tokenizer is not None:
        digest.update(model.tokenizer.to_str().encode())
    return digest.hexdigest()


def exact_fingerprint(model: Model) -> str:
    """A hash of every weight and buffer as they are, of the configuration and the tokenizer."""
    digest = sha256(repr((type(model).__name__, _settings(model.config))).encode())
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1).cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy())
    if model.tokenizer is not None:
        digest.update(model.tokenizer.to_str().encode())
    return digest.hexdigest()[:24]


def _described(value: object) -> object:
    """A config as plain values, with a sample of each tensor."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)[:: max(1, value.numel() // SAMPLES)]
        sample = flat.to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
        return f"{tuple(value.shape)} {sample.numpy().tobytes().hex()}"
    if is_dataclass(value) and not isinstance(value, type):
        return [_described(getattr(value, field.name)) for field in fields(value)]
    return [_described(item) for item in value] if isinstance(value, tuple) else value


def _settings(value: object) -> object:
    """The classes of a config and the values that are no defaults.

    A field that a later version adds leaves the hash of the models of before as it was.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return [_settings(item) for item in value] if isinstance(value, tuple) else value
    result: list[object] = [type(value).__name__]
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        settings = _settings(getattr(value, field.name))
        if settings != _settings(default):
            result.append((field.name, settings))
    return result


def filter_fingerprint(model: Model) -> str:
    """The class, the dtype and the hash of a model, whose scores depend on all three."""
    return f"{_kind(model)} {model_fingerprint(model)}"


def older_fingerprint(model: Model) -> str:
    """What earlier versions wrote for `filter_fingerprint`."""
    checksum = 0
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        ends = torch.cat((flat[:OLDER_SAMPLES], flat[-OLDER_SAMPLES:])).float().cpu()
        checksum = zlib.crc32(f"{name}{tuple(parameter.shape)}".encode(), checksum)
        checksum = zlib.crc32(ends.numpy().tobytes(), checksum)
    return f"{_kind(model)} {checksum:08x}"


def _kind(model: Model) -> str:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{type(model).__name__} {dtype}"
