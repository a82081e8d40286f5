"""Names of the hub, against a cache made by hand: there is no network in a test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from manyheads import build, load, save
from manyheads.checkpoints.hub import folder_of
from manyheads.cli.main import main
from manyheads.errors import InputError, MissingPackageError
from tests.checkpoints.peer_models import assert_equal

COMMIT, OLDER = "a" * 40, "b" * 40
NAME = "someone/tiny.model-1"
WANTED = [
    "config.json",
    "model.safetensors",
    "model-00001-of-2.safetensors",
    "tokenizer.json",
    "vocab.txt",
    "model.safetensors.index.json",
    "0_Transformer/model.safetensors",
    "1_Pooling/config.json",
    "modules.json",
    "merges.txt",
    "0_Transformer/vocab.txt",
    "source.spm",
    "spiece.model",
    "chat_template.jinja",
]
UNWANTED = [
    "pytorch_model.bin",
    "tf_model.h5",
    "rust_model.ot",
    "onnx/model.onnx",
    "onnx/config.json",
    "model.gguf",
    "README.md",
    "flax_model.msgpack",
    "training_args.bin",
    "original/params.json",
    "consolidated.safetensors",
    "modeling_custom.py",
    "openvino/openvino_config.json",
]


def small(seed: int) -> Any:
    return build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=seed)


def cache(home: Path, name: str, commit: str, ref: str, seed: int = 0) -> Path:
    """A snapshot as the hub's own package lays it out: links to blobs, and a ref that names it."""
    repo = home / f"models--{name.replace('/', '--')}"
    save(small(seed), home / "plain")
    (home / "plain" / "generation_config.json").write_text(json.dumps({"eos_token_id": seed}))
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    for file in (home / "plain").iterdir():
        blob = repo / "blobs" / f"{commit[:4]}-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a world in which the hub cannot be asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(kind: type[Exception]) -> Any:
    """A hub that answers with this error, made as its package makes it."""

    def download(*_: object, **__: object) -> str:
        error = kind.__new__(kind)
        error.args = ("no\nmany more words",)
        raise error

    return download


def test_a_name_is_found_in_the_cache_without_a_network(home: Path) -> None:
    snapshot = cache(home, NAME, COMMIT, "main")
    assert all(file.is_symlink() for file in snapshot.iterdir())
    model = load(NAME)
    assert_equal(model, small(0))
    assert model.generation == {"eos_token_id": 0}


@pytest.mark.parametrize("how", ["argument", "in the name", "by its commit"])
def test_a_revision_can_be_given_in_two_ways(how: str, home: Path) -> None:
    cache(home, NAME, COMMIT, "main", seed=0)
    cache(home, NAME, OLDER, "v1", seed=1)
    if how == "argument":
        model = load(NAME, revision="v1")
    else:
        model = load(f"{NAME}@{'v1' if how == 'in the name' else OLDER}")
    assert_equal(model, small(1))
    with pytest.raises(InputError, match="both give a revision"):
        load(f"{NAME}@v1", revision="main")


def test_a_folder_goes_first(home: Path) -> None:
    cache(home, NAME, COMMIT, "main", seed=0)
    save(small(1), home / NAME)
    assert_equal(load(NAME), small(1))
    with pytest.raises(InputError, match="revision='v1' is not possible for the folder"):
        load(NAME, revision="v1")


def test_the_environment_of_the_hub_is_honored(tmp_path: Path) -> None:
    snapshot = cache(tmp_path / "hub", NAME, COMMIT, "main")
    # What `load` reads is found without torch, which takes seconds to import.
    script = f"from manyheads.checkpoints.hub import folder_of; print(folder_of({NAME!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == f"{snapshot}\n"


def test_a_hub_that_cannot_be_reached_leaves_what_the_cache_has(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is known to lack some file is enough where it has those that are needed."""
    cache(home, NAME, COMMIT, "main")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", refuse(errors.LocalEntryNotFoundError)
    )
    assert_equal(load(NAME), small(0))


def test_only_files_that_are_read_are_downloaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    snapshot = cache(home, NAME, COMMIT, "main")
    request: dict[str, Any] = {}

    def download(name: str, **more: Any) -> str:
        request.update(more, name=name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load(NAME, revision="v2")
    assert (request["name"], request["revision"]) == (NAME, "v2")
    patterns = {key: request[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*WANTED, *UNWANTED], **patterns)) == WANTED


def test_an_unknown_name_is_refused_with_a_remedy(home: Path) -> None:
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set, and its cache has no some/one"):
        load("some/one")
    cache(home, NAME, COMMIT, "main")
    with pytest.raises(InputError, match=r"cache has no .*@v9: unset it, or give a folder"):
        load(NAME, revision="v9")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.RepositoryNotFoundError, "no model of that name on the hub"),
        (errors.GatedRepoError, "is gated on the hub.*hf auth login"),
        (errors.RevisionNotFoundError, "has no revision None"),
        (errors.HfHubHTTPError, r"could not be downloaded \(HfHubHTTPError: no\): try again"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached, and its cache has no"),
        (ConnectionResetError, r"some/one could not be downloaded \(ConnectionResetError"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(
    kind: type[Exception],
    reason: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse(kind))
    with pytest.raises(InputError, match=reason):
        load("some/one")
    assert main(["convert", "some/one", "-o", str(home / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "out").exists()


def test_a_missing_package_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.is_dir()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match="pip install huggingface_hub"):
        load("some/one")


@pytest.mark.parametrize("where", ["nowhere", "./here/there", "/a/b", "a/b/c", "~/model", "a/b@"])
def test_what_looks_like_no_name_is_a_missing_folder(where: str, home: Path) -> None:
    assert home.is_dir()
    with pytest.raises(InputError, match="there is no folder"):
        folder_of(where)
    with pytest.raises(InputError, match="there is no folder some"):
        folder_of(Path("some/one"))


def test_a_name_the_hub_could_not_have_is_refused(home: Path) -> None:
    assert home.is_dir()
    with pytest.raises(InputError, match="is not a valid name on the hub"):
        load("some--one/model")


def test_pickles_of_a_snapshot_are_never_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache(home, NAME, COMMIT, "main")
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(InputError, match="has its weights in a pickle"):
        load(NAME)
    (snapshot / "pytorch_model.bin").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(InputError, match="has no safetensors on the hub"):
        load(NAME)


def test_an_unknown_family_of_a_snapshot_is_named(home: Path) -> None:
    snapshot = cache(home, NAME, COMMIT, "main")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text('{"model_type": "llm"}')
    with pytest.raises(InputError, match="llm"):
        load(NAME)


def test_a_name_is_converted_as_a_folder_is(home: Path) -> None:
    cache(home, NAME, COMMIT, "main")
    assert main(["convert", NAME, "-o", str(home / "out"), "--dtype", "bfloat16"]) == 0
    model = load(home / "out")
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.generation == {"eos_token_id": 0}
    assert not any(file.is_symlink() for file in (home / "out").iterdir())
