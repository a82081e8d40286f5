"""Generation on CUDA against transformers: the Llama shape of 1.24 billion weights, in bfloat16."""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from side_by_side import Work, count, race, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.decoding.generation import generate
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps, cuda_graph_steps
from manyheads.models.build import get_config
from manyheads.ragged import Ragged

__all__ = ["run"]

PROMPT, NEW_TOKENS = 128, 256
# Tokens a second in steps alone: a little more than library calls in one CUDA graph give.
GOALS = {1: 1250, 8: 7000, 32: 26_000, 64: 46_000, 128: 76_000}
# Of the length of a step's scores; both round to eight bits in every layer.
LIMIT = 5e-2


def run(rounds: int, quick: bool, batches: tuple[int, ...] = tuple(GOALS)) -> dict[str, float]:
    peer, ours = _pair()
    limit = _reading_limit(ours)
    figures = {}
    for batch in batches:
        draw = torch.Generator().manual_seed(batch)
        ids = torch.randint(10, 1000, (batch, PROMPT), generator=draw).cuda()
        entrants: dict[str, Work] = {
            "manyheads": partial(_write, ours, ids),
            "transformers": partial(_write_theirs, peer, ids),
        }
        if not quick:
            entrants["manyheads compiled"] = partial(_write, ours, ids, compiled=True)
            entrants["transformers static"] = partial(_write_theirs, peer, ids, static=True)
        off = _check_steps(peer, ours, ids)
        times = race(entrants, device="cpu", rounds=rounds, warmups=1 if quick else 2)
        rows = []
        for name in entrants:
            rate = batch * NEW_TOKENS / times.seconds(name)
            ratio = times.ratio(name, "manyheads")
            rows.append([name, f"{rate:,.0f}", f"{rate / batch / limit:.0%}", f"{ratio:.2f}"])
            peer_name = "" if name == "manyheads" else f" {name},"
            figures[f"{batch},{peer_name} tokens/s"] = rate
        title = (
            f"greedy, batch {batch}, {PROMPT} tokens read, {NEW_TOKENS} written, reading included; "
            f"scores of every step agree to {off:.1e}"
        )
        show(title, ["", "tokens/s", "of limit", "times ours"], rows)
        rate = batch / _step_seconds(ours, ids)
        goal = f", goal {GOALS[batch]:,}" if batch in GOALS else ""
        say(f"steps alone: {rate:,.0f} tokens/s, {rate / batch / limit:.0%} of the limit{goal}\n")
        figures[f"{batch}, steps alone, tokens/s"] = rate
        figures[f"{batch}, steps alone, share of limit"] = rate / batch / limit
    say(f"limit: a step reads all weights, {limit:,.0f} a second")
    return figures


def _pair() -> tuple[Any, Any]:
    """One set of random weights in both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: Any = get_config("llama-1b-shape")
    attention = shape.stack.layers[0].attention.inner
    config = LlamaConfig(
        hidden_size=shape.stack.width,
        intermediate_size=shape.stack.layers[0].feedforward.inner.hidden,
        num_hidden_layers=len(shape.stack.layers),
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.key_heads,
        head_dim=attention.size,
        vocab_size=shape.embedding.vocabulary,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    make: Any = LlamaForCausalLM
    peer = make._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = load(folder, device="cuda")
    return peer.to("cuda").eval(), ours


def _write(model: Any, ids: Tensor, *, compiled: bool = False) -> Tensor:
    written = generate(
        model, ids, max_new_tokens=NEW_TOKENS, eos_token_ids=(), compiled=compiled, progress=False
    )
    return torch.tensor([one.ids for one in written])


@torch.inference_mode()
def _write_theirs(model: Any, ids: Tensor, *, static: bool = False) -> Tensor:
    settings = {"cache_implementation": "static"} if static else {}
    written: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return written[:, ids.shape[1] :].cpu()


@torch.inference_mode()
def _step_seconds(model: Any, ids: Tensor) -> float:
    """The recorded step in the middle of the text, without choosing a token."""
    steps = CudaGraphSteps(model, len(ids), PROMPT + NEW_TOKENS)
    steps.start(Ragged.from_padded(ids))
    for _ in range(NEW_TOKENS // 2):
        steps.next(ids[:, 0])
    program = steps.latest
    assert program is not None

    def replay() -> Tensor:
        program.graph.replay()
        return program.logits

    return race({"step": replay}, device="cuda", rounds=20, calls=5).seconds("step")


@torch.inference_mode()
def _check_steps(peer: Any, ours: Any, ids: Tensor) -> float:
    """Our steps over the tokens that transformers generated, against its scores of the full text.

    Tokens themselves cannot be compared: random weights leave many words as good as equal.
    """
    text = torch.cat((ids, _write_theirs(peer, ids).cuda()), dim=1)
    steps = cuda_graph_steps(ours, len(ids), text.shape[1])
    result = steps.start(Ragged.from_padded(ids))
    worst = 0.0
    expected = peer(text[:4]).logits[:, PROMPT - 1 :].float()
    for step in range(NEW_TOKENS):
        one, other = result[:4].float(), expected[:, step]
        worst = max(worst, float((one - other).norm() / other.norm()))
        result = steps.next(text[:, PROMPT + step])
    if not worst <= LIMIT:
        raise SystemExit(f"scores differ by {worst:.1e} of their length, more than {LIMIT}")
    return worst


def _reading_limit(model: Any) -> float:
    """Steps a second if all a step did were to read the weights."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    block = torch.ones(2**30, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(block)
    # A copy reads and writes, and comes nearer to the limit than a sum.
    times = race({"copy": lambda: other.copy_(block)}, device="cuda", rounds=10)
    rate = 2 * block.nbytes / times.seconds("copy")
    say(f"{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}")
    say(f"memory gives {count(rate, 'B/s')}, the weights are {count(weights, 'B')}\n")
    return rate / weights
