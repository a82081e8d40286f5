"""Generation on the CPU against transformers: GPT-2 small with random weights, one text."""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from side_by_side import Work, check_agreement, count, race, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.decoding.generation import generate

__all__ = ["run"]

OURS, THEIRS, READ = "manyheads", "transformers", "reading the weights"
PROMPT = 32
GOAL = 1.7


def run(rounds: int, quick: bool) -> dict[str, float]:
    new_tokens = 32 if quick else 128
    peer, ours = _pair()
    ids = torch.randint(50257, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    entrants: dict[str, Work] = {
        OURS: partial(_write, ours, ids, new_tokens),
        THEIRS: partial(_write_theirs, peer, ids, new_tokens),
    }
    check_agreement(entrants, truth=THEIRS, limit=0.0)
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}, the same tokens")
    read = _bytes_a_token(ours)
    block = torch.ones(read // 4)
    times = race({**entrants, READ: block.sum}, device="cpu", rounds=rounds)
    rows = []
    for name in entrants:
        each, cores = times.seconds(name) / new_tokens, times.host_seconds(name) / new_tokens
        share = new_tokens / times.ratio(name, READ)
        rows.append(
            [
                name,
                f"{1 / each:.1f}",
                count(each, "s"),
                count(cores, "s"),
                f"{share:.0%}",
                f"{times.ratio(name, OURS):.2f}",
                f"{times.host_ratio(name, OURS):.2f}",
            ]
        )
    columns = ["", "tokens/s", "a token", "cores", "of limit", "wall / ours", "cores / ours"]
    title = f"greedy, GPT-2 small, {PROMPT} tokens read, {new_tokens} written, one text"
    show(title, columns, rows)
    rate = read / times.seconds(READ)
    say(f"limit: the {count(read, 'B')} of weights a token read at {count(rate, 'B/s')}, as summed")
    wall, cores = times.ratio(THEIRS, OURS), times.host_ratio(THEIRS, OURS)
    say(f"goal: {GOAL} times as fast; by the clock {wall:.2f}, by the cores' time {cores:.2f}\n")
    return {
        "times transformers": cores,
        "times transformers, by the clock": wall,
        "tokens/s": new_tokens / times.seconds(OURS),
        "share of limit": new_tokens / times.ratio(OURS, READ),
    }


def _pair() -> tuple[Any, Any]:
    """One set of random weights in both."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    make: Any = GPT2LMHeadModel
    peer = make(config).eval()
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return peer, load(folder)


def _write(model: Any, ids: Tensor, new_tokens: int) -> Tensor:
    [written] = generate(model, ids, max_new_tokens=new_tokens, eos_token_ids=(), progress=False)
    return torch.tensor(written.ids)


@torch.inference_mode()
def _write_theirs(model: Any, ids: Tensor, new_tokens: int) -> Tensor:
    written: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return written[0, ids.shape[1] :]


def _bytes_a_token(model: Any) -> int:
    """All weights except the positions, of which a token reads one row."""
    kept: int = sum(parameter.nbytes for parameter in model.parameters())
    return kept - int(model.embedding.positions.weight.nbytes)
