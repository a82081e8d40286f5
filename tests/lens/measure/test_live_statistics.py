"""Statistics of models that somebody else trains or runs."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import manyheads
from manyheads import lens
from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import ConfigError, InputError
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Tap
from tests.bridge.zoo import SOURCES, tiny


def padded() -> dict[str, torch.Tensor]:
    longest = max(map(len, SOURCES))
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in SOURCES]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in SOURCES]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_forward_of_your_own_gives_the_statistics_of_the_lens(name: str) -> None:
    model = tiny(name)
    with manyheads.monitor(model) as heads, torch.no_grad():
        model(**padded())
    result, expected = heads.statistics(), lens.statistics(model, SOURCES, progress=False)
    assert set(expected.names) <= set(result.names)
    for address in expected.addresses:
        for measure, value in expected.of(address).items():
            assert result.of(address)[measure] == pytest.approx(value, abs=1e-5, nan_ok=True)


def test_gradients_stay_the_same() -> None:
    model = copy.deepcopy(tiny("llama")).train()
    inputs = padded()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(**inputs).logits
        logits[inputs["attention_mask"] > 0].float().logsumexp(-1).sum().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = gradients()
    with manyheads.monitor(model) as heads:
        watched = gradients()
    assert heads.statistics().metadata["texts"] == 2
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_forward_that_fails_is_not_measured() -> None:
    model = tiny("gpt2")
    before = model.config._attn_implementation
    with manyheads.monitor(model) as heads:
        with pytest.raises(IndexError), torch.no_grad():
            model(torch.tensor([[5000]]))
        with pytest.raises(InputError, match="once"):
            heads.__enter__()
    with pytest.raises(InputError):
        heads.statistics()
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)


def test_every_other_forward_is_measured() -> None:
    model = tiny("gpt2")
    with manyheads.monitor(model, every=2) as heads, torch.no_grad():
        for _ in range(4):
            model(torch.tensor([SOURCES[0]]))
    assert heads.statistics().metadata["texts"] == 2
    heads.clear()
    with pytest.raises(InputError):
        heads.statistics()
    with pytest.raises(ConfigError, match="0"):
        manyheads.monitor(model, every=0)


def test_the_model_inside_another_is_found() -> None:
    outer = nn.Sequential(nn.Identity())
    outer.append(tiny("bert"))
    with manyheads.monitor(outer) as heads, torch.no_grad():
        outer[1](**padded())
    assert heads.statistics().metadata["texts"] == 2
    with pytest.raises(InputError, match="Linear"):
        manyheads.monitor(nn.Linear(2, 2))


def test_the_largest_logit_is_that_of_the_scores() -> None:
    model = tiny("llama")
    with manyheads.monitor(model) as heads, torch.no_grad():
        for ids in SOURCES:
            model(torch.tensor([ids]))
    result = heads.largest_logits()
    assert len(result) == 8
    wrapped = wrap(model)
    for layer in range(2):
        record = Record([Site(layer, Tap.SCORES)])
        wrapped(Ragged.from_list([torch.tensor(ids) for ids in SOURCES]), watch=record)
        scores = record[Site(layer, Tap.SCORES)]
        assert isinstance(scores, Patterns)
        largest = torch.stack([each.amax((1, 2)) for each in scores.each]).amax(0)
        values = [value for head, value in result.items() if head.head.layer == layer]
        assert values == pytest.approx(largest.tolist(), rel=1e-4)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result: dict[str, list[tuple[int, float]]] = {}
    for path in folder.iterdir():
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            result.setdefault(tag, []).extend(
                (each.step, each.value) for each in events.Scalars(tag)
            )
    return {tag: sorted(values) for tag, values in result.items()}


def test_a_training_is_followed_in_tensorboard(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("gpt2"))
    rows = [{"input_ids": ids, "labels": ids} for ids in [SOURCES[0]] * 8]
    heads = manyheads.monitor(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        callbacks=[heads.callback(tmp_path / "heads")],
    )
    trainer.train()
    result = curves(tmp_path / "heads")
    for name in ("entropy", "first_token", "induction_score", "largest_logit"):
        assert [step for step, _ in result[f"{name}/L1H3"]] == [2, 4]
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation != "manyheads"
    with pytest.raises(InputError):
        heads.statistics()


def test_a_sentence_transformer_is_measured(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    tiny("bert").bert.save_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(55))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    model = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["w5 w6 w7", "w8 w9 w8 w9 w8"]
    plain = model.encode(texts)
    with manyheads.monitor(model) as heads:
        watched = model.encode(texts)
    assert abs(plain - watched).max() < 1e-5
    assert heads.statistics().metadata["texts"] == 2
