"""Size and speed of models before and after half of their heads are pruned.

    python bench/prune.py [--device cuda] [--tokens 2048] [--length 512] [--rounds 7]

First it checks that a pruned model computes what the full one computes with the same heads at zero.
Then it times all attention sublayers and the full forward, the models in turn in one process. Half
of the heads are removed: the same number in each layer and group, at random over the model, and
where keys are shared by whole groups.

On CUDA both are recorded as CUDA graphs, so that the device is timed: small models called from
Python wait for Python. The last column is that of such calls.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from side_by_side import Race, Work, check_agreement, count, race, say, show
from torch import Tensor

from manyheads.attention import Attention
from manyheads.checkpoints.folder import load
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.surgery.pruning import prune
from manyheads.taps import Head, Site, Tap

WHOLE = "whole"
GOAL = 1.4
PRECISION = {"cuda": torch.bfloat16, "cpu": torch.float32}
# Of the largest logit. In half precision a sum over fewer heads is rounded at other places.
LIMIT = {"cuda": 5e-2, "cpu": 1e-5}
SHARED = {
    "width": 768,
    "heads": 12,
    "kv_heads": 3,
    "head_size": 64,
    "hidden": 2048,
    "layers": 6,
    "vocabulary": 4096,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, tokens it reads, and its pruned versions by how the heads were taken."""

    name: str
    models: dict[str, Decoder]
    gone: dict[str, list[Head]]
    batch: Ragged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=0, help="in all; 0 leaves it to the device")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=0, help="timed together; 0: by the device")
    parser.add_argument("--only", default="", help="the models whose name holds this")
    request = parser.parse_args()
    on_cuda = request.device == "cuda"
    request.tokens = request.tokens or (32_768 if on_cuda else 2048)
    request.calls = request.calls or (10 if on_cuda else 1)
    name = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    dtype = PRECISION[request.device]
    say(f"{name}, torch {torch.__version__}, {dtype}, {request.tokens} tokens by {request.length}")
    if not on_cuda:
        say("cores: time of all cores together, which other work on the machine does not stretch")
    for case_name, make in MODELS.items():
        if request.only in case_name:
            with torch.inference_mode():
                measure(prepare(case_name, make(), request), request)


