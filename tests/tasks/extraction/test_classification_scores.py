"""Scores of classes are those of scikit-learn, with one label per text and with several."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics

from manyheads import classify, load, save, tasks, with_classes
from manyheads.checkpoints.classification_head import set_classifier
from manyheads.encoding.classify import Classification
from manyheads.errors import ConfigError, InputError
from manyheads.models.readout import ClassifierSettings, classifier_of
from manyheads.pictures import draw_confusion
from manyheads.train import parse_run, train
from tests.encoding.tiny import as_ids, small
from tests.messages import refuses

NAMES = ("a", "b", "c", "rare")
TEXTS = ["the cat sat", "on the mat", "by the door"]


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_scores_of_one_label_are_those_of_sklearn(average: str) -> None:
    expected = [NAMES[i] for i in np.random.default_rng(0).integers(0, 3, 60)]
    result = [NAMES[i] for i in np.random.default_rng(1).integers(0, 3, 60)]
    scores = tasks.score_classes(expected, result, names=NAMES)
    peer = metrics.precision_recall_fscore_support(
        expected, result, labels=NAMES, average=average, zero_division=0
    )[:3]
    micro = (scores.micro.precision, scores.micro.recall, scores.micro_f1)
    macro = (scores.macro_precision, scores.macro_recall, scores.macro_f1)
    assert (micro if average == "micro" else macro) == pytest.approx(peer)
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(expected, result))
    matrix = metrics.confusion_matrix(expected, result, labels=NAMES)
    assert scores.confusion is not None
    assert scores.confusion.tolist() == matrix.tolist()


def test_scores_of_several_labels_are_those_of_sklearn() -> None:
    right, inputs = (np.random.default_rng(seed).random((50, 4)) < 0.3 for seed in (2, 3))
    right[:, 3] = False
    sets = [
        [[name for name, is_label in zip(NAMES, row, strict=True) if is_label] for row in each]
        for each in (right, inputs)
    ]
    scores = tasks.score_classes(*sets, names=NAMES)
    for average, ours in (
        ("micro", (scores.micro.precision, scores.micro.recall, scores.micro_f1)),
        ("macro", (scores.macro_precision, scores.macro_recall, scores.macro_f1)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = metrics.precision_recall_fscore_support(
                right, inputs, average=average, zero_division=0
            )[:3]
        assert ours == pytest.approx(peer)
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(right, inputs))
    assert scores.confusion is None
    assert "macro" in str(scores)


def test_numbers_are_classes_and_unknown_labels_are_refused() -> None:
    shares = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    scores = tasks.score_classes([0, "b"], Classification(shares, ("a", "b")))
    assert (scores.accuracy, scores.names) == (1.0, ("a", "b"))
    assert scores.calibration_error == pytest.approx(0.15)
    assert tasks.score_classes([2, 10], [2, 2]).names == ("2", "10")
    with refuses(InputError, "text 1", "'z'", "use one of: a, b"):
        tasks.score_classes(["a", "z"], ["a", "b"], names=("a", "b"))
    with refuses(InputError, "2 expected", "1 predicted"):
        tasks.score_classes(["a", "b"], ["a"])
    with refuses(InputError, "several labels", "one per text"):
        tasks.score_classes([["a", "b"], ["b"]], Classification(shares, ("a", "b")))


def test_several_labels_are_saved_and_read_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = with_classes(small(), ("a", "b", "c"), multi_label=True, seed=1)
    model.readout.weight.data *= 20
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert classifier_of(again) == ClassifierSettings(multi_label=True)
    result = classify(again, TEXTS)
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert peer.config.problem_type == "multi_label_classification"
    with torch.no_grad():
        for text, row in zip(TEXTS, result.probabilities, strict=True):
            logits = peer(input_ids=torch.tensor([as_ids(text)])).logits[0]
            torch.testing.assert_close(row, logits.sigmoid(), atol=1e-5, rtol=1e-5)
    assert result.label_sets == tuple(
        tuple(name for name, share in zip(result.names, row, strict=True) if share >= 0.5)
        for row in result.probabilities.tolist()
    )
    set_classifier(again, ClassifierSettings(multi_label=True, thresholds=(0.0, 1.0, 0.0)))
    assert classify(again, TEXTS).label_sets == (("a", "c"),) * 3
    save(again, tmp_path / "tuned")
    assert classifier_of(load(tmp_path / "tuned")).thresholds == (0.0, 1.0, 0.0)
    with refuses(ConfigError, "1 threshold or 3", "got 2"):
        set_classifier(again, ClassifierSettings(thresholds=(0.1, 0.2)))


def test_a_confusion_matrix_is_drawn(tmp_path: Path) -> None:
    draw_confusion([[3, 1], [0, 5]], ("a", "b"), tmp_path / "a.png", title="Confusion")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_learns_several_labels_per_text(tmp_path: Path) -> None:
    save(small(), tmp_path / "start")
    rows: list[tuple[str, list[str]]] = [("aaaa", ["x", "y"]), ("bbbb", []), ("aaa", ["x", "y"])]
    lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tables = {
        "model": {"folder": str(tmp_path / "start"), "classes": "data"},
        "data": {
            "kind": "labeled",
            "train": str(tmp_path / "train.jsonl"),
            "max_length": 32,
            "batch": 64,
        },
        "objective": {"kind": "MultiLabelClassification"},
        "optimizer": {"lr": 3e-3},
        "run": {"folder": str(tmp_path / "run"), "steps": 40, "device": "cpu"},
    }
    train(parse_run(tables), progress=False)
    result = classify(load(tmp_path / "run/model"), [text for text, _ in rows])
    assert result.multi_label
    assert [list(labels) for labels in result.label_sets] == [labels for _, labels in rows]
    tables["objective"] = {"kind": "SequenceClassification"}
    with refuses(InputError, "one label per text", "MultiLabelClassification"):
        train(parse_run(tables), progress=False, fresh=True)
