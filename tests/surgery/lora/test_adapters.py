"""Low-rank adapters: where they reach, how they are switched, folded in and out."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import Ragged, build, generate, lens, save
from manyheads.decoding.steps.cpu_step import cannot
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps
from manyheads.errors import ConfigError, InputError
from manyheads.surgery import (
    LoraConfig,
    active_adapters,
    adapt,
    delete_adapter,
    list_adapters,
    merge,
    prune,
    set_adapter,
    unmerge,
)
from manyheads.taps import Head
from tests.messages import refuses
from tests.surgery.families import shaken

ALL = ("query", "key", "value", "output", "expand", "contract")


def gpt(**changes: Any) -> Any:
    shape = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "positions": 32}
    return build("gpt2", **(shape | {"dropout": 0.0} | changes), seed=0)


def llama(heads: int = 4, kv_heads: int = 2) -> Any:
    shape = {"layers": 2, "width": 32, "head_size": 8, "hidden": 40, "vocabulary": 50}
    return build("llama-1b-shape", **shape, heads=heads, kv_heads=kv_heads, seed=0)


def answer(model: Any) -> Tensor:
    batch = Ragged.from_list([torch.arange(9), torch.arange(20, 24)])
    with torch.no_grad():
        return model(batch).logits.values


@pytest.mark.parametrize("make", [gpt, llama])
def test_a_new_adapter_changes_nothing_and_a_trained_one_does(make: Any) -> None:
    model = make()
    before = answer(model)
    adapt(model, LoraConfig(targets=("query", "output", "*.feedforward.*")))
    assert torch.equal(answer(model), before)
    shaken(model)
    assert (answer(model) - before).abs().max() > 1e-2


def test_only_the_adapter_learns() -> None:
    model = gpt()
    adapt(model, LoraConfig(targets=ALL))
    model(torch.arange(8)[None]).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".adapters." in name), name


def test_merged_equals_unmerged_and_back() -> None:
    model = gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = answer(model)
    adapt(model, LoraConfig(rank=3, targets=ALL, scaling="root"))
    shaken(model)
    beside = answer(model)
    merge(model)
    assert all(type(each) is nn.Linear for each in model.modules() if isinstance(each, nn.Linear))
    torch.testing.assert_close(answer(model), beside, atol=1e-5, rtol=0)
    unmerge(model)
    torch.testing.assert_close(answer(model), beside, atol=1e-5, rtol=0)
    set_adapter(model)
    torch.testing.assert_close(answer(model), plain, atol=1e-5, rtol=0)
    merge(model, "default")
    delete_adapter(model)
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(answer(model), beside, atol=1e-5, rtol=0)


def test_adapters_are_switched_by_name_and_summed() -> None:
    model = gpt()
    plain = answer(model)
    adapt(model, LoraConfig(targets=("output",), layers=(1,)), "one")
    shaken(model, fitting=".one.")
    first = answer(model)
    adapt(model, LoraConfig(targets=("output",), layers=(1,), rank=2), "two")
    shaken(model, fitting=".two.", seed=1)
    second = answer(model)
    assert list(list_adapters(model)) == ["one", "two"]
    assert active_adapters(model) == ("two",)
    set_adapter(model, "one")
    assert torch.equal(answer(model), first)
    set_adapter(model, "one", "two")
    both = answer(model)
    assert not torch.allclose(both, first, atol=1e-3)
    assert not torch.allclose(both, second, atol=1e-3)
    merge(model)
    torch.testing.assert_close(answer(model), both, atol=1e-5, rtol=0)
    unmerge(model)
    assert active_adapters(model) == ("one", "two")
    set_adapter(model)
    torch.testing.assert_close(answer(model), plain, atol=1e-5, rtol=0)
    delete_adapter(model, "one")
    assert list(list_adapters(model)) == ["two"]
    copied = copy.deepcopy(model)
    set_adapter(copied, "two")
    torch.testing.assert_close(answer(copied), second, atol=1e-5, rtol=0)
    torch.testing.assert_close(answer(model), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [gpt, llama])
def test_one_head_changes_no_other_heads_statistics_at_its_layer(make: Any) -> None:
    model = make()
    texts = [list(range(12)), list(range(20, 29))]
    before = lens.statistics(model, texts, progress=False)
    targets = ("query", "output") if make is llama else ("query", "key", "value", "output")
    adapt(model, LoraConfig(rank=2, targets=targets, heads=(Head(1, 2),)))
    shaken(model)
    after = lens.statistics(model, texts, progress=False)
    for name in before.names:
        one, other = (torch.tensor(result[name].layers()[1]) for result in (before, after))
        same = torch.isclose(one, other, atol=1e-6, rtol=1e-5, equal_nan=True)
        assert same[[0, 1, 3]].all() or name == "output_share", name
    assert after["entropy"].of(Head(1, 2)) != before["entropy"].of(Head(1, 2))
    assert after["output_norm"].of(Head(1, 2)) != before["output_norm"].of(Head(1, 2))


def test_only_the_rows_and_columns_of_chosen_heads_change() -> None:
    model = gpt()
    layer = model.stack.layers[0].attention
    project, output = (each.weight.detach().clone() for each in (layer.project, layer.output))
    adapt(model, LoraConfig(targets=("query", "value", "output"), heads=("L0H0", "L0H2")))
    shaken(model)
    rows = (layer.project.weight - project).abs().amax(1) > 0
    chosen = torch.tensor([True] * 8 + [False] * 8).repeat(2)
    assert torch.equal(rows, torch.cat((chosen, torch.zeros(32, dtype=torch.bool), chosen)))
    assert torch.equal((layer.output.weight - output).abs().amax(0) > 0, chosen)


def test_shared_keys_are_adapted_with_all_their_queries() -> None:
    model = llama(heads=6, kv_heads=2)
    with refuses(
        ConfigError,
        "value of L1H0 is shared with L1H1, L1H2: choose all of L1H0, L1H1, L1H2, "
        "or leave value out.",
    ):
        adapt(model, LoraConfig(heads=("L1H0",)))
    assert not list_adapters(model)
    adapt(model, LoraConfig(heads=("L1H0", "L1H1", "L1H2"), targets=("value",)))
    update = model.stack.layers[1].attention.project.adapters["default"]["value"]
    assert update.rows == ((64, 72),)


def test_without_active_adapters_the_fast_paths_are_open() -> None:
    model = gpt()
    ids = [[1, 2, 3]]
    adapt(model, LoraConfig(targets=ALL))
    shaken(model)
    assert "Adapted" in str(cannot(model))
    adapted = generate(model, ids, max_new_tokens=4)[0].ids
    set_adapter(model)
    assert cannot(model) is None
    merge(model, "default")
    assert cannot(model) is None
    assert generate(model, ids, max_new_tokens=4)[0].ids == adapted


def test_a_cuda_graph_serves_only_the_adapters_it_was_captured_with() -> None:
    model = gpt()
    adapt(model, LoraConfig(), "one")
    adapt(model, LoraConfig(), "two")
    steps = CudaGraphSteps(model, 1, 16)
    assert steps.fits(1, 16, False)
    set_adapter(model, "one")
    assert not steps.fits(1, 16, False)
    set_adapter(model, "two")
    assert steps.fits(1, 16, False)
    set_adapter(model)
    assert not steps.fits(1, 16, False)


def test_dropout_drops_in_training_alone() -> None:
    model = gpt()
    adapt(model, LoraConfig(dropout=0.5))
    shaken(model)
    assert torch.equal(answer(model), answer(model))
    model.train()
    assert not torch.equal(answer(model), answer(model))


def test_half_precision_keeps_what_learns_in_float32() -> None:
    model = gpt().to(torch.bfloat16)
    adapt(model, LoraConfig())
    shaken(model)
    kinds = {each.dtype for name, each in model.named_parameters() if ".adapters." in name}
    assert kinds == {torch.float32}
    assert answer(model).dtype == torch.bfloat16


def test_a_model_with_adapters_is_not_saved_without_a_word(tmp_path: Any) -> None:
    model = gpt()
    adapt(model, LoraConfig())
    with pytest.raises(ConfigError, match="the model has adapters"):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    merge(model)
    delete_adapter(model)
    save(model, tmp_path / "model")


def test_bad_input_is_refused_before_anything_is_added() -> None:
    model = gpt()
    for config, words in (
        ({"targets": ("quary",)}, "no projection is called 'quary': use 'query'"),
        ({"layers": (2,)}, "layers has 2: use 0 to 1"),
        ({"heads": ("L0H0",), "targets": ("expand",)}, "has no heads"),
        ({"heads": ("L0H0",), "layers": (1,)}, "match none of the heads"),
        ({"targets": ("project", "query")}, "'project' and 'query' are both rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            adapt(model, LoraConfig(**config))
    for head, words in (
        ("L0H4", "there is no head L0H4: use L0H0 to L0H3"),
        ("L2H0", "there is no head L2H0: use L0H0 to L1H3"),
        ("H3", "'H3' is not the address of a head"),
        (Head(0, -1), "there is no head L0H-1: use L0H0 to L0H3"),
    ):
        with pytest.raises(InputError, match=words):
            adapt(model, LoraConfig(heads=(head,)))
    assert not list_adapters(model)
    with pytest.raises(ConfigError, match=r"'a\.b' is not a valid adapter name"):
        adapt(model, LoraConfig(), "a.b")
    adapt(model, LoraConfig())
    with pytest.raises(ConfigError, match="there is already an adapter 'default'"):
        adapt(model, LoraConfig())
    with pytest.raises(InputError, match="there is no adapter 'other': use one of default"):
        set_adapter(model, "other")
    merge(model)
    with pytest.raises(ConfigError, match="'default' is merged"):
        set_adapter(model)
    for wrong in ({"rank": 0}, {"dropout": 1.0}, {"targets": ()}):
        with pytest.raises(ConfigError):
            LoraConfig(**wrong)


def test_pruned_models_with_groups_of_their_own_are_adapted_too() -> None:
    pruned = prune(llama(heads=6, kv_heads=2), [Head(0, 1), Head(1, 3), Head(1, 4), Head(1, 5)])
    before = answer(pruned)
    with pytest.raises(ConfigError, match="choose all of L0H2, L0H3, L0H4"):
        adapt(pruned, LoraConfig(heads=("L0H2",), targets=("key",)))
    adapt(pruned, LoraConfig(heads=("L0H0", "L0H1"), targets=("key", "output")))
    assert torch.equal(answer(pruned), before)
    shaken(pruned)
    assert (answer(pruned) - before).abs().max() > 1e-3
    with pytest.raises(InputError, match="merge or delete adapters"):
        prune(pruned, [Head(0, 0)])


@pytest.mark.shapes_unchecked
def test_compiled_it_answers_the_same() -> None:
    model = gpt(layers=1)
    adapt(model, LoraConfig(targets=ALL))
    shaken(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
