"""Folders of families that manyheads does not open itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import manyheads
from manyheads import lens, surgery
from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.errors import InputError, NativeModelError, WrappedModelWarning
from manyheads.taps import Head
from tests.bridge.zoo import SOURCES, TEXT, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("stablelm").save_pretrained(tmp_path)
    words = {f"w{number}": number for number in range(60)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def test_an_unknown_family_is_opened_by_transformers(folder: Path) -> None:
    with pytest.warns(WrappedModelWarning, match="stablelm"):
        model = manyheads.load(folder)
    assert isinstance(model, WrappedModel)
    result = lens.statistics(model, ["w5 w6 w5 w6"], progress=False)
    direct = lens.statistics(wrap(tiny("stablelm")), [[5, 6, 5, 6]], progress=False)
    assert result["entropy"].ranked() == direct["entropy"].ranked()
    with pytest.raises(NativeModelError):
        manyheads.save(model, folder / "copy")


@pytest.mark.parametrize(
    "entries",
    [
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"_attn_implementation": "somebody/kernel"},
        {"text_config": {"_attn_implementation_internal": "somebody/kernel"}},
        {"experts_implementation": "somebody/kernel"},
    ],
)
def test_code_is_never_run(folder: Path, entries: dict[str, Any]) -> None:
    change(folder, **entries)
    with pytest.raises(InputError) as caught:
        manyheads.load(folder)
    assert "config.json" in str(caught.value)


def test_pickles_are_never_read(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(tiny("stablelm").state_dict(), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(InputError) as caught:
        manyheads.load(folder)
    assert "safetensors" in str(caught.value)


def test_a_family_that_nobody_knows(folder: Path) -> None:
    change(folder, model_type="nobody")
    with pytest.raises(InputError) as caught:
        manyheads.load(folder)
    assert "nobody" in str(caught.value)


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.FNetConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(InputError) as caught:
        wrap(transformers.FNetForMaskedLM(config))
    assert "FNetForMaskedLM" in str(caught.value)


def test_a_part_that_a_wrapped_model_lacks_is_refused_by_name() -> None:
    wrapped = wrap(tiny("llama"))
    with pytest.raises(NativeModelError):
        lens.circuits(wrapped).ov(Head(0, 0))
    with pytest.raises(NativeModelError):
        surgery.prune(wrapped, ["L0H0"])
    assert not hasattr(wrapped, "embedding")


def test_something_else_is_not_wrapped() -> None:
    with pytest.raises(InputError, match="Linear"):
        wrap(torch.nn.Linear(2, 2))


def test_texts_without_a_tokenizer() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        lens.statistics(wrap(tiny("llama")), ["a text"], progress=False)


def test_too_long_a_text_is_refused() -> None:
    longest = TEXT["max_position_embeddings"]
    with pytest.raises(InputError, match=str(longest)):
        lens.statistics(wrap(tiny("gpt2")), [SOURCES[0] * 10], progress=False)
