"""Training steps on the CPU: real sentences, packed and padded, here and in transformers."""

import random
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from corpus import prose
from side_by_side import Work, check_agreement, race, say, show
from torch import Tensor, nn

from manyheads.checkpoints.folder import load
from manyheads.ragged import Ragged

__all__ = ["run"]

PACKED, PADDED, THEIRS = "packed", "padded", "transformers, padded"
LONGEST, TEXTS, LETTERS = 128, 64, 256
# Of the largest logit, in float32.
LIMIT = 1e-4


def run(rounds: int) -> dict[str, float]:
    texts = _texts()
    lengths = [len(text) for text in texts]
    ragged = Ragged.from_list([torch.tensor(text) for text in texts])
    rows = ragged.to_padded()
    request = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    peer, packed, padded = _same_weights()
    logits: dict[str, Work] = {
        PACKED: lambda: packed(ragged).logits.values,
        # Every row as long as the longest: what a model without ragged batches computes.
        PADDED: lambda: padded(rows).logits[request],
        THEIRS: lambda: peer(input_ids=rows, attention_mask=request.long()).logits[request],
    }
    # Ours reads padding as text where it is not told of it, so that only the peer is a judge.
    judged = {name: logits[name] for name in (PACKED, THEIRS)}
    off = check_agreement(judged, truth=THEIRS, limit=LIMIT)
    models = {PACKED: packed, PADDED: padded, THEIRS: peer}
    steps = {name: _step(models[name], logits[name], ragged.values) for name in logits}
    times = race(steps, device="cpu", rounds=rounds)
    useful = sum(lengths) / rows.numel()
    table = [
        [
            name,
            f"{times.seconds(name) * 1e3:.0f} ms",
            f"{sum(lengths) / times.seconds(name):,.0f}",
            f"{1.0 if name == PACKED else useful:.0%}",
            f"{times.host_ratio(PADDED, name):.2f}",
            f"{times.host_ratio(THEIRS, name):.2f}",
        ]
        for name in steps
    ]
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    title = (
        f"{TEXTS} docstrings of at most {LONGEST} bytes, a step of a small BERT; "
        f"logits within {off:.1e}"
    )
    columns = ["", "a step", "real tokens/s", "useful tokens", "times padded (cores)", "theirs"]
    show(title, columns, table)
    share = times.host_ratio(PADDED, PACKED) * useful
    say(
        f"limit of packing by useful tokens alone: {1 / useful:.2f} times padded, {share:.0%} of it"
    )
    return {"times transformers": times.host_ratio(THEIRS, PACKED), "share of limit": share}


def _same_weights() -> tuple[Any, Any, Any]:
    """A BERT of transformers and two of ours with its weights."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=LETTERS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    kind: Any = BertForMaskedLM
    peer = kind._from_config(config, attn_implementation="sdpa")
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return peer.train(), load(folder).train(), load(folder).train()


def _step(model: nn.Module, logits: Work, answers: Tensor) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(logits(), answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _texts() -> Sequence[Sequence[int]]:
    drawn = random.Random(0).sample(prose(), TEXTS)
    return [tuple(text.encode()[:LONGEST]) for text in drawn]
