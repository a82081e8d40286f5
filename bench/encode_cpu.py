"""MiniLM on the CPU: manyheads, sentence-transformers and onnxruntime, in float32.

On a Xeon with AVX512 and no VNNI, linear layers take 64 % of our time, at the rate of large
products, and PyTorch's flash attention 21 %. Batched products instead of it, for texts of up to 64
tokens, made the whole 5 % faster there, but small groups of texts slower: not worth a second way.
"""

from collections.abc import Sequence
from functools import partial

import torch
from corpus import passages, prose
from encode_peers import BATCH, OnnxRuntime, SentenceTransformers, in_batches, minilm
from side_by_side import Race, Work, check_agreement, count, race, say, show
from torch import nn

from manyheads.checkpoints.folder import load
from manyheads.encoding.encode import encode
from manyheads.models.encoder import Encoder

__all__ = ["run"]

OURS, THEIRS, ONNX = "manyheads", "sentence-transformers", "onnxruntime, fused"
LIMIT = 1e-5
SIDE = 2048
TEXTS = 2000
TOKENS = range(5, 257)
# One in so many batches of 32, of all texts sorted by tokens, is timed unless all are. Both peers
# then meet a little less padding than in the whole.
EVERY = 6


def run(rounds: int, quick: bool) -> dict[str, float]:
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}, real MiniLM-L6")
    say(f"limit: the rate of a product of {SIDE} x {SIDE} matrices, timed in the same rounds")
    say("wall: by the clock; cores: time of all cores together, which other work does not stretch")
    model = load(minilm())
    assert isinstance(model, Encoder)
    texts, lengths = _texts(model, quick)
    onnx = OnnxRuntime(threads=torch.get_num_threads())
    say(f"onnxruntime's fusions: {onnx.fusions}\n")
    entrants: dict[str, Work] = {
        OURS: partial(encode, model, texts, progress=False),
        THEIRS: partial(SentenceTransformers().encode, texts),
        ONNX: partial(onnx.encode, texts),
    }
    difference = check_agreement(entrants, truth=THEIRS, limit=LIMIT)
    a, b = torch.randn(2, SIDE, SIDE)
    # The agreement was the first call of each.
    times = race({**entrants, "matmul": lambda: a @ b}, device="cpu", rounds=rounds, warmups=0)
    flops = _flops(model, lengths)
    _report(times, list(entrants), len(texts), sum(lengths), flops)
    _goal(times, THEIRS, 1.5, difference)
    _goal(times, ONNX, 1.0, difference)
    return {
        "times sentence-transformers": times.host_ratio(THEIRS, OURS),
        "times sentence-transformers, by the clock": times.ratio(THEIRS, OURS),
        "times onnxruntime": times.host_ratio(ONNX, OURS),
        "times onnxruntime, by the clock": times.ratio(ONNX, OURS),
        "share of limit": _share(times, OURS, flops),
    }


def _texts(model: Encoder, quick: bool) -> tuple[list[str], list[int]]:
    result = prose()
    texts = passages(TEXTS, _lengths(model, result), result, TOKENS)
    lengths = _lengths(model, texts)
    _describe("all texts", texts, lengths)
    if not quick:
        return texts, lengths
    by_tokens = sorted(range(len(texts)), key=lambda place: -lengths[place])
    taken = sorted(place for batch in in_batches(by_tokens)[EVERY // 2 :: EVERY] for place in batch)
    part, part_lengths = [texts[place] for place in taken], [lengths[place] for place in taken]
    _describe("timed part", part, part_lengths)
    return part, part_lengths


def _lengths(model: Encoder, texts: list[str]) -> list[int]:
    tokenizer = type(model.tokenizer).from_str(model.tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [len(one.ids) for one in tokenizer.encode_batch_fast(texts)]


def _describe(name: str, texts: Sequence[str], lengths: Sequence[int]) -> None:
    by_letters = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    by_tokens = sorted(range(len(texts)), key=lambda place: -lengths[place])
    median = lengths[by_tokens[len(texts) // 2]]
    letters, tokens = (_padding(order, lengths) for order in (by_letters, by_tokens))
    say(
        f"{name}: {len(texts):,} of the Python library's docstrings and comments, "
        f"{sum(lengths):,} tokens, mean {sum(lengths) / len(texts):.1f}, median {median}, longest "
        f"{max(lengths)}; padding in batches of {BATCH}: {letters:.1%} sorted by characters, "
        f"{tokens:.1%} by tokens"
    )


def _padding(order: Sequence[int], lengths: Sequence[int]) -> float:
    """The share of computed tokens that are padding."""
    batches = in_batches(order)
    computed = sum(len(batch) * max(lengths[place] for place in batch) for batch in batches)
    return 1 - sum(lengths) / computed


def _flops(model: Encoder, lengths: Sequence[int]) -> float:
    """Useful multiplications: each weight once per token, each pair of tokens twice."""
    weights = sum(
        each.weight.numel() for each in model.stack.modules() if isinstance(each, nn.Linear)
    )
    width, layers = model.config.stack.width, len(model.config.stack.layers)
    pairs = sum(length * length for length in lengths)
    return 2.0 * weights * sum(lengths) + 4.0 * width * layers * pairs


def _report(times: Race, names: list[str], texts: int, tokens: int, flops: float) -> None:
    rows = []
    for name in names:
        seconds, cores = times.seconds(name), times.host_seconds(name)
        rows.append(
            [
                name,
                count(seconds, "s"),
                count(cores, "s"),
                f"{texts / seconds:,.0f}",
                f"{tokens / seconds:,.0f}",
                f"{_share(times, name, flops):.0%}",
                f"{times.ratio(name, OURS):.2f}",
                f"{times.host_ratio(name, OURS):.2f}",
            ]
        )
    columns = ["", "wall", "cores", "texts/s", "tokens/s", "of limit"]
    show("texts to vectors", [*columns, "wall / ours", "cores / ours"], rows)


def _share(times: Race, name: str, flops: float) -> float:
    return flops / (2 * SIDE**3) / times.host_ratio(name, "matmul")


def _goal(times: Race, peer: str, goal: float, difference: float) -> None:
    wall, cores = times.ratio(peer, OURS), times.host_ratio(peer, OURS)
    say(
        f"goal: at least {goal:g} times as fast as {peer}; by the clock {wall:.2f}, by the cores' "
        f"time {cores:.2f} (vectors differ by at most {difference:.1e})"
    )
