"""Wrong arguments of every public function and of the command line.

A case takes a call that works and replaces one of its arguments by a value from a list of oddities,
or another type. The call is refused in one line; or its answer is compared with that of the plain
form of the value, or with that of other batches, which must not matter.
"""

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import manyheads
from manyheads import lens, parts, surgery
from manyheads.attention import AttentionConfig
from manyheads.cache import DynamicCache, StaticCache
from manyheads.cli.main import main
from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.sampling import BeamSearch, Greedy, Sample
from manyheads.lens.results.addresses import Address
from manyheads.models.build import build
from manyheads.parts.gates import Gate
from manyheads.ragged import Lengths, Ragged
from manyheads.surgery.finetune.loop import RecoveryConfig
from manyheads.surgery.lora.low_rank import LoraConfig
from manyheads.surgery.selection.l0_selection import L0Config
from manyheads.taps import Head, Sublayer
from tests.studio import models

TEXTS = ["The cat sat on the mat", "The dog sat on the log", "it rained in Paris"]
IDS = [[5, 6, 7, 5, 6], [8, 9, 10, 11], [30, 31, 30]]
VOCABULARY = 320
# Arguments that say how often something is done: enormous ones are allowed, and take their time.
REPEATS = {
    *("steps", "sequences", "draws", "iterations", "prompts", "max_new_tokens", "points", "batch"),
    *(
        "recovery_steps",
        "num_beams",
        "layers",
        "width",
        "hidden",
        "experts",
        "context",
        "vocabulary",
    ),
}
HUGE = (10**18, -(10**18), 10**30, 1e308, np.int64(2**62))
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 2.5, 0.5, 1.0, -0.0, math.nan, math.inf, -math.inf),
    *("", "x", "nan", "all", "L0H0", "L9H9", "caf\udce9", "\0", b"x", 1 + 2j, Ellipsis, object()),
    *([], [1], [[]], [None], [1.5], [-1], [10**12], ["L0H0"], ["x"], [True], [math.nan], [[0, 0]]),
    *({}, {"a": 1}, {0: 1}, {0: 0.5}, (), (0,), (1, 2), range(0), range(2), range(9, 3), set()),
    *(np.int64(2), np.float32(0.5), np.float64("nan"), np.array([1, 2]), np.zeros((2, 2))),
    *(torch.tensor(2), torch.tensor([1.5]), torch.zeros(2, 2), torch.zeros(0), torch.float16),
    *(
        torch.device("meta"),
        "cuda:99",
        "meta",
        Path("nowhere"),
        Path("x\0y"),
        print,
        Head,
        Sublayer,
    ),
    *(
        Head(0, 0),
        Head(9, 9),
        Head(0, -1),
        Address(Head(0, 1)),
        Sublayer.CROSS,
        Sublayer.FEEDFORWARD,
    ),
    *HUGE,
)
ODD_TEXTS: tuple[Any, ...] = (
    *(None, 5, "", " ", "\0", "caf\udce9", [], [[]], [""], ["caf\udce9"], ["The cat", 5], [None]),
    *([[1.5, 2.0]], [[1, 2], [math.nan]], [[-1, 2]], [[VOCABULARY]], [[10**30]], [["a"]], [[[1]]]),
    *([b"The cat"], {"a": "b"}, {1: [1, 2]}, object(), torch.tensor([[1, 2], [3, 4]]), [True]),
    *(torch.tensor([[1.5, 2.0]]), torch.tensor(3), torch.zeros(0, 4, dtype=torch.long), [[True]]),
    *(Ragged.from_list([torch.tensor([1.5])]), Ragged.from_list([torch.tensor([1, 2])]), [(1, 2)]),
    *(iter([[1, 2, 3]]), (text for text in TEXTS), tuple(TEXTS), np.array([[1, 2]]), [[1 + 2j]]),
    *([np.array([1, 2])], [torch.tensor([1, 2])], [torch.tensor([1, 2.5])], [torch.tensor([[1]])]),
    *(torch.zeros(3, 8, 8), [torch.zeros(3, 8, 8)], [{}], ["The cat"] * 2, "The cat", range(3)),
)


@cache
def decoder() -> Any:
    return models.decoder(layers=1, width=16, heads=2).eval()


@cache
def encoder() -> Any:
    return models.encoder().eval()


