"""Training on CUDA: the fused loss is the plain one, a compiled step learns what another does."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.batch import Batch
from manyheads.data.stream import StreamPosition, StreamStep
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.train.distributed import ModelWrapper, join_processes
from manyheads.train.loop.session import train
from manyheads.train.loop.train_step import Updater, can_run_ahead, prepare_steps
from manyheads.train.loss.chunked_cross_entropy import cross_entropy_sums
from manyheads.train.objectives import CausalLM, MaskedLM, Objective
from manyheads.train.optim.optimizers import AdamW
from manyheads.train.run_file.run_config import parse_run

WORDS = 517


def loss_inputs(dtype: torch.dtype, tokens: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=draw)
    vectors, bias = torch.randn(WORDS, 64, generator=draw) / 4, torch.randn(WORDS, generator=draw)
    labels = torch.randint(WORDS, (tokens,), generator=draw).cuda()
    leaves = [each.cuda().to(dtype).requires_grad_() for each in (x, vectors, bias)]
    return leaves[0], leaves[1], leaves[2], labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_the_fused_loss_is_the_plain_one(
    dtype: torch.dtype, limit: float, squares: bool, smoothing: float
) -> None:
    x, vectors, bias, labels = loss_inputs(dtype)
    result = cross_entropy_sums(
        x, vectors, bias, labels, smoothing=smoothing, squares=squares, max_logits=50 * WORDS
    )
    pull = torch.tensor([1.0, 0.01 if squares else 0.0], device="cuda")
    got = torch.autograd.grad(result @ pull, (x, vectors, bias))
    doubles = [each.detach().double().requires_grad_() for each in (x, vectors, bias)]
    logits = F.linear(doubles[0], doubles[1], doubles[2])
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    expected = torch.stack((loss, logits.logsumexp(1).square().sum()))
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=0)
    for one, other in zip(got, torch.autograd.grad(expected @ pull.double(), doubles), strict=True):
        assert (one.double() - other).norm() < limit * other.norm()


def test_the_fused_loss_of_capped_logits_is_the_plain_one() -> None:
    x, vectors, bias, labels = loss_inputs(torch.float32)
    result = cross_entropy_sums(x, vectors, bias, labels, softcap=2.0, max_logits=50 * WORDS)
    got = torch.autograd.grad(result[0], (x, vectors, bias))
    doubles = [each.detach().double().requires_grad_() for each in (x, vectors, bias)]
    logits = 2.0 * (F.linear(doubles[0], doubles[1], doubles[2]) / 2.0).tanh()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(result[0].double(), loss, rtol=1e-4, atol=0)
    for one, other in zip(got, torch.autograd.grad(loss, doubles), strict=True):
        assert (one.double() - other).norm() < 1e-4 * other.norm()


MODELS: dict[str, tuple[dict[str, Any], Objective]] = {
    "gpt2": ({"layers": 2, "width": 128, "heads": 2, "dropout": 0.0}, CausalLM()),
    "llama-1b-shape": (
        {
            "layers": 2,
            "width": 128,
            "heads": 4,
            "kv_heads": 2,
            "head_size": 32,
            "hidden": 256,
            "gate": "channel",
        },
        CausalLM(),
    ),
    "modernbert-base": (
        {"layers": 3, "width": 128, "heads": 4, "hidden": 192},
        MaskedLM(mask=1, specials=(0, 1)),
    ),
}


def started(name: str) -> tuple[Any, Objective, Batch]:
    """A small model, what it learns, and three texts."""
    change, objective = MODELS[name]
    model = build(name, vocabulary=WORDS, seed=0, device="cuda", **change)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, WORDS, (length,), generator=draw) for length in (200, 31, 150)]
    return model, objective, Batch(texts=Ragged.from_list(texts))


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_has_the_gradients_of_another(name: str) -> None:
    model, objective, batch = started(name)
    prepared = objective.prepare(model, batch, torch.Generator().manual_seed(0)).to("cuda")
    losses, gradients = [], []
    for score in (objective.score, torch.compile(objective.score)):
        twin = copy.deepcopy(model)
        with torch.autocast("cuda", torch.bfloat16):
            loss = score(twin, prepared).combined
        loss.backward()
        losses.append(float(loss))
        gradients.append({key: each.grad for key, each in twin.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    for key, one in gradients[0].items():
        other = gradients[1][key]
        assert one is not None
        assert other is not None
        assert one.norm() > 0
        assert (one - other).norm() < 3e-2 * one.norm(), key


@pytest.mark.parametrize("name", ["gpt2", "modernbert-base"])
def test_a_step_never_waits_for_the_device(name: str) -> None:
    model, objective, batch = started(name)
    step = StreamStep(
        number=0, batches=(batch,), indices=(0,), tokens=381, sequences=3, after=StreamPosition()
    )
    [prepared_step] = prepare_steps(iter((step,)), objective, model, seed=0, first=0)
    with join_processes("none", "cuda") as processes:
        optimizer = AdamW(lr=1e-4).build(model)
        updater = Updater(
            wrapper=ModelWrapper(model.train(), processes),
            optimizer=optimizer,
            score=torch.compile(objective.score),
            seed=0,
            half=True,
            clip=1.0,
            ahead=can_run_ahead(optimizer),
        )
        pinned = prepared_step.pin_memory()
        for _ in range(3):
            updater.begin(pinned).outcome()
        torch.cuda.set_sync_debug_mode("error")
        try:
            underway = updater.begin(pinned)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert underway.outcome().finite


def test_a_run_learns(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose.\n" * 20000)
    tables = {
        "model": {
            "size": "gpt2",
            "change": {"layers": 2, "width": 64, "heads": 2, "vocabulary": 256, "positions": 128},
        },
        "data": {
            "train": str(tmp_path / "text.txt"),
            "validation": 0.05,
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "end": "",
            "layout": "fixed",
            "max_length": 128,
            "batch": 2048,
        },
        "objective": {"kind": "CausalLM"},
        "optimizer": {"lr": 3e-3},
        "run": {
            "folder": str(tmp_path / "out"),
            "steps": 60,
            "precision": "bfloat16",
            "compile": True,
            "device": "cuda",
        },
    }
    train(parse_run(tables), progress=False)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 5
    assert losses[-1] < 1
