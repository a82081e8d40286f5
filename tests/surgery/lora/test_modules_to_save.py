"""Heads that are saved with an adapter: switched with it, folded with it, and in peft's files."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from manyheads import build, load, save, surgery, with_classes
from manyheads.errors import ConfigError, InputError
from manyheads.surgery import LoraConfig
from manyheads.surgery.lora.peft_files import check_saveable
from tests.messages import refuses

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
SIZES: dict[str, dict[str, Any]] = {
    "bert-base": {"hidden": 32},
    "modernbert-base": {"hidden": 32},
    "gpt2": {},
    "llama-1b-shape": {"hidden": 32, "kv_heads": 2, "head_size": 8},
}
TASK = LoraConfig(rank=2, modules_to_save=("readout",))


def classes(size: str = "bert-base") -> Any:
    model = build(size, layers=2, width=32, heads=4, vocabulary=60, seed=0, **SIZES[size])
    return with_classes(model, 3)


def learn(model: Any, answers: tuple[int, int] = (0, 1)) -> Tensor:
    """Two steps of what learns, and what the model says then."""
    learns = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(learns, lr=1.0)
    for _ in range(2):
        F.cross_entropy(model(IDS).logits, torch.tensor(answers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        said: Tensor = model(IDS).logits
    return said


@torch.no_grad()
def says(model: Any) -> Tensor:
    said: Tensor = model(IDS).logits
    return said


def test_a_head_learns_with_its_adapter_and_goes_with_it() -> None:
    model = classes()
    before = says(model)
    result = surgery.adapt(model, TASK, "one")
    assert str(result) == "one: 1,667 parameters in 4 projections and in readout"
    assert torch.equal(says(model), before)
    one = learn(model)
    surgery.adapt(model, TASK, "two")
    # It starts with the model's own head and not with the other adapter's.
    assert torch.equal(says(model), before)
    two = learn(model, (2, 2))
    for name, said in (("one", one), ("two", two)):
        surgery.set_adapter(model, name)
        assert torch.equal(says(model), said)
    surgery.set_adapter(model)
    assert torch.equal(says(model), before)
    message = "'one' and 'two' both have their own readout.weight: use one of them at a time."
    with refuses(ConfigError, message):
        surgery.set_adapter(model, "one", "two")
    surgery.delete_adapter(model, "one")
    surgery.set_adapter(model, "two")
    assert torch.equal(says(model), two)
    surgery.delete_adapter(model)
    assert torch.equal(says(model), before)
    assert set(model.state_dict()) == set(classes().state_dict())


def test_merged_it_is_the_models_own(tmp_path: Path) -> None:
    model = classes()
    before = says(model)
    surgery.adapt(model, TASK)
    said = learn(model)
    with pytest.raises(ConfigError, match="the model has adapters"):
        save(model, tmp_path)
    surgery.merge(model)
    torch.testing.assert_close(says(model), said)
    surgery.unmerge(model)
    torch.testing.assert_close(says(model), said)
    surgery.set_adapter(model)
    torch.testing.assert_close(says(model), before)
    surgery.merge(model, "default")
    surgery.delete_adapter(model)
    save(model, tmp_path)
    torch.testing.assert_close(says(load(tmp_path)), said)


@pytest.mark.parametrize("size", list(SIZES))
def test_peft_reads_what_we_write_and_the_reverse(size: str, tmp_path: Path) -> None:
    model = classes(size)
    save(model, tmp_path / "base")
    surgery.adapt(model, TASK)
    said = learn(model)
    surgery.save_adapter(model, tmp_path / "ours")
    kind = getattr(transformers, model.source_config["architectures"][0])
    peer = kind.from_pretrained(tmp_path / "base").eval()
    peer.config.pad_token_id = 0
    adapted = peft.PeftModel.from_pretrained(peer, tmp_path / "ours").eval()
    torch.testing.assert_close(says(adapted), said, rtol=1e-4, atol=1e-5)
    adapted.save_pretrained(tmp_path / "back")
    again = load(tmp_path / "base")
    surgery.load_adapter(again, tmp_path / "back")
    torch.testing.assert_close(says(again), said, rtol=1e-4, atol=1e-5)


def test_adapters_that_peft_makes_for_classes_are_read(tmp_path: Path) -> None:
    save(classes(), tmp_path / "base")
    kind = transformers.BertForSequenceClassification
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    peer = peft.get_peft_model(kind.from_pretrained(tmp_path / "base"), config).eval()
    with torch.no_grad():
        for name, each in peer.named_parameters():
            if each.requires_grad:
                each.add_(torch.full_like(each, 0.1 if "lora" in name else 0.3))
    peer.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "base")
    result = surgery.load_adapter(ours, tmp_path / "theirs")
    assert set(result.modules) == {"readout.weight", "readout.bias"}
    torch.testing.assert_close(says(ours), says(peer), rtol=1e-4, atol=1e-5)


def test_modules_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    words = build("gpt2", layers=1, width=16, heads=2, vocabulary=60, seed=0)
    message = (
        "modules_to_save has 'readout', and readout and embedding are tied to each other: "
        "leave it out."
    )
    with refuses(ConfigError, message):
        surgery.adapt(words, TASK)
    with refuses(
        ConfigError, "modules_to_save has 'readout', which this model does not have: leave it out."
    ):
        surgery.adapt(build("tiny-encoder", seed=0), TASK)
    model = classes()
    surgery.adapt(model, TASK)
    surgery.save_adapter(model, tmp_path)
    with refuses(InputError, "classifier.bias of shape (3,), expected (4,)", "use an adapter"):
        surgery.load_adapter(with_classes(model_without_head(), 4), tmp_path)
    with refuses(InputError, "bert.pooler.dense.bias", "with_classes(model, classes)"):
        surgery.load_adapter(model_without_head(), tmp_path)


def model_without_head() -> Any:
    return build(
        "bert-base", layers=2, width=32, heads=4, vocabulary=60, seed=0, **SIZES["bert-base"]
    )


def test_an_embedding_is_saved_too(tmp_path: Path) -> None:
    model = classes("llama-1b-shape")
    save(model, tmp_path / "base")
    surgery.adapt(model, LoraConfig(rank=2, modules_to_save=("readout", "embedding")))
    said = learn(model)
    surgery.save_adapter(model, tmp_path / "ours")
    again = load(tmp_path / "base")
    result = surgery.load_adapter(again, tmp_path / "ours")
    assert set(result.modules) == {"readout.weight", "embedding.tokens.weight"}
    torch.testing.assert_close(says(again), said)


def test_what_peft_has_no_name_for_is_refused() -> None:
    model = classes()
    check_saveable(model, ["readout.weight"])
    address = "stack.layers.0.attention.project.weight"
    with refuses(ConfigError, address, "leave it out of modules_to_save"):
        check_saveable(model, [address])