@cache
def vision() -> Any:
    return models.vision().eval()


ODD_MODELS: tuple[Callable[[], Any], ...] = (
    *(encoder, vision, lambda: None, lambda: "house-gpt", lambda: 5, lambda: torch.nn.Linear(2, 2)),
    *(lambda: decoder().config, lambda: type(decoder()), lambda: decoder().state_dict()),
)


def _lens() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Calls of the lens that work, and take some milliseconds."""
    run = {"model": decoder(), "texts": TEXTS}
    quiet = {"progress": False}
    batched = quiet | {"batch_tokens": None}
    pattern = torch.full((4, 4), 0.25)
    calls: dict[str, dict[str, Any]] = {
        "ablate": run | batched | {"heads": "all", "replace_with": "zero", "metric": "loss"},
        "ablate_greedily": run | quiet | {"steps": 1, "heads": "all"},
        "ablate_in_order": run | quiet | {"order": ["L0H0"]},
        "ablate_together": run | quiet | {"heads": ["L0H1"]},
        "attention_flow": {"model": decoder(), "texts": IDS, "stack": None} | quiet,
        "attention_rollout": run | {"stack": None},
        "attribute": {"model": decoder(), "text": TEXTS[0], "target": None, "method": "direct"},
        "attribute_logits": run | {"answer": None, "distractor": None, "at": "last"},
        "circuits": {"model": decoder(), "stack": None, "sublayer": Sublayer.ATTENTION},
        "collapse": run | batched | {"heads_above": 0.9, "tokens_above": 0.9},
        "compare": {"before": decoder(), "after": decoder(), "texts": TEXTS, "loss_below": 1e-3}
        | {"compare_kinds": False, "entropy_above": 0.9, "targets": None}
        | batched,
        "composition_scores": {"model": decoder(), "through": "query", "stack": None},
        "dead_heads": run | batched | {"replace_with": "zero", "norm_below": 1e-3, "targets": None},
        "detect": {"pattern": pattern, "ideal": pattern, "error_measure": "mul"},
        "faithfulness": run
        | quiet
        | {"steps": 2, "draws": 1, "iterations": 1, "within": 0.1}
        | {"at": "last", "layers": None, "seed": 0},
        "gradient_times_attention": run | {"metric": "loss", "layers": None, "targets": None},
        "importance": run | batched | {"metric": "loss", "targets": None, "stack": None},
        "integrate_heads": run | quiet | {"steps": 2, "layers": None, "metric": "loss"},
        "integrate_inputs": run | quiet | {"steps": 2, "baseline": "zero", "metric": "loss"},
        "ioi_prompts": {"model": decoder(), "prompts": 4, "seed": 0},
        "key_value_memories": {"model": decoder(), "clear_above": 6.0, "stack": None} | quiet,
        "load": {"path": "nowhere.json"},
        "logit_lens": run | {"answer": None, "at": "last", "top_k": 5},
        "neurons": run | batched | {"which": [(0, 1)], "top_k": 3, "by": "largest", "context": 2},
        "output_similarity": run | batched | {"measure": "cosine", "stack": None},
        "overlap": run | batched | {"measure": "cosine", "partners": "all"},
        "patch": {"model": decoder(), "clean": [IDS[0]], "corrupted": [[5, 6, 8, 5, 6]]}
        | {"metric": "loss", "components": ("head",), "positions": "all"}
        | batched,
        "patch_paths": {"model": decoder(), "clean": [IDS[0]], "corrupted": [[5, 6, 8, 5, 6]]}
        | {"metric": "loss", "receivers": "final", "senders": "all", "base": "clean"}
        | batched,
        "patterns": run | {"heads": [Head(0, 0)], "rows": None},
        "probe": run
        | quiet
        | {"labels": [0, 1, 0], "at": "heads", "pool": "mean", "seed": 0}
        | {"strength": 1.0, "test": 0.25},
        "redundancy": run | batched | {"duplicate_above": 0.9, "cluster_above": 0.7, "by": "joint"},
        "score_circuits": {"model": decoder(), "top_k": 5, "sample": 32, "seed": 0} | quiet,
        "statistics": run | batched | {"offsets": (-2,), "sink_above": 0.3, "classes": None},
        "top_keys": run | {"heads": None, "top_k": 3, "rows": None},
        "typology": {"pattern": pattern, "visible": None, "segments": None},
        "why": {"model": decoder(), "text": [IDS[0]], "head": "L0H0", "query": 3, "key": 1}
        | {"against": "mean"},
        "weight_similarity": {"model": decoder(), "trait": "writes", "stack": None},
    }
    return {name: (getattr(lens, name), arguments) for name, arguments in calls.items()}


def _surgery() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    run = {"model": decoder(), "texts": TEXTS, "progress": False}
    choice = run | {"fraction": 0.5, "budget": None, "by": "random", "iterative": False, "seed": 0}
    choice |= {"metric": "loss", "targets": None, "stack": None, "batch_tokens": None}
    calls: dict[str, dict[str, Any]] = {
        "adapt": {"model": decoder(), "config": LoraConfig(rank=2), "name": "other", "seed": 0},
        "add_gates": {"model": decoder(), "gate": Gate(at="output"), "layers": "all"},
        "freeze_except": {"model": decoder(), "heads": ["L0H0"]},
        "prune": {"model": decoder(), "heads": ["L0H0"], "replace_with": "zero", "texts": None},
        "prune_layers": {"model": models_with_two_layers(), "layers": [0], "stack": None},
        "prune_neurons": {"model": decoder(), "neurons": {0: [1]}, "stack": None},
        "recover": run | {"steps": 1, "targets": None, "config": RecoveryConfig(), "seed": 0},
        "select_heads": choice | {"replace_with": "zero", "l0": L0Config(steps=1)},
        "select_layers": {**choice, "model": models_with_two_layers()},
        "select_neurons": choice | {"points": 2},
        "load_adapter": {"model": decoder(), "folder": "nowhere", "name": "default"},
        "train_gates": {"model": decoder(), "gate": Gate(at="output"), "texts": TEXTS}
        | {"held_out": TEXTS, "layers": "all", "train": "gates", "steps": 1, "lr": 1e-3}
        | {"batch_tokens": 64, "seed": 0, "progress": False},
    }
    return {name: (getattr(surgery, name), arguments) for name, arguments in calls.items()}


@cache
def models_with_two_layers() -> Any:
    return models.decoder(layers=2, width=16, heads=2).eval()


def _root() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    quiet = {"progress": False}
    shape = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 40, "seed": 0}
    calls: dict[str, dict[str, Any]] = {
        "generate": {"model": decoder(), "prompts": IDS, "max_new_tokens": 3, "logprobs": False}
        | {"sampling": Greedy(), "eos_token_ids": "model", "suppress_tokens": (), "seed": 0}
        | {"repetition_penalty": 1.0, "stop_strings": (), "cache": DynamicCache()}
        | quiet,
        "encode": {"model": decoder(), "texts": TEXTS, "pooling": "mean", "normalize": False}
        | {"batch_tokens": None}
        | quiet,
        "build": {"config": "gpt2", "positions": 16, **shape},
        "get_config": {"name": "gpt2"},
        "load": {"where": "nowhere", "revision": None, "dtype": None, "device": "cpu"},
        "with_classes": {"model": encoder(), "classes": 2, "of": "texts", "seed": 0},
        "read_image": {"model": vision(), "file": "nowhere.png"},
        "classify": {"model": encoder(), "texts": TEXTS} | quiet,
        "tag": {"model": encoder(), "texts": TEXTS} | quiet,
        "chat_prompt": {"model": decoder(), "messages": [{"role": "user", "content": "hi"}]},
    }
    return {name: (getattr(manyheads, name), arguments) for name, arguments in calls.items()}


def lens_functions(random: Random, folder: Path) -> str:
    return attack(random, random.choice(list(_lens().values())), folder)


def surgery_functions(random: Random, folder: Path) -> str:
    return attack(random, random.choice(list(_surgery().values())), folder)


def root_functions(random: Random, folder: Path) -> str:
    return attack(random, random.choice(list(_root().values())), folder)


def attack(random: Random, call: tuple[Callable[..., Any], dict[str, Any]], folder: Path) -> str:
    """Replace one argument of a call that works."""
    function, arguments = call
    name = random.choice(list(arguments))
    value = odd_value(random, name)
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        answer = function(**arguments | {name: value})
    plain = _plain(value)
    # In training another batch is another step.
    batched = "batch_tokens" in arguments.keys() - {name} and "steps" not in arguments
    if plain is not value or batched:
        other = {"batch_tokens": 7} if batched else {}
        if hasattr(value, "__next__"):
            # An iterator has been read to its end.
            return "harmless"
        torch.manual_seed(0)
        with contextlib.chdir(folder):
            again = function(**arguments | other | {name: plain})
        assert same(answer, again), f"{name}={value!r} gives another answer in other batches"
        return "equal"
    assert is_sane(answer), f"{name}={value!r} gives {answer!r:.200}"
    return "harmless"


def odd_value(random: Random, name: str) -> Any:
    if name in ("model", "before", "after"):
        return random.choice(ODD_MODELS)()
    if name in ("texts", "text", "prompts", "clean", "corrupted", "held_out"):
        return random.choice(ODD_TEXTS if random.random() < 0.8 else ODD)
    value = random.choice(ODD)
    while name in REPEATS and any(value is each for each in HUGE):
        value = random.choice(ODD)
    return value


def _plain(value: Any) -> Any:
    """The same value without numpy, where it has one."""
    return value.item() if isinstance(value, np.generic) else value


def same(one: Any, other: Any) -> bool:
    """Whether two answers agree, whatever they are made of."""
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        pairs = ((getattr(one, each.name), getattr(other, each.name)) for each in _fields(one))
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    if isinstance(one, Tensor | np.ndarray | float):
        numbers = [torch.as_tensor(each).detach().double() for each in (one, other)]
        # A standard error of a difference that is zero is noise.
        return torch.allclose(*numbers, atol=2e-3, rtol=2e-3, equal_nan=True)
    if isinstance(one, torch.nn.Module):
        return same(dict(one.state_dict()), dict(other.state_dict()))
    return callable(one) or bool(one == other) or repr(one) == repr(other)


def _fields(value: Any) -> list[Any]:
    return [each for each in dataclasses.fields(value) if each.name not in ("seconds", "metadata")]


def is_sane(answer: Any) -> bool:
    """Whether an answer that nothing else is compared with can be shown and is of some type."""
    return answer is None or bool(repr(answer)) or answer == ""


def forward(random: Random, _: Path) -> str:
    """Ids that a model reads or refuses; what it reads gives the same as one text at a time."""
    model = random.choice((decoder, encoder))()
    ids = random.choice(
        [
            *(torch.tensor([[1, 2, 3]]), torch.tensor([[1.5, 2.0]]), torch.tensor([1, 2]), None),
            *(torch.tensor([[-1, 2]]), torch.tensor([[VOCABULARY + 99]]), torch.tensor(3), "The"),
            *([[1, 2]], torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)),
            *(torch.zeros(1, 2, 3, dtype=torch.long), torch.tensor([[True, False]]), object()),
            *(torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.uint8)),
            *(Ragged.from_list([torch.tensor([1, 2]), torch.tensor([3])]), torch.tensor([[2**40]])),
            *(torch.full((2, 3), 2**31), torch.empty(1, 2, dtype=torch.long, device="meta")),
            *(Ragged.from_list([torch.tensor([1.0, 2.0])]), Ragged.from_list([torch.tensor([-5])])),
            *(np.array([[1, 2]]), torch.tensor([[math.nan]]), torch.tensor([[1 + 2j]]), {}, [], 5),
        ]
    )
    masks = [None, None, None, torch.ones(1, 3), torch.tensor([[2, 1, 0]]), [1], 2.5, "x", True]
    mask = random.choice(masks)
    more = {} if mask is None else {"mask": mask}
    with torch.no_grad():
        output = model(ids, **more)
        logits = output.logits
        rows = logits if isinstance(logits, Tensor) else logits.values
        if isinstance(ids, Ragged) and not more:
            each = [model(Ragged.from_list([one])).logits.values for one in ids.to_list()]
            assert torch.allclose(rows, torch.cat(each), atol=1e-4)
            return "equal"
        assert isinstance(ids, Tensor | list | np.ndarray), f"{ids!r:.80} was read"
        first = torch.as_tensor(ids).long()
        assert rows.shape[:-1] == first.shape
        if first.numel() and not more:
            alone = [model(row.unsqueeze(0)).logits for row in first]
            assert torch.allclose(rows, torch.cat(alone), atol=1e-4)
    return "equal"


def constructors(random: Random, _: Path) -> str:
    """Frozen configs: wrong values are refused when they are made, or when a model is built."""
    kinds: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (Sample, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}),
        (BeamSearch, {"num_beams": 3, "length_penalty": 1.0, "early_stopping": False}),
        (GenerationConfig, {"max_new_tokens": 5, "repetition_penalty": 1.0, "seed": 0}),
        (GenerationConfig, {"stop_strings": "x", "eos_token_ids": 3, "suppress_tokens": [1]}),
        (GenerationConfig, {"sampling": Greedy(), "cache": DynamicCache(), "logprobs": False}),
        (StaticCache, {"length": 16}),
        (parts.Window, {"before": 4, "after": 0}),
        (parts.Blocks, {"size": 4}),
        (parts.Prefix, {"length": 2}),
        (parts.Rotary, {"theta": 10_000.0, "fraction": 1.0}),
        (parts.Learned, {"count": 16}),
        (parts.T5Buckets, {"buckets": 32, "farthest": 128}),
        (parts.MLP, {"width": 16, "hidden": 32, "dropout": 0.0}),
        (parts.SwiGLU, {"width": 16, "hidden": 32, "dropout": 0.0}),
        (parts.LayerNorm, {"eps": 1e-5}),
        (parts.RMSNorm, {"eps": 1e-5}),
        (Gate, {"at": "output", "start": 1.0}),
        (AttentionConfig, {"width": 16, "heads": 2, "kv_heads": 1, "dropout": 0.0, "scale": 1.0}),
        (LoraConfig, {"rank": 4, "alpha": 8, "dropout": 0.0}),
        (L0Config, {"steps": 3, "weight": 0.01, "lr": 0.1}),
        (RecoveryConfig, {"batch_tokens": 64}),
        (Lengths.of, {"each": [1, 2]}),
        (Ragged.from_list, {"sequences": [torch.tensor([1])]}),
    ]
    kind, arguments = random.choice(kinds)
    arguments = _known(kind, arguments)
    if not arguments:
        return "harmless"
    name = random.choice(list(arguments))
    value = random.choice(ODD)
    made = kind(**arguments | {name: value})
    if isinstance(made, AttentionConfig):
        made = manyheads.Attention(made) if made.width < 10_000 else made
        return "harmless"
    assert not _is_nan(value), f"{kind.__qualname__}({name}=nan) was accepted"
    stored = getattr(made, name, value)
    assert same(stored, _plain(value)) or is_sane(made)
    return "equal"


def _known(kind: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that it has."""
    from inspect import signature

    known = signature(kind).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating) and math.isnan(value)


