"""Generation on CUDA against transformers: the Llama shape of 1.24 billion weights, in bfloat16."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from side_by_side import alone, count, race, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.decoding.generation import generate
from manyheads.decoding.sampling import Sample
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps, cuda_graph_steps
from manyheads.models.build import get_config
from manyheads.ragged import Ragged

__all__ = ["memory_rate", "pair", "run"]

PROMPT, NEW_TOKENS = 128, 256
# Tokens a second: a little more than library calls in one CUDA graph give in steps alone.
GOALS = {1: 1250, 8: 7000, 32: 26_000, 64: 46_000, 128: 76_000}
SAMPLING = Sample(temperature=0.8, top_k=50, top_p=0.9)
# The peer's own cache grows, and its kernels plan anew for every length, in the first text ten
# times slower than later: it writes two texts, and both take longer than all of ours together. A
# static cache is compiled anew for every batch, which takes half a minute. So these have to do.
PEER = (1, 32)
# Of the length of a step's scores; both round to eight bits in every layer.
LIMIT = 5e-2
# Rows whose scores are compared at every step.
CHECKED = 2


def run(rounds: int, quick: bool, batches: tuple[int, ...] = tuple(GOALS)) -> dict[str, float]:
    peer, ours = pair()
    limit = _reading_limit(ours)
    figures: dict[str, float] = {}
    for batch in batches:
        ids = _prompts(batch)
        ways = {
            "manyheads": partial(_write, ours, ids),
            "manyheads, top-k and top-p": partial(_write, ours, ids, sampling=SAMPLING, seed=0),
        }
        seconds = {name: _seconds(way, rounds) for name, way in ways.items()}
        if batch in PEER:
            text = _write_theirs(peer, ids)
            seconds["transformers"] = _seconds(partial(_write_theirs, peer, ids), 1, warmups=0)
            if not quick:
                seconds["transformers, static cache, compiled"] = alone(_static_seconds, batch)
        else:
            text = _write(ours, ids)
        off = _check_steps(peer, ours, ids, text)
        step, reading = _step_seconds(ours, ids), _reading_seconds(ours, ids)
        figures |= _report(batch, seconds, step, reading, limit, off)
    say(f"limit: a step reads all weights, {limit:,.0f} a second")
    return figures


def _report(
    batch: int,
    seconds: Mapping[str, float],
    step: float,
    reading: float,
    limit: float,
    off: float,
) -> dict[str, float]:
    rates = {name: batch * NEW_TOKENS / one for name, one in seconds.items()}
    rates["steps alone"] = batch / step
    rows = [
        [
            name,
            f"{rate:,.0f}",
            f"{rate / batch / limit:.0%}",
            f"{rate / GOALS[batch]:.0%}" if batch in GOALS else "",
            f"{rates['manyheads'] / rate:.2f}",
        ]
        for name, rate in rates.items()
    ]
    title = (
        f"batch {batch}, {PROMPT} tokens read in {count(reading, 's')}, {NEW_TOKENS} written, "
        f"reading included, greedy unless named; scores of every step agree to {off:.1e}"
    )
    goal = f"of goal {GOALS[batch]:,}" if batch in GOALS else ""
    show(title, ["", "tokens/s", "of limit", goal, "ours / this"], rows)
    figures = {
        f"{batch},{'' if name == 'manyheads' else f' {name},'} tokens/s": rate
        for name, rate in rates.items()
    }
    figures[f"{batch}, steps alone, share of limit"] = 1 / step / limit
    return figures | {f"{batch}, seconds of reading": reading}


def _prompts(batch: int) -> Tensor:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(10, 1000, (batch, PROMPT), generator=draw).cuda()


def _seconds(work: Callable[[], Tensor], rounds: int, *, warmups: int = 2) -> float:
    """By default from the third call on; the first two compile and record."""
    times = []
    for _ in range(warmups + rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times[warmups:])


def _static_seconds(batch: int) -> float:
    """The peer with a static cache, in a process of its own: it compiles and records globally."""
    static = partial(_write_theirs, _peer(), _prompts(batch), static=True)
    return _seconds(static, 1)


def pair() -> tuple[Any, Any]:
    """One set of random weights in both."""
    peer = _peer()
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = load(folder, device="cuda")
    return peer, ours


def _peer() -> Any:
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
    with torch.device("cuda"):
        peer = make._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return peer.to("cuda").eval()


def _write(model: Any, ids: Tensor, **options: Any) -> Tensor:
    written = generate(
        model, ids, max_new_tokens=NEW_TOKENS, eos_token_ids=(), progress=False, **options
    )
    return torch.tensor([one.ids for one in written])


@torch.inference_mode()
def _write_theirs(
    model: Any, ids: Tensor, *, tokens: int = NEW_TOKENS, static: bool = False
) -> Tensor:
    settings = {"cache_implementation": "static"} if static else {}
    written: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
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

    return race({"step": replay}, device="cuda", rounds=10, calls=5).seconds("step")


@torch.inference_mode()
def _reading_seconds(model: Any, ids: Tensor) -> float:
    """The prompts alone, with the program that reads them if there is one."""
    steps = cuda_graph_steps(model, len(ids), PROMPT + NEW_TOKENS)
    prompts = Ragged.from_padded(ids)
    work = {"reading": partial(steps.start, prompts)}
    return race(work, device="cuda", rounds=5, warmups=3).seconds("reading")


@torch.inference_mode()
def _check_steps(peer: Any, ours: Any, ids: Tensor, written: Tensor) -> float:
    """Our steps over the tokens that transformers generated, against its scores of the full text.

    Tokens themselves cannot be compared: random weights leave many words as good as equal.
    """
    text = torch.cat((ids, written.to(ids.device)), dim=1)
    steps = cuda_graph_steps(ours, len(ids), text.shape[1])
    result = steps.start(Ragged.from_padded(ids))
    expected = peer(text[:CHECKED]).logits[:, PROMPT - 1 :].float()
    worst = torch.zeros((), device=ids.device)
    for step in range(NEW_TOKENS):
        one, other = result[:CHECKED].float(), expected[:, step]
        worst = torch.maximum(worst, (one - other).norm() / other.norm())
        result = steps.next(text[:, PROMPT + step])
    if not float(worst) <= LIMIT:
        raise SystemExit(f"scores differ by {worst:.1e} of their length, more than {LIMIT}")
    return float(worst)


def _reading_limit(model: Any) -> float:
    """Steps a second if all a step did were to read the weights."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    rate = memory_rate()
    say(f"{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}")
    say(f"memory gives {count(rate, 'B/s')}, the weights are {count(weights, 'B')}\n")
    return rate / weights


def memory_rate() -> float:
    """Bytes per second, by a copy: it reads and writes, and is nearer to the limit than a sum."""
    block = torch.ones(2**30, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(block)
    times = race({"copy": lambda: other.copy_(block)}, device="cuda", rounds=10)
    return 2 * block.nbytes / times.seconds("copy")
