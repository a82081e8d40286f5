"""A run is, step for step, a plain PyTorch loop over the same model of `transformers`."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from manyheads.data.chunks import FixedChunks
from manyheads.data.store import open_store
from manyheads.data.stream import Stream
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import parse_run
from tests.train.tiny import tables, write_corpus

STEPS = 20
RATE = 3e-3


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=300,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def plain_losses(model: Any, steps: list[Tensor]) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each step, as anyone would write it."""
    tables = ("wte", "wpe", "embed_tokens")
    decaying = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not any(table in name for table in tables)
    ]
    spared = [each for each in model.parameters() if all(each is not one for one in decaying)]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
    )
    model.train()
    result = []
    for step, ids in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 5)
        loss = model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        result.append((loss.item(), norm.item()))
    return result


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_first_twenty_steps_are_those_of_a_plain_loop(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    torch.manual_seed(0)
    peer = make()
    peer.save_pretrained(tmp_path / "start")
    settings = tables(tmp_path, steps=STEPS, clip=0.5)
    settings["model"] = {"folder": str(tmp_path / "start")}
    settings["data"] |= {"layout": "fixed", "store": str(tmp_path / "store")}
    settings["optimizer"] = {"lr": RATE, "decay": 0.1}
    settings["schedule"] = {"kind": "Stable", "warmup": 5}
    train(parse_run(settings), progress=False)
    ours = [
        (line["loss"], line["norm"]) for line in MetricsLog(tmp_path / "out/metrics.jsonl").read()
    ]
    (place,) = (tmp_path / "store").iterdir()
    stream = Stream(FixedChunks(open_store(place), length=16), batch_tokens=64, micro_batches=2)
    steps = [
        torch.cat([batch.texts.to_padded() for batch in step.batches if batch.texts is not None])
        for step in islice(stream.steps(), STEPS)
    ]
    expected = plain_losses(peer, steps)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in expected], abs=1e-4)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in expected], abs=1e-3)
    assert ours[-1][0] < ours[0][0] - 1