@cache
def model_folder() -> Path:
    """A small model on disk, for the whole process."""
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="fuzz-arguments-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    manyheads.save(decoder(), folder / "decoder")
    manyheads.save(vision(), folder / "vision")
    bare = build("gpt2", layers=1, width=16, heads=2, vocabulary=40, positions=24, seed=0)
    manyheads.save(bare, folder / "bare")
    (folder / "texts.txt").write_text("\n\n".join(TEXTS), "utf-8")
    (folder / "bytes.bin").write_bytes(b"\xff\xfe\x00rubbish")
    (folder / "empty.txt").write_text("", "utf-8")
    return folder


WORDS = (
    *("", " ", "x", "-1", "0", "1", "2.5", "nan", "inf", "-inf", "1e309", "99999999999999999999"),
    *("caf\udce9", "\0", "../..", "/", ".", "/dev/null", "None", "True", "-", "--", "=", "L9H9"),
    *(
        "{m}/texts.txt",
        "{m}/bytes.bin",
        "{m}/empty.txt",
        "{m}/none.txt",
        "{m}/bare",
        "{m}",
        "1 2 3",
    ),
    *("1.5 2", "-1 -2", "900", "a b", "out.json", "out.png", "out.npy", "cuda:99", "meta", "L0H0"),
    *(
        "--help",
        "--no-such-option",
        "--json",
        "--text",
        "💥" * 40,
        "a" * 3000,
        "\n",
        "\r",
        "\033[31m",
    ),
)
COMMANDS = (
    ["generate", "{m}/decoder", "--text", "The cat", "--max-new-tokens", "2", "--seed", "1"],
    ["generate", "{m}/bare", "--ids", "1 2 3", "--max-new-tokens", "2", "--top-k", "3"],
    ["generate", "{m}/decoder", "--text", "The", "--max-new-tokens", "1", "--temperature", "0.5"],
    ["encode", "{m}/decoder", "--text", "The cat", "--out", "v.npy", "--batch-tokens", "8"],
    ["encode", "{m}/bare", "--ids", "1 2 3", "--out", "v.jsonl", "--pooling", "mean"],
    ["ablate", "{m}/decoder", "--text", "The cat sat", "--heads", "L0H0", "--seed", "0"],
    ["ablate", "{m}/decoder", "--file", "{m}/texts.txt", "--tokens", "9", "--json", "a.json"],
    ["attribute", "{m}/decoder", "--text", "The cat sat on the", "--method", "direct"],
    ["attribute", "{m}/decoder", "--text", "The cat", "--method", "heads", "--steps", "2"],
    ["why", "{m}/decoder", "L0H0", "--text", "The cat", "--query", "1", "--key", "0"],
    ["compare", "{m}/decoder", "{m}/decoder", "--text", "The cat sat", "--no-kinds"],
    ["explain", "The cat sat", "--heads", "2", "--seed", "0"],
    ["convert", "{m}/decoder", "--out", "copy"],
    ["tokenizer", "{m}/texts.txt", "--out", "t.json", "--vocab-size", "300"],
    ["prune", "{m}/decoder", "--file", "{m}/texts.txt", "--fraction", "0.5", "--by", "random"],
    ["inspect", "{m}/none", "--tokens", "5", "--device", "cpu"],
    ["report", "{m}/none", "--file", "{m}/texts.txt", "--tokens", "9", "--out", "r.html"],
    ["train", "{m}/none.toml", "--set", "run.steps=1"],
    ["classify", "{m}/decoder", "--text", "The cat"],
    ["gate", "{m}/decoder", "--file", "{m}/empty.txt", "--out", "gated"],
    ["studio", "{m}/none", "--port", "99999"],
    ["completion", "bash"],
)


