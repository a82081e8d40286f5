"""Heads have the same names everywhere: as values, as they are printed, by layer and in lists."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from inspect import isfunction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from manyheads import lens, surgery
from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import InputError
from manyheads.lens.results.addresses import (
    HEAD_FORM,
    Address,
    Block,
    Heads,
    find_heads,
    pick_heads,
)
from manyheads.models.build import Model
from manyheads.studio.requests import RequestBody
from manyheads.surgery.lora.low_rank import LoraConfig
from manyheads.taps import Head, Sublayer
from tests.bridge.zoo import tiny
from tests.messages import refuses
from tests.mixers.mixer_configs import CAUSAL, small_model
from tests.models.zoo import DECODERS, SEQ2SEQS, small

TEXTS = [[5, 6, 7, 8, 9], [7, 6, 5]]
PAIRS = [([5, 6, 7], [1, 8, 9, 4]), ([7, 6], [1, 5, 3])]
OTHER_PAIRS = [([8, 6, 7], [1, 8, 9, 4]), ([4, 6], [1, 5, 3])]

# L1 in every spelling: all heads of the second layer.
SPELLINGS: dict[str, Heads] = {
    "values": [Head(1, 0), Head(1, 1), Head(1, 2), Head(1, 3)],
    "addresses": tuple(Address(Head(1, head)) for head in range(4)),
    "names": ["L1H0", "L1H1", "L1H2", "L1H3"],
    "with commas": "L1H0,L1H1, L1H2 ,L1H3",
    "mixed": ["L1H0, L1H1", Head(1, 2), Address(Head(1, 3))],
    "lower case": "l1h0, l1h1, l1h2, l1h3",
    "layer": "L1",
    "layer in a list": ["L1"],
    "main": "main L1 attention",
}
ONE_HEAD: dict[str, Heads] = {
    "value": Head(1, 2),
    "address": Address(Head(1, 2)),
    "name": "L1H2",
    "in a list": ["L1H2"],
    "in a set": {Head(1, 2)},
    "twice": ["L1H2", Head(1, 2)],
}
CROSS: dict[str, Heads] = {
    "address": Address(Head(1, 0), "decoder", Sublayer.CROSS),
    "as printed": "decoder L1H0 cross",
    "default stack": "L1H0 cross",
    "capitals": "Decoder L1H0 Cross",
}


def adapted(model: Model, heads: Heads) -> list[torch.Tensor]:
    model = deepcopy(model)
    surgery.adapt(model, LoraConfig(heads=heads, targets=("query",)), seed=0)
    return [value for _, value in sorted(model.state_dict().items())]


def frozen(model: Model, heads: Heads, function: Callable[[Model, Heads], int]) -> list[Any]:
    model = deepcopy(model)
    return [function(model, heads), *(each.requires_grad for each in model.parameters())]


def activations(model: Model, heads: Heads, folder: Path, texts: Any) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    names = list(heads) if isinstance(heads, set) else heads
    files = lens.activations(model, texts, names, folder, progress=False)  # type: ignore[arg-type]
    tensors = load_file(files.shards[0])
    return [tensors[name] for name in dict.fromkeys(name for name in files.widths)]


def pruned(model: Model, heads: Heads) -> list[torch.Tensor]:
    return list(surgery.prune(model, heads).state_dict().values())


Outcome = Callable[[Model, Any, Heads, Path], Any]
FUNCTIONS: dict[str, Outcome] = {
    "ablate": lambda model, texts, heads, _: lens.ablate(model, texts, heads, progress=False).means,
    "ablate_together": lambda model, texts, heads, _: lens.ablate_together(
        model, texts, heads, progress=False
    ),
    "ablate_in_order": lambda model, texts, heads, _: lens.ablate_in_order(
        model, texts, heads, progress=False
    ),
    "ablate_greedily": lambda model, texts, heads, _: lens.ablate_greedily(
        model, texts, 1, heads, progress=False
    ),
    "cut": lambda model, texts, heads, _: (
        lens.cut(model, texts, [(heads, "last", 0)], progress=False).changes
    ),
    "shapley": lambda model, texts, heads, _: (
        lens.shapley(model, texts, heads, permutations=2, progress=False).means
    ),
    "patch_paths": lambda model, texts, heads, _: (
        lens.patch_paths(model, texts, other_texts(texts), receivers=heads, progress=False).means
    ),
    "patch_paths from": lambda model, texts, heads, _: (
        lens.patch_paths(
            model, texts, other_texts(texts), receivers="logits", senders=heads, progress=False
        ).means
    ),
    "patterns": lambda model, texts, heads, _: [
        (pattern.address, pattern.text, pattern.weights)
        for pattern in lens.patterns(model, texts, heads).each
    ],
    "top_keys": lambda model, texts, heads, _: [
        (keys.address, keys.text, keys.weights) for keys in lens.top_keys(model, texts, heads)
    ],
    "activations": lambda model, texts, heads, folder: activations(model, heads, folder, texts),
    "prune": lambda model, _, heads, __: pruned(model, heads),
    "freeze": lambda model, _, heads, __: frozen(model, heads, surgery.freeze),
    "freeze_except": lambda model, _, heads, __: frozen(model, heads, surgery.freeze_except),
    "adapt": lambda model, _, heads, __: adapted(model, heads),
}


def other_texts(texts: Any) -> Any:
    return OTHER_PAIRS if texts is PAIRS else [[1, *text[1:]] for text in texts]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "dtype"):
        return np.array_equal(one, other, equal_nan=True)
    return bool(one == other) or (one != one and other != other)


def public_functions_with_heads() -> Iterator[str]:
    for module in (lens, surgery):
        for name in module.__all__:
            function = getattr(module, name)
            if isfunction(function):
                hints = get_type_hints(function)
                if any(Address in get_args(hints[each]) for each in hints if each != "return"):
                    yield name


def test_every_public_function_that_takes_heads_is_tested_here() -> None:
    # One head alone is what lens.why takes.
    assert set(public_functions_with_heads()) - {"why"} <= set(FUNCTIONS)


@pytest.mark.parametrize("spellings", [SPELLINGS, ONE_HEAD], ids=["layer", "head"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_spelling_names_the_same_heads(
    name: str, spellings: dict[str, Heads], tmp_path: Path
) -> None:
    results = {
        spelling: FUNCTIONS[name](small(DECODERS["gpt2"]), TEXTS, heads, tmp_path / spelling)
        for spelling, heads in spellings.items()
        if (name, spelling) != ("activations", "twice")
    }
    first = next(iter(results.values()))
    assert [spelling for spelling, result in results.items() if not equal(result, first)] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_head_of_cross_attention_is_named_as_it_is_printed(name: str, tmp_path: Path) -> None:
    results = {
        spelling: FUNCTIONS[name](small(SEQ2SEQS["t5"]), PAIRS, heads, tmp_path / spelling)
        for spelling, heads in CROSS.items()
    }
    first = next(iter(results.values()))
    assert [spelling for spelling, result in results.items() if not equal(result, first)] == []


WRONG = [
    ("L7H0", "there is no head L7H0", "use L0H0 to L1H3"),
    ("L1H9", "there is no head L1H9", "use L1H0 to L1H3"),
    ("L7", "there is no head L7", "use L0H0 to L1H3"),
    ("five", "'five' is not the address of a head", HEAD_FORM),
    ("L0H1, five", "'five' is not the address of a head", HEAD_FORM),
    ("L" + "9" * 5000 + "H0", "is not the address of a head", HEAD_FORM),
    ("L0H0 cross", "there is no head L0H0 cross", "use L0H0 to L1H3"),
    ("encoder L0H0", "there is no head encoder L0H0", "use L0H0 to L1H3"),
    (Head(7, 0), "there is no head L7H0", "use L0H0 to L1H3"),
    (Head(0, -1), "there is no head L0H-1", "use L0H0 to L0H3"),
    ([Address(Head(0, 0), "decoder")], "there is no head decoder L0H0", "use L0H0 to L1H3"),
]


@pytest.mark.parametrize(("heads", "problem", "remedy"), WRONG, ids=lambda each: str(each)[:20])
def test_a_wrong_head_has_one_error_everywhere(
    heads: Heads, problem: str, remedy: str, tmp_path: Path
) -> None:
    model = small(DECODERS["gpt2"])
    for name, function in FUNCTIONS.items():
        if name == "activations" and "is not the address" in problem:
            # It takes sites, and says how all of them are written.
            continue
        with refuses(InputError, problem, remedy):
            function(model, TEXTS, heads, tmp_path / name)
    if isinstance(heads, str):
        with refuses(InputError, problem, remedy):
            RequestBody({"heads": [heads]}).heads(model)


def test_a_wrong_type_is_refused() -> None:
    model = small(DECODERS["gpt2"])
    for heads in (5, [5], [None], [("L0H0",)]):
        with pytest.raises(InputError, match=r"5|None|L0H0"):
            lens.ablate(model, TEXTS, heads)  # type: ignore[arg-type]


def test_results_take_names() -> None:
    model = small(DECODERS["gpt2"])
    result = lens.statistics(model, TEXTS, progress=False)
    column, pairs = result["entropy"], lens.weight_similarity(model, progress=False)
    circuits, labels = lens.circuits(model), lens.kinds(model, progress=False)
    patterns = lens.patterns(model, TEXTS)
    for name in ("L1H2", " l1h2", "main L1H2", Address(Head(1, 2))):
        assert equal(list(result.of(name).values()), list(result.of(Head(1, 2)).values()))
        assert column.of(name) == column.of(Head(1, 2))
        assert pairs.of(name, "L0H0") == pairs.of(Head(1, 2), Head(0, 0))
        assert torch.equal(circuits.ov(name).matrix, circuits.ov(Head(1, 2)).matrix)
        assert labels.of(name) == labels.of(Head(1, 2))
        assert torch.equal(patterns.of(name).weights, patterns.of(Head(1, 2)).weights)
    for ask in (result.of, column.of, circuits.ov, labels.of, patterns.of):
        with refuses(InputError, "there is no head L9H0", "use L0H0 to L1H3"):
            ask("L9H0")
        with refuses(InputError, "'L1' names 4 heads", "L1H0"):
            ask("L1")


def test_names_in_a_result_of_an_encoder_decoder_are_the_decoders() -> None:
    blocks = [
        Block(0, 2, stack, part)
        for stack, part in [
            ("encoder", Sublayer.ATTENTION),
            ("decoder", Sublayer.ATTENTION),
            ("decoder", Sublayer.CROSS),
        ]
    ]
    addresses = [address for block in blocks for address in block.addresses]
    assert pick_heads(addresses, "L0H1") == (Address(Head(0, 1), "decoder"),)
    assert pick_heads(addresses, "encoder L0") == blocks[0].addresses
    assert pick_heads(addresses, "L0 cross") == blocks[2].addresses
    assert pick_heads(addresses, "all") == tuple(addresses)
    assert pick_heads(blocks[2].addresses, Head(0, 1)) == (blocks[2].addresses[1],)
    with refuses(
        InputError, "there is no head encoder L0 cross", "use encoder L0H0 to encoder L0H1 or"
    ):
        pick_heads(addresses, "encoder L0 cross")


def test_heads_of_several_attentions_are_not_ablated_together() -> None:
    model = small(SEQ2SEQS["t5"])
    with refuses(InputError, "decoder L0H0 and decoder L0H0 cross", "at a time"):
        lens.ablate_together(model, PAIRS, ["L0H0", "L0H0 cross"], progress=False)


def test_the_heads_of_wrapped_models_and_mixers_have_names() -> None:
    wrapped = wrap(tiny("t5"))
    assert [str(head) for head in find_heads(wrapped, "L0H0 cross, encoder L0H1")] == [
        "decoder L0H0 cross",
        "encoder L0H1",
    ]
    mixer = small_model(CAUSAL["retention"])
    (address,) = find_heads(mixer, "L0H1")
    assert address == Address(Head(0, 1))
    with refuses(InputError, "L0H1 is a head of a mixer", "lens.ablate"):
        surgery.prune(mixer, "L0H1")