def prepare(name: str, loaded: Any, request: argparse.Namespace) -> Case:
    """The model and its halves on the device, and a batch of words drawn by a seed."""
    assert isinstance(loaded, Decoder)
    model = loaded.to(device=request.device, dtype=PRECISION[request.device]).eval()
    gone = dict(halves(model))
    models = {WHOLE: model, **{way: prune(model, heads) for way, heads in gone.items()}}
    drawn = torch.Generator().manual_seed(0)
    words = model.config.embedding.vocabulary
    pieces = [
        torch.randint(words, (request.length,), generator=drawn).to(request.device)
        for _ in range(max(1, request.tokens // request.length))
    ]
    return Case(name, models, gone, Ragged.from_list(pieces))


def halves(model: Decoder) -> Iterator[tuple[str, list[Head]]]:
    """Half of the heads by each way."""
    drawn, layers = random.Random(0), attentions(model)
    everyone = [
        Head(layer, head) for layer, each in enumerate(layers) for head in range(each.config.heads)
    ]
    yield "even", [address for address in everyone if address.head % 2]
    yield "by chance", drawn.sample(everyone, len(everyone) // 2)
    first = layers[0].config
    if first.key_heads < first.heads:
        shared = first.heads // first.key_heads
        keys = sorted({(address.layer, address.head // shared) for address in everyone})
        out = set(drawn.sample(keys, len(keys) // 2))
        yield (
            "whole groups",
            [address for address in everyone if (address.layer, address.head // shared) in out],
        )


def attentions(model: Decoder) -> list[Attention]:
    result = [layer.attention for layer in model.stack.layers]
    return [each for each in result if isinstance(each, Attention)]


def measure(case: Case, request: argparse.Namespace) -> None:
    """Whether the pruned models are right, then their size and their speed."""
    # Logits of all words by all tokens are large: one sequence is enough to compare.
    one = Ragged.from_list([case.batch.values[: request.length]])
    worst = 0.0
    for way, heads in case.gone.items():
        same: dict[str, Work] = {
            "ablated": partial(logits, case.models[WHOLE], one, heads),
            way: partial(logits, case.models[way], one, ()),
        }
        worst = max(worst, check_agreement(same, truth="ablated", limit=LIMIT[request.device]))
    hidden = torch.randn(case.batch.values.shape[0], case.models[WHOLE].config.stack.width)
    states = case.batch.with_values(hidden.to(request.device, PRECISION[request.device]))
    attention = {way: attend(each, states) for way, each in case.models.items()}
    forwards: dict[str, Work] = {
        way: partial(forward, each, case.batch) for way, each in case.models.items()
    }
    if request.device == "cuda":
        times = {
            "attention": timed(recorded(attention), request),
            "forward": timed(recorded(forwards), request),
            "called": timed(forwards, request),
        }
    else:
        times = {"attention": timed(attention, request), "forward": timed(forwards, request)}
    report(case, times, worst, request.device)


def logits(model: Decoder, batch: Ragged, without: Sequence[Head]) -> Tensor:
    """The model's answer, some of its heads silent."""
    gone: dict[Site, Callable[[Tensor], Tensor]] = {}
    for layer in {head.layer for head in without}:
        heads = [head.head for head in without if head.layer == layer]
        gone[Site(layer, Tap.HEAD_OUTPUT)] = partial(silenced, heads=heads)
    result = model(batch, watch=ActivationEditor(gone) if gone else None).logits
    assert isinstance(result, Ragged)
    return result.values


def silenced(values: Tensor, heads: list[int]) -> Tensor:
    left = values.clone()
    left[:, heads] = 0
    return left


def attend(model: Decoder, states: Ragged) -> Work:
    """All attention sublayers on the same states; positions are encoded once, as in a forward."""
    layers = attentions(model)
    encoding = layers[0].encode_positions(states.lengths.positions)

    def work() -> Tensor:
        for layer in layers:
            written = layer(states, encoding=encoding)
        return written.values

    return work


def forward(model: Decoder, batch: Ragged) -> Tensor:
    """All layers, without the scores of words, which heads do not change."""
    positions = batch.lengths.positions
    hidden, _ = model.stack(model.embedding.embed(batch, positions, None), positions=positions)
    return hidden.values


def recorded(entrants: dict[str, Work]) -> dict[str, Work]:
    """The same, each as one launch."""
    return {name: _record(work) for name, work in entrants.items()}


def _record(work: Work) -> Work:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = work()

    def replay() -> Tensor:
        graph.replay()
        return answer

    return replay


def timed(entrants: dict[str, Work], request: argparse.Namespace) -> Race:
    return race(entrants, device=request.device, rounds=request.rounds, calls=request.calls)


def report(case: Case, times: dict[str, Race], worst: float, device: str) -> None:
    rows, ratios = [], []
    for way, model in case.models.items():
        held = sum(each.numel() for each in model.parameters())
        size = sum(each.numel() * each.element_size() for each in model.parameters())
        row = [way, str(sum(each.config.heads for each in attentions(model)))]
        row += [f"{held / 1e6:.1f} M", count(size, "B")]
        for race_ in times.values():
            ratio = race_.host_ratio if device == "cpu" else race_.ratio
            seconds = race_.host_seconds if device == "cpu" else race_.seconds
            row += [count(seconds(way), "s"), f"{ratio(WHOLE, way):.2f}"]
        rows.append(row)
        if way != WHOLE:
            attention = times["attention"]
            ratios.append(
                (attention.host_ratio if device == "cpu" else attention.ratio)(WHOLE, way)
            )
    unit = "cores" if device == "cpu" else "device"
    columns = ["", "heads", "weights", "size"]
    columns += [column for name in times for column in (f"{name}, {unit}", "x")]
    show(f"{case.name}: pruned differs from ablated by at most {worst:.1e}", columns, rows)
    verdict = "met" if min(ratios) >= GOAL else "missed"
    say(f"attention at least {GOAL} times faster: {verdict}, {min(ratios):.2f} at the least\n")


MODELS: dict[str, Callable[[], Any]] = {
    "house-gpt": partial(load, "house-gpt"),
    "gpt2 shape": partial(build, "gpt2", seed=0),
    "llama of shared keys": partial(build, "llama-1b-shape", seed=0, **SHARED),
}

if __name__ == "__main__":
    main()
