"""ONNX files of encoders under onnxruntime, against the models themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from manyheads import surgery
from manyheads.bridge.wrapped_model import wrap
from manyheads.checkpoints.folder import load
from manyheads.checkpoints.onnx_file import save_onnx
from manyheads.cli.main import main
from manyheads.encoding.encode import encode
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.provenance import DenseProjection, SentenceConfig
from tests.bridge.zoo import LOCAL, TEXT, tiny

onnxruntime = pytest.importorskip("onnxruntime")

LABELS = {"num_labels": 3}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "classes": ("BertForSequenceClassification", "BertConfig", TEXT | LABELS),
    "tags": (
        "BertForTokenClassification",
        "BertConfig",
        TEXT | LABELS | {"hidden_act": "quick_gelu"},
    ),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", TEXT | LOCAL),
    "modernbert_base": ("ModernBertModel", "ModernBertConfig", TEXT | LOCAL),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT | {"pad_token_id": 1}),
}


def folder_of(name: str, folder: Path) -> Path:
    model_class, config_class, arguments = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(
        getattr(transformers, config_class)(**arguments)
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def run(path: Path, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    wanted = [each.name for each in session.get_inputs()]
    names = [each.name for each in session.get_outputs()]
    made = session.run(None, {name: fed[name].numpy() for name in wanted})
    return {name: torch.from_numpy(each) for name, each in zip(names, made, strict=True)}


def padded(lengths: tuple[int, ...], left: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    longest = max(lengths)
    ids = torch.randint(3, 60, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return ids, mask.flip(1) if left else mask


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = load(folder_of(name, tmp_path / "model"))
    written = save_onnx(model, tmp_path / "model.onnx")
    assert written.difference is not None
    assert written.difference < 1e-4
    for lengths in ((1,), (9, 4), (30, 30, 2, 17)):
        for left in (False, True):
            ids, mask = padded(lengths, left)
            made = run(written.path, ids, mask)
            with torch.no_grad():
                output = model(ids, mask)
            for key, expected in (("last_hidden_state", output.hidden), ("logits", output.logits)):
                if expected is None:
                    assert key not in made
                    continue
                assert isinstance(expected, Tensor)
                keep = mask.bool() if expected.dim() == 3 else slice(None)
                torch.testing.assert_close(made[key][keep], expected[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_embeddings(pooling: Any, normalize: bool, tmp_path: Path) -> None:
    model = load(folder_of("modernbert_base", tmp_path / "model"))
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) / 6
    dense = (DenseProjection(weight, torch.ones(5)),) if normalize else ()
    model.sentence = SentenceConfig(pooling=pooling, dense=dense, normalize=normalize)
    written = save_onnx(model, tmp_path / "model.onnx")
    ids, mask = padded((6, 2, 11))
    texts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    expected = np.asarray(encode(model, texts))
    made = run(written.path, ids, mask)["sentence_embedding"].numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)


def test_small_files(tmp_path: Path) -> None:
    model = load(folder_of("bert", tmp_path / "model"))
    files = {
        kind: save_onnx(model, tmp_path / f"{kind}.onnx", kind)
        for kind in ("float32", "float16", "int8")
    }
    sizes = {kind: each.bytes for kind, each in files.items()}
    # The names of nodes and the norms stay, and this model is tiny.
    assert sizes["int8"] < sizes["float16"] < sizes["float32"]
    ids, mask = padded((9, 5))
    expected = run(files["float32"].path, ids, mask)["last_hidden_state"][mask.bool()]
    for kind, near in (("float16", 0.9999), ("int8", 0.99)):
        made = run(files[kind].path, ids, mask)["last_hidden_state"][mask.bool()]
        assert torch.cosine_similarity(made, expected).min() > near


def test_pruned_heads(tmp_path: Path) -> None:
    model = load(folder_of("modernbert", tmp_path / "model"))
    smaller = surgery.prune(model, ["L0H1", "L1H0", "L1H1", "L1H2", "L1H3"])
    written = save_onnx(smaller, tmp_path / "model.onnx")
    assert written.difference is not None
    assert written.difference < 1e-4


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    decoder = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    for model in (decoder, wrap(tiny("bert"))):
        with pytest.raises(InputError, match="encoder"):
            save_onnx(model, path)
    assert not path.exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("bert", tmp_path / "model")
    target = tmp_path / "model.onnx"
    assert main(["convert", str(folder), "-o", str(target)]) == 0
    assert "MiB" in capsys.readouterr().out
    large = target.stat().st_size
    assert main(["convert", str(folder), str(target), "--int8"]) == 0
    assert target.stat().st_size < large
    assert main(["convert", str(folder), str(tmp_path / "other"), "--int8"]) != 0
    assert "--int8" in capsys.readouterr().err
    assert main(["convert", str(folder), "-o", str(target), "--dtype", "bfloat16"]) != 0
