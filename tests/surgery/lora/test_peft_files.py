"""Adapters that go to `peft` and come from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from manyheads import build, load, save
from manyheads.data.tokenizer_training import appending
from manyheads.errors import ConfigError, InputError, ManyheadsError
from manyheads.surgery import LoraConfig, adapt, delete_adapter, load_adapter, merge, save_adapter
from manyheads.surgery.lora import peft_files
from manyheads.surgery.lora.low_rank import LowRankUpdate
from manyheads.train.regularizers import L0Gates
from tests.data.tiny import tokenizer
from tests.messages import refuses
from tests.surgery.families import FAMILIES, shaken

EVERY = ("query", "key", "value", "output", "*.feedforward.*")
CONFIGS = {
    "every projection": LoraConfig(rank=3, alpha=5.0, targets=EVERY),
    "joined rows apart, stabilized": LoraConfig(targets=("query", "value"), rank=2, scaling="root"),
    "one layer": LoraConfig(targets=("output", "query"), rank=4, layers=(1,), alpha=4.0),
}
HEADS = {
    "gpt2": ("L0H1", "L1H0", "L1H2"),
    "bert": ("L0H2",),
    "llama": ("L1H0", "L1H1", "L1H2"),
    "modernbert": ("L1H1",),
    "t5": ("encoder L0H1", "decoder L1H2", "decoder L0H0 cross"),
    "vit": ("L1H2",),
}


def peft_over(family: Any, peer: Any, folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return family.of_theirs(PeftModel.from_pretrained(peer, folder).eval())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_our_adapter_opens_in_peft_with_the_same_logits(
    name: str, config: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    peer, ours = family.both(tmp_path)
    adapt(ours, CONFIGS[config])
    shaken(ours)
    save_adapter(ours, tmp_path / "adapter")
    with torch.no_grad():
        result = family.of_ours(ours)
        assert (result - family.of_theirs(peer)).abs().max() > 0.1
    expected = peft_over(family, peer, tmp_path / "adapter")
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_gates_that_an_adapter_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    adapt(model, LoraConfig(rank=2))
    L0Gates(weight=1.0).attach(model)
    with refuses(ConfigError, "gates of L0Gates", "adapter.merged=true"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_single_heads_are_saved_as_equal_whole_ones(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    peer, ours = family.both(tmp_path)
    targets = ("query", "key", "value", "output")
    adapt(ours, LoraConfig(rank=2, targets=targets, heads=HEADS[name]), "some")
    shaken(ours)
    save_adapter(ours, tmp_path / "adapter", "some")
    with torch.no_grad():
        result = family.of_ours(ours)
        expected = peft_over(family, peer, tmp_path / "adapter")
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        delete_adapter(ours)
        load_adapter(ours, tmp_path / "adapter", "again")
        torch.testing.assert_close(family.of_ours(ours), result, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_of_peft_opens_with_the_same_logits_and_gradients(
    name: str, stabilized: bool, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    peer, ours = family.both(tmp_path)
    modules, turned = list(family.modules), name == "gpt2"
    more = {"rank_pattern": {modules[0]: 5}, "alpha_pattern": {modules[1]: 7}}
    config = PeftConfig(
        r=3, lora_alpha=4, target_modules=modules, use_rslora=stabilized, fan_in_fan_out=turned
    )
    config.rank_pattern, config.alpha_pattern = more["rank_pattern"], more["alpha_pattern"]
    adapted = get_peft_model(peer, config).eval()
    shaken(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    load_adapter(ours, tmp_path / "adapter")
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(".adapters." in name)
    result, expected = family.of_ours(ours), family.of_theirs(adapted)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    result.square().mean().backward()
    expected.square().mean().backward()
    expected_gradients = {
        name.replace(".default", ""): each.grad
        for name, each in adapted.named_parameters()
        if each.requires_grad
    }
    # A gradient has the shape of what it is of, so it can be written as if it were that.
    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    save_adapter(ours, tmp_path / "gradients")
    gradients = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert gradients.keys() == expected_gradients.keys()
    for key, each in gradients.items():
        torch.testing.assert_close(each, expected_gradients[key], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lora_dropout", float("inf"), ("lora_dropout", "[0, 1)", "inf")),
        ("lora_dropout", True, ("lora_dropout", "True")),
        ("lora_alpha", float("nan"), ("lora_alpha", "nan")),
        ("alpha_pattern", "c_attn", ("alpha_pattern", "'c_attn'")),
        ("alpha_pattern", {"c_attn": "8"}, ("alpha_pattern", "'8'", "a number")),
        ("alpha_pattern", {"c_attn": 10**400}, ("alpha_pattern", "10000")),
        ("alpha_pattern", {r"(.*)*x": 8}, ("alpha_pattern", "seconds", "names themselves")),
        ("alpha_pattern", {"(": 8}, ("alpha_pattern", "'('")),
        ("use_rslora", "false", ("use_rslora", "'false'")),
    ],
)
def test_a_config_of_an_adapter_with_wrong_values_is_refused(
    key: str, value: Any, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_files, "PATTERN_SECONDS", 0.5)
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    adapt(model, LoraConfig(rank=2))
    file = save_adapter(model, tmp_path / "adapter") / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    delete_adapter(model)
    with refuses(ManyheadsError, *words):
        load_adapter(model, tmp_path / "adapter")


def test_patterns_of_alpha_are_those_of_peft(tmp_path: Path) -> None:
    model = build("gpt2", layers=2, width=16, heads=2, vocabulary=50, seed=0)
    adapt(model, LoraConfig(rank=2, alpha=2.0, targets=("output",)))
    file = save_adapter(model, tmp_path / "adapter") / "adapter_config.json"
    described = json.loads(file.read_text())
    for patterns in ({r"h\.(1|2)\.attn\.c_proj": 6}, {r"^transformer\.h\.1\.attn\.c_proj": 6}):
        file.write_text(json.dumps(described | {"alpha_pattern": patterns}))
        delete_adapter(model)
        load_adapter(model, tmp_path / "adapter")
        scales = [each.scale for each in model.modules() if isinstance(each, LowRankUpdate)]
        assert scales == [1.0, 3.0]


def test_what_was_saved_and_loaded_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    model = build("gpt2", layers=2, width=24, heads=3, vocabulary=50, seed=0)
    adapt(model, LoraConfig(targets=("project", "output"), dropout=0.1))
    shaken(model)
    save_adapter(model, tmp_path / "one")
    delete_adapter(model)
    load_adapter(model, tmp_path / "one")
    save_adapter(model, tmp_path / "two")
    one, two = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    configs = [
        json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("one", "two")
    ]
    assert configs[0] == configs[1]
    assert configs[0]["lora_dropout"] == 0.1


def test_a_merged_model_has_the_logits_of_peft_merged(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    peer, ours = family.both(tmp_path)
    adapt(ours, LoraConfig(targets=EVERY))
    shaken(ours)
    save_adapter(ours, tmp_path / "adapter")
    merge(ours)
    whole = PeftModel.from_pretrained(peer, tmp_path / "adapter").merge_and_unload()
    with torch.no_grad():
        result, expected = family.of_ours(ours), family.of_theirs(whole)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def saved(tmp_path: Path, **shape: Any) -> Path:
    model = build("gpt2", layers=1, width=24, heads=3, vocabulary=50, seed=0, **shape)
    adapt(model, LoraConfig(rank=2, targets=("project",)))
    return save_adapter(model, tmp_path / "adapter")


def test_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    save(build("gpt2", layers=1, width=24, heads=3, vocabulary=50, seed=0), tmp_path / "base")
    model = load(tmp_path / "base")
    adapt(model, LoraConfig(rank=2, targets=("project",)))
    folder = save_adapter(model, tmp_path / "adapter")
    named = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    assert named == str(tmp_path / "base")
    other = build("llama-1b-shape", layers=1, width=24, heads=8, hidden=8, vocabulary=50, seed=0)
    with refuses(InputError, "which this model does not have", f"load it into {tmp_path}/base"):
        load_adapter(other, folder)
    # A model that was made here has no name.
    described = json.loads((saved(tmp_path) / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] is None


def test_an_adapter_of_an_encoder_decoder_ends_texts_as_in_training(tmp_path: Path) -> None:
    shape = {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "vocabulary": 300}
    model, fresh = (build("transformer-base", seed=0, **shape) for _ in range(2))
    fresh.tokenizer = tokenizer()
    model.tokenizer = appending(tokenizer(), 0)
    adapt(model, LoraConfig(rank=2, targets=("project",)))
    load_adapter(fresh, save_adapter(model, tmp_path / "adapter"))
    plain = tokenizer().encode("a cat").ids
    assert fresh.tokenizer.encode("a cat").ids == [*plain, 0]


def test_an_adapter_of_another_shape_is_refused_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    wide = build("gpt2", layers=1, width=36, heads=3, vocabulary=50, seed=0)
    with pytest.raises(InputError, match=r"\(2, 24\) and \(72, 2\) for transformer\.h\.0\.attn"):
        load_adapter(wide, folder)
    assert not any(isinstance(each, LowRankUpdate) for each in wide.modules())
    other = build("llama-1b-shape", layers=1, width=24, heads=8, hidden=8, vocabulary=50, seed=0)
    with pytest.raises(InputError, match="which this model does not have"):
        load_adapter(other, folder)


def test_files_that_say_more_than_we_know_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model = build("gpt2", layers=1, width=24, heads=3, vocabulary=50, seed=0)
    config = folder / "adapter_config.json"
    said = json.loads(config.read_text())
    for change, words in (
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ):
        config.write_text(json.dumps(said | change))
        with pytest.raises(InputError, match=words):
            load_adapter(model, folder)
    config.write_text(json.dumps(said))
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[:1]), weights)
    with pytest.raises(InputError, match="without its counterpart"):
        load_adapter(model, folder)
    weights.write_bytes(b"no tensors")
    with pytest.raises(InputError, match="damaged"):
        load_adapter(model, folder)
    with pytest.raises(InputError, match="there is no"):
        load_adapter(model, tmp_path / "nowhere")
    with pytest.raises(InputError, match="there is no adapter 'other'"):
        save_adapter(model, folder, "other")


def test_an_adapter_in_a_pickle_or_nowhere_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    with pytest.raises(InputError, match="give a folder with a saved adapter"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="which can run any code: if you trust it, convert it"):
        load_adapter(model, tmp_path)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    adapt(model, LoraConfig())
    save_adapter(model, tmp_path)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**described, "lora_alpha": None}))
    delete_adapter(model)
    with pytest.raises(InputError, match="lora_alpha=None: use a number"):
        load_adapter(model, tmp_path)


def test_an_adapter_of_a_decoder_that_classifies_opens_in_peft(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=3)
    peer = GPT2ForSequenceClassification(config).eval()
    peer.save_pretrained(tmp_path / "model")
    ours: Any = load(tmp_path / "model")
    adapt(ours, LoraConfig())
    shaken(ours)
    save_adapter(ours, tmp_path / "adapter")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        result = PeftModel.from_pretrained(peer, tmp_path / "adapter").eval()(ids).logits
        torch.testing.assert_close(result, ours(ids).logits, atol=1e-5, rtol=0)
