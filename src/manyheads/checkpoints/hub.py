"""Models by name: the house models inside the package, and models of the Hugging Face hub.

The latter are downloaded to the hub's own cache, or found there without a network.
"""

import re
from pathlib import Path

from manyheads.errors import InputError, MissingPackageError

# Our own small models, trained by studies/house; the first is the default of commands.
HOUSE = ("house-gpt", "house-gpt-gated", "house-bert")
HOUSE_FOLDER = Path(__file__).parents[1] / "house"

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
]
# The same weights for other programs.
UNWANTED = ["onnx/*", "openvino/*", "coreml/*", "original/*", "*consolidated*.safetensors"]


def folder_of(where: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or that of a house model, or of "org/name" or "org/name@revision"."""
    folder = Path(where)
    if folder.is_dir():
        if revision is not None:
            raise InputError(
                f"{folder} is a folder, which has no revision={revision!r}",
                "leave revision out, or give a name of the hub",
            )
        return folder
    if where in HOUSE and revision is None:
        return HOUSE_FOLDER / where
    asked = NAME.fullmatch(where) if isinstance(where, str) else None
    if asked is None or folder.exists():
        raise InputError(
            f"there is no folder {folder}",
            'name one that a model was saved to, a model of the hub as "org/name", or '
            f"{', '.join(HOUSE)}",
        )
    if revision is not None and asked["revision"] is not None:
        raise InputError(
            f"{where} and revision={revision!r} both name a revision", "give one of the two"
        )
    return _fetched(asked["name"], revision or asked["revision"])


def _fetched(name: str, revision: str | None) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingPackageError(
            f"there is no folder {name}, and a download", "huggingface_hub"
        ) from None
    of = name if revision is None else f"{name}@{revision}"
    try:
        found = hub.snapshot_download(
            name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except errors.GatedRepoError:
        raise InputError(
            f"{of} is gated on the hub, and you are not let in",
            f"ask for access at https://huggingface.co/{name}, then run: hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"there is no folder {name}, and the hub shows you no model of that name",
            "check the spelling; for a private one run: hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"{name} has no revision {revision!r}", "name a branch, a tag or a commit"
        ) from None
    except errors.HFValidationError as error:
        raise InputError(f"{name} is no name of the hub ({error})", "check the spelling") from None
    # The hub cannot be reached, but the cache may have enough.
    except errors.LocalEntryNotFoundError as error:
        return _cached(name, revision, error)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise InputError(
            f"the hub did not give {of} ({type(error).__name__}: {first})",
            "try again, or name a folder that has the model",
        ) from error
    return _with_weights(Path(found), of)


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
        f"{'unset it' if offline else 'connect'}, or name a folder that has the model",
    ) from reason


def _with_weights(folder: Path, of: str) -> Path:
    if not any(folder.rglob("*.safetensors")) and not any(folder.rglob("*.bin")):
        raise InputError(
            f"{of} has no weights in safetensors on the hub, and a pickle can run any code",
            "use a model that has them, or convert its pickle where you trust it",
        )
    return folder
