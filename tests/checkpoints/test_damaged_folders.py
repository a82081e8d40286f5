"""Folders that are damaged, malicious or replaced meanwhile: a clear error, or the right model."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from manyheads import Ragged, build, lens, load, save
from manyheads.errors import InputError, MixedDtypeWarning, NonFiniteWarning
from manyheads.models.recipes import llama
from tests.checkpoints.peer_models import alone, assert_equal, randomized
from tests.messages import refuses
from tests.parity.comparing import assert_same, texts

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "positions": 40}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(build("gpt2", **SMALL, seed=0), tmp_path / "model").folder


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ],
)
def test_mixed_dtypes_are_loaded_in_one_as_they_do(
    folder: Path, named: dict[str, Any], expected: torch.dtype
) -> None:
    # The first name in the alphabet decides where config.json does not.
    change_tensors(folder, lambda name, each: each.bfloat16() if ".h.0.attn" in name else each)
    change_config(folder, **named)
    with pytest.warns(MixedDtypeWarning, match=str(expected)):
        model = load(folder)
    assert {each.dtype for each in model.parameters()} == {expected}
    peer = AutoModelForCausalLM.from_pretrained(folder)
    assert peer.dtype == expected
    with torch.no_grad():
        ours = model(torch.tensor([[3, 4, 5]])).logits
    assert ours.dtype == expected


def test_a_dtype_of_the_caller_holds(folder: Path) -> None:
    change_tensors(folder, lambda name, each: each.half() if "mlp" in name else each)
    model = load(folder, dtype=torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_an_unknown_dtype_in_the_config_is_refused(folder: Path) -> None:
    change_config(folder, dtype="int8")
    with refuses(InputError, "dtype='int8'", "use float32"):
        load(folder)


def test_weights_with_nan_are_named_when_loaded_and_when_looked_at(folder: Path) -> None:
    def poison(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("h.1.mlp.c_fc.weight"):
            tensor[3, 4] = torch.nan
        if name.endswith("ln_f.bias"):
            tensor[0] = -torch.inf
        return tensor

    change_tensors(folder, poison)
    with pytest.warns(NonFiniteWarning, match=r"(?=.*h\.1\.mlp\.c_fc\.weight)(?=.*ln_f\.bias)"):
        model = load(folder)
    with pytest.warns(NonFiniteWarning, match=r"layers\.1\.feedforward\.expand\.weight"):
        lens.statistics(model, [[1, 2, 3]])
    # Once per model, until the weights change.
    lens.statistics(model, [[1, 2, 3]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_(0.0, 0.0, 0.0)
    lens.statistics(model, [[1, 2, 3]])


def test_large_finite_weights_are_no_infinity(folder: Path) -> None:
    change_tensors(folder, lambda _, tensor: tensor.half().fill_(60_000.0))
    load(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layer", 10**8),
        ("n_embd", 2**31),
        ("n_head", 2**40),
        ("n_inner", 2**62),
        ("vocab_size", 2**50),
        ("n_positions", 10**15),
        ("num_labels", 10**4000),
    ],
)
def test_sizes_beyond_the_weights_are_refused_at_once(folder: Path, key: str, value: int) -> None:
    change_config(folder, **{key: value})
    began = time.perf_counter()
    with refuses(InputError, f"{key}=", "the same model") as caught:
        load(folder)
    assert time.perf_counter() - began < 1
    assert len(str(caught.value)) < 500


def test_heads_that_do_not_divide_a_huge_width_are_refused_at_once() -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match="heads must divide width=2147483648, got 3"):
        build("gpt2", layers=1, width=2**31, heads=3)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e999])
def test_numbers_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    change_config(folder, resid_pdrop=value)
    with refuses(InputError, "resid_pdrop", "not finite"):
        load(folder)


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_deep_json_is_refused(folder: Path, name: str, depth: int) -> None:
    (folder / name).write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with refuses(InputError, name, "levels deep"):
        load(folder)


@pytest.mark.parametrize("where", [None, 3.5, b"model", ["model"]])
def test_what_is_no_path_is_refused(where: Any) -> None:
    with refuses(InputError, repr(where)):
        load(where)


@pytest.mark.parametrize("where", ["x" * 5000, "a\0b"])
def test_what_cannot_be_a_path_is_refused(where: str) -> None:
    with refuses(InputError, " a path"):
        load(where)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_never_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "tokenizer.json":
        assert load(folder).tokenizer is None
        return
    with refuses(InputError, name):
        load(folder)


def shard(folder: Path, name: str) -> None:
    """Name this file in an index instead of model.safetensors."""
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"transformer.wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, absolute: bool) -> None:
    shard(
        folder, str(folder.parent / "outside.safetensors") if absolute else "../outside.safetensors"
    )
    with refuses(InputError, "outside.safetensors", "leads out of", "copy the file"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "chat_template.jinja", "tokenizer_config.json"]
)
def test_a_link_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "secret"
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("{}")
    (folder / name).symlink_to(outside)
    with refuses(InputError, name, "leads out of", str(outside)):
        load(folder)


def test_links_of_the_hub_cache_and_inside_the_folder_are_followed(folder: Path) -> None:
    home = folder.parent / "models--a--b"
    (home / "blobs").mkdir(parents=True)
    snapshot = home / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(home / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (snapshot / "inside.json").write_text("{}")
    (snapshot / "tokenizer_config.json").symlink_to("inside.json")
    load(snapshot)


def test_nothing_is_written_through_a_link_inside_the_folder(folder: Path, tmp_path: Path) -> None:
    from manyheads.checkpoints.files import write_folder

    (tmp_path / "elsewhere").mkdir()
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    with refuses(InputError, "inner", "remove the link"):
        write_folder(folder, {"inner/a": lambda file: file.write_text("x")})
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_model_is_read_whole_while_another_is_saved_over_it(tmp_path: Path) -> None:
    models = [build("gpt2", **SMALL | {"width": width}, seed=0) for width in (32, 48)]
    place, done, failed = tmp_path / "model", threading.Event(), list[Exception]()
    save(models[0], place)

    def write() -> None:
        try:
            for number in range(12):
                save(models[number % 2], place)
        except Exception as error:
            failed.append(error)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        result = load(place)
        assert_equal(result, models[result.config.stack.width == 48])
    writer.join()
    assert not failed
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "changes",
    [{"dense_act_fn": "gelu"}, {"dense_act_fn": "silu"}, {"feed_forward_proj": "gated-silu"}],
)
def test_t5_follows_the_activation_that_they_follow(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_heads": 4, "num_layers": 1}
    config = T5Config(**shape, vocab_size=61, feed_forward_proj="gated-gelu")
    randomized(T5ForConditionalGeneration(config)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dense_act_fn"] == "gelu_new"
    change_config(tmp_path, **changes)
    sources, targets = texts((5, 3)), texts((4, 2), seed=1)
    peer = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        result = load(tmp_path)(Ragged.from_list(sources), Ragged.from_list(targets)).logits
    assert_same(result, alone(peer, sources, targets))


def test_t5_with_an_activation_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=24, num_heads=4, num_layers=1, vocab_size=61)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    change_config(tmp_path, dense_act_fn="tanh")
    with refuses(InputError, "dense_act_fn='tanh'", "remove them"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("more", "family"),
    [({}, "mixtral"), ({"norm_heads": True}, "qwen3_moe"), ({"gate": "head"}, "manyheads")],
)
def test_trained_experts_are_saved_in_a_layout_that_others_open(
    tmp_path: Path, more: dict[str, Any], family: str
) -> None:
    shape = {"width": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "hidden": 24, "layers": 2}
    model = randomized(build(llama(**shape, vocabulary=61, experts=4, top_k=2, **more)))
    saved = save(model, tmp_path / "model")
    assert saved.family == family
    assert saved.opened_by == ("manyheads" if family == "manyheads" else "transformers")
    assert_equal(load(tmp_path / "model"), model)
    if family == "manyheads":
        assert "only manyheads can open" in str(saved)
        return
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        result = model(Ragged.from_list(texts((7, 3)))).logits
        assert_same(result, [peer(each[None]).logits[0] for each in texts((7, 3))])
