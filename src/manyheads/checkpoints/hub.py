"""Models by name: the models bundled with the package, and those on the Hugging Face hub.

The latter are downloaded to the cache of the hub, or read from it without a network.
"""

import re
from pathlib import Path

from manyheads.atomic_write import recover_folder
from manyheads.checkpoints.pip_models import PIP_MODELS, fetched_file
from manyheads.errors import InputError, MissingPackageError

# Our own small models, trained by studies/house; the first is the default of commands.
HOUSE = ("house-gpt", "house-gpt-gated", "house-bert")
# All models that have a name of their own.
MODEL_NAMES = (*HOUSE, *PIP_MODELS)
BUNDLED_FOLDER = Path(__file__).parents[1] / "bundled"

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@]+))?")
# The files that `load` may read, in a folder or one below it.
WANTED = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.spm",
    "*vocab.txt",
    "*merges.txt",
    "artifact.metadata",
]
# The same weights for other programs.
UNWANTED = ["onnx/*", "openvino/*", "coreml/*", "original/*", "*consolidated*.safetensors"]


def folder_of(where: str | Path, revision: str | None = None) -> Path:
    """The folder of a path, a bundled model, "org/name" or "org/name@revision"; a GGUF file."""
    if not isinstance(where, str | Path):
        raise InputError(
            f"a model is loaded from a folder or by name, got {where!r:.200}",
            f'give a path, "org/name" or one of {", ".join(MODEL_NAMES)}',
        )
    folder = Path(where)
    recover_folder(folder)
    if folder.is_file() and revision is None and _is_gguf(folder):
        return folder
    if folder.is_dir():
        if revision is not None:
            raise InputError(
                f"revision={revision!r} is not possible for the folder {folder}",
                "leave revision out, or give a name on the hub",
            )
        return folder
    if where in HOUSE and revision is None:
        return BUNDLED_FOLDER / where
    if where in PIP_MODELS and revision is None:
        return fetched_file(str(where))
    match = NAME.fullmatch(where) if isinstance(where, str) else None
    if match is None or folder.exists():
        raise InputError(
            f"there is no folder {folder!s:.200}",
            'give the folder of a model, a .gguf file, a model on the hub as "org/name", or '
            f"{', '.join(MODEL_NAMES)}",
        )
    if revision is not None and match["revision"] is not None:
        raise InputError(f"{where} and revision={revision!r} both give a revision", "give only one")
    return _download(match["name"], revision or match["revision"])


def _is_gguf(file: Path) -> bool:
    """Whether a file is a GGUF, by its name or by its first bytes."""
    if file.suffix == ".gguf":
        return True
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def _download(name: str, revision: str | None) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingPackageError(
            f"there is no folder {name}, and a download", "huggingface_hub"
        ) from None
    of = name if revision is None else f"{name}@{revision}"
    try:
        folder = hub.snapshot_download(
            name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except errors.GatedRepoError:
        raise InputError(
            f"{of} is gated on the hub, and you have no access",
            f"request it at https://huggingface.co/{name}, then run: hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"there is no folder {name} and no model of that name on the hub",
            "check the spelling; for a private model run: hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"{name} has no revision {revision!r}", "give a branch, a tag or a commit"
        ) from None
    except errors.HFValidationError as error:
        raise InputError(
            f"{name} is not a valid name on the hub ({error})", "check the spelling"
        ) from None
    # The hub cannot be reached, but the cache may have enough.
    except errors.LocalEntryNotFoundError as error:
        return _cached(name, revision, error)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise InputError(
            f"{of} could not be downloaded ({type(error).__name__}: {first})",
            "try again, or give a folder with the model",
        ) from error
    return _with_weights(Path(folder), of)


def _cached(name: str, revision: str | None, reason: Exception) -> Path:
    import huggingface_hub as hub

    config = hub.try_to_load_from_cache(name, "config.json", revision=revision)
    modules = hub.try_to_load_from_cache(name, "modules.json", revision=revision)
    for file in (config, modules):
        if isinstance(file, str):
            return Path(file).parent
    of = name if revision is None else f"{name}@{revision}"
    offline = hub.constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
    raise InputError(
        f"there is no folder {name}, {why}, and its cache has no {of}",
        f"{'unset it' if offline else 'connect'}, or give a folder with the model",
    ) from reason


def _with_weights(folder: Path, of: str) -> Path:
    if not any(folder.rglob("*.safetensors")) and not any(folder.rglob("*.bin")):
        raise InputError(
            f"{of} has no safetensors on the hub, and loading a pickle can run any code",
            "use a model with safetensors, or convert the pickle if you trust it",
        )
    return folder
