"""A report of an image: patches in place of tokens, weights laid over the picture."""

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from manyheads.checkpoints.folder import save
from manyheads.cli.main import main
from manyheads.data.images import image_normalization
from manyheads.lens.attention_maps.patterns import patterns
from manyheads.report.data import ReportData, collect_report
from manyheads.report.inputs import read_image
from manyheads.report.page import render_report, write_report
from manyheads.taps import Head
from tests.chromium import needs_chromium, open_browser
from tests.studio.models import vision


def sharp() -> Any:
    """A model whose heads look somewhere."""
    model = vision()
    for parameter in model.parameters():
        parameter.data.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "photo.png"
    across = np.linspace(0, 1, 48)
    pixels = np.stack([across[None] * np.ones((40, 1)), across[:40, None] * np.ones(48)], -1)
    matplotlib.image.imsave(path, np.concatenate([pixels, 0 * pixels[..., :1]], -1))
    return path


@pytest.fixture(scope="module")
def measured(photo: Path) -> ReportData:
    return collect_report(sharp(), photo, name="a vit", progress=False)


def test_an_image_is_brought_to_the_size_and_range_of_the_model(photo: Path) -> None:
    model = vision()
    picture = read_image(model, photo)
    assert picture.pixels.shape == (3, 32, 32)
    assert -1 <= float(picture.pixels.min()) < -0.9
    assert 0.9 < float(picture.pixels.max()) <= 1
    assert picture.patches[:3] == ["class", "row 0 column 0", "row 0 column 1"]
    assert len(picture.patches) == 1 + 4 * 4


def test_a_model_has_its_own_range_of_pixels() -> None:
    model = vision()
    model.side_files = {"preprocessor_config.json": b'{"image_mean": [0.1, 0.2, 0.3]}'}
    mean, deviation = image_normalization(model, 3)
    assert torch.allclose(mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert deviation.flatten().tolist() == [0.5, 0.5, 0.5]


def test_the_kept_weights_are_those_of_the_patterns(measured: ReportData) -> None:
    assert measured.input.image is not None
    whole = patterns(measured.model, [measured.input.image.pixels], [Head(1, 2)])
    kept = next(each for each in measured.largest if each.address.head == Head(1, 2))
    weights = whole.of(Head(1, 2)).weights
    assert torch.allclose(weights.gather(1, kept.keys.long()), kept.weights, atol=1e-6)


def test_the_page_speaks_of_the_image(measured: ReportData) -> None:
    page = render_report(measured, model_path="vit/", text_file="text.txt")
    assert "data:image/png;base64," in page
    assert "4 x 4 patches behind the class token" in page
    assert "manyheads prune" not in page
    assert "does not say what the right class is" in page


def test_the_command_draws_where_the_class_token_looks(
    photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sharp(), tmp_path / "vit")
    inputs = ["report", str(tmp_path / "vit"), "-o", str(tmp_path / "vit.html")]
    drawn = tmp_path / "drawn"
    assert main([*inputs, "--image", str(photo), "--pictures", str(drawn)]) == 0
    assert len(list(drawn.glob("class-*.png"))) == 1
    assert main(inputs) == 2
    assert "pass one with --image" in capsys.readouterr().err
    assert main([*inputs, "--image", str(tmp_path / "vit" / "config.json")]) == 2
    assert "is not an image: use a PNG or a JPEG" in capsys.readouterr().err
    assert main([*inputs, "--image", str(photo), "--text", "a"]) == 2
    assert main(["report", "house-gpt", "--image", str(photo)]) == 2
    assert "does not read images" in capsys.readouterr().err


@needs_chromium
def test_patches_lie_over_the_image_in_a_browser(measured: ReportData, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    path = tmp_path / "report.html"
    write_report(render_report(measured, model_path="vit/", text_file="text.txt"), path)
    page = open_browser().new_page(viewport={"width": 1280, "height": 1400})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text))
    page.goto(path.as_uri())
    image = page.locator("#view-text img").bounding_box()
    last = page.locator("#view-text .token").last
    box = last.bounding_box()
    assert image is not None
    assert box is not None
    assert box["x"] + box["width"] == pytest.approx(image["x"] + image["width"], abs=2)
    assert box["width"] == pytest.approx(image["width"] / 4, abs=2)
    last.hover()
    expect(page.locator("#summary")).to_contain_text("row 3 column 3")
    page.close()
    assert faults == []
