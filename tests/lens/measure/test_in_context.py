"""The in-context score: the losses at two positions, and what it refuses."""

from pathlib import Path

import pytest
import torch

from manyheads import lens
from manyheads.errors import ConfigError, InputError
from manyheads.lens.measure.in_context import in_context_score
from manyheads.models.build import build
from tests.lens.planted import WORDS, planted_model
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, small


def test_the_score_is_the_difference_of_two_losses() -> None:
    model = small(DECODERS["llama"])
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 20, (length,), generator=generator) for length in (9, 12, 3, 10)]
    result = in_context_score(model, [text.tolist() for text in texts], early=2, late=8)
    losses = []
    for text in texts:
        if len(text) > 8:
            with torch.no_grad():
                logits = model(text[None]).logits[0]
            losses.append([float(-logits[at - 1].log_softmax(-1)[text[at]]) for at in (2, 8)])
    early, late = torch.tensor(losses).double().unbind(1)
    assert result.texts == 3
    assert result.early_loss == pytest.approx(float(early.mean()), rel=1e-4)
    assert result.late_loss == pytest.approx(float(late.mean()), rel=1e-4)
    assert result.score == pytest.approx(float((late - early).mean()), abs=1e-5)
    assert result.error == pytest.approx(float((late - early).std() / 3**0.5), rel=1e-3)


def test_induction_predicts_better_late_in_repeated_text() -> None:
    model, _ = planted_model()
    with torch.no_grad():
        # What induction finds is read as the next word.
        model.readout.weight.zero_()
        model.readout.weight[:, -WORDS:] = 10 * torch.eye(WORDS)
    block = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))[:12].tolist()
    assert in_context_score(model, [block * 2], early=5, late=20).score < -1


def test_models_and_texts_that_are_too_short_are_refused() -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=30, positions=16, seed=0)
    text = list(range(16))
    with refuses(InputError, "late=500", "501", "16"):
        in_context_score(model, [text])
    with refuses(InputError, "late=16", "late=15"):
        in_context_score(model, [text], early=2, late=16)
    with refuses(InputError, "11 tokens", "longer"):
        in_context_score(model, [text[:10]], early=2, late=10)
    with refuses(ConfigError, "late", "6"):
        in_context_score(model, [text], early=5, late=5)
    with refuses(InputError, "next tokens", "decoder"):
        in_context_score(small(ENCODERS["bert"]), [text], early=2, late=5)


def test_it_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = small(DECODERS["gpt2"])
    result = in_context_score(model, [[1, 2, 3, 4, 5, 6]], early=1, late=4)
    result.save(tmp_path / "score.json")
    loaded = lens.load(tmp_path / "score.json")
    assert str(loaded) == str(result)
    assert loaded.score == result.score
