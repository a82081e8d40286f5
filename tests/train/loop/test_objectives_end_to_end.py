"""Other models, data and objectives than plain texts, each through a whole short run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads import load
from manyheads.data.images import image_normalization, read_image
from manyheads.errors import ConfigError, InputError
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.objectives import ImageClassification
from manyheads.train.run_file.run_config import parse_run
from tests.messages import refuses
from tests.train.tiny import tables, tiny, write_corpus


def losses(folder: Path) -> list[float]:
    lines = MetricsLog(folder / "out/metrics.jsonl").read()
    return [line["loss"] for line in lines if "loss" in line]


def test_texts_are_classified(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=20)
    rows = [{"text": "the cat sat" if n % 2 else "sun was low", "label": n % 2} for n in range(40)]
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tables(tmp_path, steps=10)
    settings["model"] = {
        "size": "bert-base",
        "change": {
            "layers": 1,
            "width": 16,
            "heads": 2,
            "hidden": 16,
            "vocabulary": 300,
            "readout": {"kind": "ClassHead", "classes": 2},
        },
    }
    settings["data"] = {
        "kind": "labeled",
        "train": str(tmp_path / "train.jsonl"),
        "validation": str(tmp_path / "held.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "max_length": 16,
        "batch": 64,
    }
    settings["objective"] = {"kind": "SequenceClassification"}
    train(parse_run(settings), progress=False)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1
    held = MetricsLog(tmp_path / "out/metrics.jsonl").read()[-1]["validation"]
    assert set(held) == {"loss", "accuracy"}
    assert held["accuracy"] == 1.0


MOODS = ("the cat sat", "sad"), ("sun was low", "glad")


def moods(place: Path, **model: Any) -> dict[str, Any]:
    """A run on texts with named labels."""
    write_corpus(place, documents=20)
    rows = [{"text": text, "label": label} for text, label in MOODS] * 20
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tables(place, steps=2)
    settings["model"] = model
    settings["data"] = {
        "kind": "labeled",
        "train": str(place / "train.jsonl"),
        "validation": str(place / "train.jsonl"),
        "max_length": 16,
        "batch": 64,
    }
    settings["objective"] = {"kind": "SequenceClassification"}
    return settings


def test_a_model_of_words_is_taught_classes_and_their_names(tmp_path: Path) -> None:
    train(parse_run(moods(tmp_path, folder="house-bert", classes=2)), progress=False)
    result = load(tmp_path / "out/model")
    assert result.class_names == ("glad", "sad")
    # It goes on with what it has, and numbers labels as the model does.
    again = moods(tmp_path, folder=str(tmp_path / "out/model"))
    again["run"]["folder"] = str(tmp_path / "again")
    train(parse_run(again), progress=False)
    assert load(tmp_path / "again/model").class_names == ("glad", "sad")
    named = moods(tmp_path, folder="house-bert", classes=["sad", "glad"])
    named["run"]["folder"] = str(tmp_path / "named")
    train(parse_run(named), progress=False)
    assert load(tmp_path / "named/model").class_names == ("sad", "glad")


def test_classes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    message = (
        "the data have 2 classes (glad, sad), and the model has 3: "
        "set model.classes=2, or to a list of all names."
    )
    with refuses(ConfigError, message):
        train(parse_run(moods(tmp_path, folder="house-bert", classes=3)), progress=False)
    message = (
        "SequenceClassification cannot use the readout LanguageHead: "
        "add classes: model.classes in a run file, with_classes in Python."
    )
    with refuses(ConfigError, message):
        train(parse_run(moods(tmp_path, folder="house-bert")), progress=False)
    settings = tables(tmp_path)
    settings["model"]["classes"] = 2
    message = (
        "model.classes=2, and the objective has no classes: remove it, or use "
        "SequenceClassification, TokenClassification or ImageClassification."
    )
    with refuses(ConfigError, message):
        train(parse_run(settings), progress=False)


def test_images_are_classified(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = np.arange(24) % 2
    pixels = draw.integers(0, 100, (24, 8, 8, 1)) + 150 * labels[:, None, None, None]
    np.savez(tmp_path / "images.npz", images=pixels.astype(np.uint8), labels=labels)
    settings: dict[str, Any] = {
        "model": {
            "size": "vit-b16",
            "change": {
                "layers": 1,
                "width": 16,
                "heads": 2,
                "hidden": 16,
                "classes": 2,
                "image": 8,
                "patch": 4,
                "channels": 1,
            },
        },
        "data": {"kind": "images", "train": str(tmp_path / "images.npz"), "batch": 8, "mean": 0.4},
        "objective": {"kind": "ImageClassification"},
        "optimizer": {"lr": 1e-2},
        "run": {"folder": str(tmp_path / "out"), "steps": 8, "device": "cpu"},
    }
    assert train(parse_run(settings), progress=False).unit == "images"
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1
    mean, deviation = image_normalization(load(tmp_path / "out/model"), 1)
    assert (float(mean), float(deviation)) == pytest.approx((0.4, 0.5))
    # Learning goes on in the range that the model came with.
    settings["model"] = {"folder": str(tmp_path / "out/model")}
    del settings["data"]["mean"]
    settings["run"] = {"folder": str(tmp_path / "more"), "steps": 1, "device": "cpu"}
    assert train(parse_run(settings), progress=False).state.data["mean"] == 0.4
    assert float(image_normalization(load(tmp_path / "more/model"), 1)[0]) == pytest.approx(0.4)


def photos(folder: Path) -> dict[str, Any]:
    """A run on image files of several sizes, grey and in color."""
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number, shape in enumerate([(8, 8, 3), (20, 11, 3), (13, 30)]):
            pixels = draw.integers(0, 256, shape).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"photos/{name}/{number}.png")
    change = {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "image": 8, "patch": 4}
    return {
        "model": {"size": "vit-b16", "change": change, "classes": 2},
        "data": {"kind": "images", "train": str(folder / "photos"), "batch": 6},
        "objective": {"kind": "ImageClassification"},
        "run": {"folder": str(folder / "out"), "steps": 1, "device": "cpu"},
    }


@pytest.mark.parametrize(("size", "trained"), [(None, 8), (12, 12)])
def test_image_files_are_read_in_training_as_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, trained: int
) -> None:
    settings = photos(tmp_path)
    settings["data"] |= {"mean": 0.4} if size is None else {"size": size}
    seen: list[Any] = []
    prepare = ImageClassification.prepare

    def watching(self: ImageClassification, model: Any, batch: Any, generator: Any) -> Any:
        seen.append(batch)
        return prepare(self, model, batch, generator)

    monkeypatch.setattr(ImageClassification, "prepare", watching)
    train(parse_run(settings), progress=False)
    model = load(tmp_path / "out/model")
    said = json.loads(model.side_files["preprocessor_config.json"])
    assert said["size"] == {"height": trained, "width": trained}
    files = sorted((tmp_path / "photos").rglob("*.png"))
    used = {tuple(read_image(model, file).flatten().tolist()) for file in files}
    assert {tuple(image.flatten().tolist()) for image in seen[0].images} == used


def test_images_that_the_model_would_not_read_so_are_refused_at_the_start(tmp_path: Path) -> None:
    settings = photos(tmp_path)
    for change, message in (
        ({"size": 10}, "data.size=10 is not a multiple of the patch size 4: use 8"),
        ({"channels": 1}, "data.channels=1, and the model reads 3"),
        ({"std": 0}, "std=0.0 cannot normalize images"),
        ({"std": -0.5}, "std=-0.5 cannot normalize images"),
    ):
        with refuses(ConfigError, message):
            train(parse_run({**settings, "data": {**settings["data"], **change}}), progress=False)
    for shape, message in (
        ((6, 12, 12, 3), "images of 12 x 12 pixels...set data.size=12...only image files"),
        ((6, 8, 8), "8 x 8 pixels and 1 channels...convert the arrays"),
        ((6, 8, 12, 3), "8 x 12 pixels...convert the arrays"),
    ):
        labels = np.arange(6) % 2
        np.savez(tmp_path / "images.npz", images=np.zeros(shape, np.uint8), labels=labels)
        data = {**settings["data"], "train": str(tmp_path / "images.npz")}
        with refuses(InputError, message):
            train(parse_run({**settings, "data": data}), progress=False)


def test_recomputed_layers_give_the_same_run(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    result = []
    for recompute in ("none", "all", [1]):
        settings = tables(tmp_path, dropout=0.1, steps=3, recompute=recompute)
        train(parse_run(settings), fresh=True, progress=False)
        result.append(losses(tmp_path))
    assert result[0] == result[1] == result[2]


def test_regularizers_are_logged_by_name_and_not_saved_in_the_model(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    settings = tables(tmp_path, steps=3)
    settings["objective"]["z_loss"] = 1e-4
    settings["regularizer"] = [
        {"kind": "L0Gates", "weight": 0.01},
        {"kind": "HeadDiversity", "weight": 0.1},
    ]
    train(parse_run(settings), progress=False)
    line = MetricsLog(tmp_path / "out/metrics.jsonl").read()[-1]
    assert set(line["parts"]) == {"z", "open heads", "head outputs"}
    assert "head_gates" not in " ".join(load(tmp_path / "out/model").state_dict())
    # Gates are trained along, so a run goes on with them.
    settings["run"]["steps"] = 5
    assert train(parse_run(settings), progress=False).state.step == 5


def test_a_larger_model_starts_from_a_smaller_one(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    train(tiny(tmp_path, steps=2), progress=False)
    settings = tables(tmp_path, steps=1)
    settings["model"]["tile"] = str(tmp_path / "out/model")
    settings["model"]["change"] |= {"layers": 3, "width": 32}
    settings["run"]["folder"] = str(tmp_path / "large")
    train(parse_run(settings), progress=False)
    assert load(tmp_path / "large/model").config.stack.width == 32


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    train(tiny(tmp_path, steps=1), progress=False)
    settings = tables(tmp_path, steps=2)
    settings["model"]["change"]["width"] = 32
    there = tmp_path / "out/checkpoints/step-1"
    message = (
        f"{there} has (300, 16) for embedding.tokens.weight, and the model needs (300, 32): "
        "resume with the model and the regularizers that the run was started with."
    )
    with refuses(InputError, message):
        train(parse_run(settings), resume_from="step-1", progress=False)


def test_half_precision_learns_too(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    train(tiny(tmp_path, steps=4, precision="bfloat16"), progress=False)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    weights = load(tmp_path / "out/model").state_dict().values()
    assert {weight.dtype for weight in weights} == {torch.float32}


def test_a_share_of_rows_is_held_out(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=20)
    rows = [{"first": f"the cat {number}", "second": f"a dog {number}"} for number in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tables(tmp_path, steps=1)
    settings["data"] |= {
        "kind": "pairs",
        "train": str(tmp_path / "pairs.jsonl"),
        "validation": 0.25,
    }
    del settings["data"]["separator"]
    settings["objective"] = {"kind": "Contrastive"}
    train(parse_run(settings), progress=False)
    lines = MetricsLog(tmp_path / "out/metrics.jsonl").read()
    assert lines[-1]["validation"]["loss"] > 0