def command_line(random: Random, folder: Path) -> str:
    """Words of a command, one or two of them replaced, dropped, doubled or added."""
    words = [each.format(m=model_folder()) for each in random.choice(COMMANDS)]
    base = list(words)
    for _ in range(random.choice((1, 1, 2))):
        _mutate(random, words)
    if words[:1] == ["studio"]:
        # It would start a server.
        words[1:2] = [str(model_folder() / "none")]
    code, out, err = _run(words, folder)
    assert code in (0, 1, 2), f"{words}: exit code {code}"
    assert "Traceback" not in err, f"{words}: {err}"
    if code:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 or code == 1, f"{words}: {err!r}"
        assert all(len(line) < 1_000 for line in lines), f"{words}: {lines}"
        return "refused"
    if words == base:
        return "harmless"
    again = _run(words, folder)
    numbers = ("tokens/s", " s)", "made", "saved", "ms")
    assert again[0] == 0 or "exist" in again[2], f"{words}: {again}"
    stable = not any(each in out for each in numbers) and "--temperature" not in words
    if stable and again[0] == 0 and "--top-k" not in words and "--top-p" not in words:
        assert out == again[1], f"{words} prints something else the second time"
    return "equal"


def _mutate(random: Random, words: list[str]) -> None:
    place = random.randrange(len(words))
    word = random.choice(WORDS).format(m=model_folder())
    match random.randrange(5):
        case 0 if len(words) > 1:
            del words[place]
        case 1:
            words.insert(place, word)
        case 2:
            words.append(words[place])
        case _:
            words[place] = word


def _run(words: list[str], folder: Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def refusing_types(attack: Callable[[Random, Path], str]) -> Callable[[Random, Path], str]:
    """Count a refusal by the type checks that run under pytest, before ours are reached."""

    @wraps(attack)
    def attempt(random: Random, folder: Path) -> str:
        try:
            return attack(random, folder)
        except Exception as error:
            if type(error).__module__.split(".")[0] in ("beartype", "jaxtyping"):
                return "refused"
            raise

    return attempt


EVERY = (lens_functions, surgery_functions, root_functions, forward, constructors, command_line)
ATTACKS = [refusing_types(each) for each in EVERY]
