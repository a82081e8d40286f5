"""Open a folder of a family that manyheads does not know with `transformers`, without its code."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.errors import InputError, MissingPackageError

# Keys of a config.json that make transformers run code of the folder or of the hub.
UNSAFE = {
    "auto_map": "code of its own",
    "quantization_config": "quantized weights, which other packages unpack",
    "attn_implementation": "an attention kernel of its own",
    "experts_implementation": "a kernel for experts of its own",
}
ATTENTION_KEY = re.compile(r".*(attn|experts)_implementation.*")


def check_safe(description: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder that would make `transformers` run code, or that holds only pickles."""
    for key in _keys(description):
        name = next((word for word in UNSAFE if word in key), None)
        if name is not None or ATTENTION_KEY.fullmatch(key):
            reason = UNSAFE[name or "attn_implementation"]
            raise InputError(
                f"{folder}/config.json has {key!r:.100}, which asks for {reason}",
                "manyheads never runs code of a model: remove the key if the model works without",
            )
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{folder} holds an adapter", "merge it into its model with peft, and save that"
        )
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} has no .safetensors file, and pickles are never read",
            "save the model again with transformers, which writes safetensors",
        )


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # A key that says nothing asks for nothing.
            if inner is not None:
                yield str(key)
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def load_wrapped(
    folder: Path, description: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device
) -> WrappedModel:
    """The model of a folder, run by `transformers` and wrapped."""
    check_safe(description, folder)
    transformers = _transformers(f"a model of type {description.get('model_type')!r:.100}")
    options = {"trust_remote_code": False, "local_files_only": True}
    remedy = "use a folder of a family that manyheads or this transformers knows"
    with _in_one_line(f"transformers cannot open {folder}", remedy):
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        model = _model_class(transformers, description).from_pretrained(
            folder, config=config, use_safetensors=True, dtype=dtype or "auto", **options
        )
    return wrap(model.to(device).eval())


def load_wrapped_gguf(file: Path, dtype: torch.dtype | None, device: torch.device) -> WrappedModel:
    """The language model of a GGUF file, read and run by `transformers` and wrapped."""
    model_class = _transformers(str(file)).AutoModelForCausalLM
    options = {"trust_remote_code": False, "local_files_only": True, "gguf_file": file.name}
    remedy = "use a GGUF of another architecture, such as llama, qwen2 or qwen3"
    try:
        with _in_one_line(f"neither manyheads nor transformers can read {file}", remedy):
            model = model_class.from_pretrained(
                file.parent, dtype=dtype or torch.float32, **options
            )
    except ImportError:
        raise MissingPackageError(str(file), "gguf") from None
    return wrap(model.to(device).eval())


def _transformers(user: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingPackageError(user, "transformers") from None
    return transformers


@contextmanager
def _in_one_line(problem: str, remedy: str) -> Iterator[None]:
    """Errors of `transformers`, which raises whatever an unknown file runs into, as ours."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{problem}: {reason:.300}", remedy) from error


def _model_class(transformers: Any, description: Mapping[str, Any]) -> Any:
    """The class that config.json names, if it is one of `transformers`; else the base model's."""
    for name in description.get("architectures") or ():
        kind = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    return transformers.AutoModel
