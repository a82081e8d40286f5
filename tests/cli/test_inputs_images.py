"""ablate, prune and compare for models that see, as a person at a terminal meets them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads import build, lens, load, read_image, save
from manyheads.cli.main import main
from manyheads.models.readout import NoReadout

SHAPE = {"layers": 2, "width": 32, "heads": 2, "hidden": 32, "image": 16, "patch": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of two classes, one of none, and eight images."""
    folder, draw = tmp_path_factory.mktemp("seeing"), np.random.default_rng(0)
    for label, bright in (("cat", 60), ("dog", 190)):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(4):
            pixels = draw.normal(bright, 40, (20, 20, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")
    for name, seed in (("one", 0), ("two", 1)):
        model = build("vit-b16", seed=seed, classes=2, **SHAPE)
        with torch.no_grad():
            # A fresh one answers the same to every image.
            model.readout.weight.normal_(generator=torch.Generator().manual_seed(seed))
        save(model, folder / name)
    mute = replace(build("vit-b16", seed=0, **SHAPE).config, readout=NoReadout())
    save(build(mute, seed=0), folder / "mute")
    return folder


def test_images_are_inspected(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = place / "photos"
    words = ["inspect", str(place / "one"), "--image"]
    assert main([*words, str(photos / "cat" / "0.png"), str(photos / "dog")]) == 0
    assert "Measured on 5 images, 25 patches." in " ".join(capsys.readouterr().out.split())
    assert main([*words, str(photos), "--tokens", "10"]) == 0
    assert "Measured on 2 images, 10 patches." in " ".join(capsys.readouterr().out.split())
    assert main([*words, str(photos / "none.png")]) == 2
    assert "none.png" in capsys.readouterr().err
    assert main(words[:2]) == 0
    assert "Measured on 16 random images, 80 patches." in " ".join(capsys.readouterr().out.split())


def test_heads_are_ablated_on_one_folder_per_class(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    arguments = ["ablate", str(place / "one"), "--image", str(place / "photos"), "--json", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "over 8 images" in " ".join(said.split())
    model = load(place / "one")
    files = sorted((place / "photos").rglob("*.png"))
    images = [read_image(model, file) for file in files]
    targets = [int(file.parent.name == "dog") for file in files]
    exact = lens.ablate(model, images, targets=targets, progress=False)
    result = lens.load(out)
    np.testing.assert_allclose(result.means["change"], exact.means["change"], atol=1e-6)


def test_tokens_limit_how_many_images_are_sampled(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ablate", str(place / "one"), "--image", str(place / "photos"), "--heads", "L0H0"]
    out = tmp_path / "few.json"
    # Four patches and the class token make five.
    assert main([*arguments, "--tokens", "17", "--json", str(out)]) == 0
    assert "over 3 images" in " ".join(capsys.readouterr().out.split())
    assert json.loads(out.read_text())["fields"]["metadata"]["texts"] == 3


def test_a_model_without_classes_is_compared_with_itself(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", str(place / "mute"), "--image", str(place / "photos" / "cat")]) == 0
    assert "The similarity of the full model" in capsys.readouterr().out


def test_heads_are_pruned_and_recovered_by_images(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prune", str(place / "one"), "--image", str(place / "photos"), "--fraction", "0.5"]
    assert (
        main([*arguments, "--tokens", "20", "--recover", "2", "-o", str(tmp_path / "small")]) == 0
    )
    message = capsys.readouterr()
    assert "2 of 4 heads removed by ablation, evaluated on 4 images" in message.out
    assert "after recovery" in message.out
    assert "recovery trains on them too" not in message.err, "four images were left to recover on"
    small = load(tmp_path / "small")
    image = read_image(small, place / "photos/cat/0.png")
    assert small(image[None]).logits.shape == (1, 2)


def test_two_models_are_compared_on_images(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "compare",
        str(place / "one"),
        str(place / "two"),
        "--image",
        str(place / "photos"),
    ]
    assert main([*arguments, "--no-kinds"]) == 0
    assert "4 heads compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "one"], "this model reads images: give a folder of them with --image."),
        (["ablate", "house-gpt", "--image", "photos"], "--image needs a vision model"),
        (["ablate", "one", "--image", "photos/cat"], "photos/cat"),
        (["ablate", "one", "--image", "photos/cat/0.png"], "0.png is not a folder"),
        (["ablate", "one", "--image", "."], "folders and the model 2 classes"),
        (["ablate", "one", "--image", "photos", "--text", "a"], "--image excludes --text"),
        (
            ["ablate", "one", "--image", "photos", "--tokens", "0"],
            "at least 1, got 0",
        ),
        (["prune", "one"], "--file or --image"),
        (["compare", "one", "two"], "this model reads images: give a folder of them with --image."),
    ],
)
def test_inputs_that_the_model_cannot_read_are_refused(
    arguments: list[str],
    message: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
