"""GPT-2 small on the CPU: every statistic of every head, in float32 with random weights."""

from functools import cache
from importlib.util import find_spec

import torch
from side_by_side import Race, Work, alone, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Tap

__all__ = ["run"]

TOKENS = 2048
FORWARD, OURS, PATTERNS = "plain forward", "all statistics", "all patterns kept"
PEER = "TransformerLens, run_with_cache"
CLASSES = {f"class {number}": range(100 * number, 100 * number + 100) for number in range(5)}
LIMIT = 1e-4


def run(rounds: int, quick: bool) -> dict[str, float]:
    tokens = TOKENS // 4 if quick else TOKENS
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}, random weights")
    say("wall: by the clock; cores: time of all cores together, which other work does not stretch")
    say("memory: beyond the model's weights, each in a process of its own\n")
    names = [FORWARD, OURS, PATTERNS]
    if find_spec("transformer_lens") is None:
        say(f"{PEER}: not installed here (pip install transformer_lens)\n")
    else:
        names.append(PEER)
    _check(tokens // 8)
    memory = {name: alone(_extra, name, tokens) for name in names}
    times = race({name: _work(name, tokens) for name in names}, device="cpu", rounds=rounds)
    return _report(times, memory, names, tokens)


def _work(name: str, tokens: int) -> Work:
    entrants = {FORWARD: _forward, OURS: _statistics, PATTERNS: _patterns, PEER: _peer}
    return entrants[name](tokens)


@cache
def _model(tokens: int) -> Decoder:
    model = build("gpt2", positions=tokens, seed=0)
    assert isinstance(model, Decoder)
    return model


def _text(tokens: int) -> Tensor:
    return torch.randint(50257, (tokens,), generator=torch.Generator().manual_seed(0))


def _forward(tokens: int) -> Work:
    model, batch = _model(tokens), Ragged.from_list([_text(tokens)])

    def work() -> Tensor:
        with torch.inference_mode():
            return model.hidden(batch)[0].values

    return work


def _statistics(tokens: int) -> Work:
    model, text = _model(tokens), _text(tokens)

    def work() -> Tensor:
        result = statistics(model, [text], classes=CLASSES, offsets=(-2, -3), progress=False)
        return torch.from_numpy(result.means["entropy"])

    return work


def _patterns(tokens: int) -> Work:
    model, batch = _model(tokens), Ragged.from_list([_text(tokens)])

    def work() -> Tensor:
        record = Record(Site(block.layer, Tap.PATTERN) for block in blocks_of(model))
        with torch.inference_mode():
            model.hidden(batch, watch=record)
            means = []
            for block in blocks_of(model):
                seen = record[Site(block.layer, Tap.PATTERN)]
                assert isinstance(seen, Patterns)
                # One head at a time: the logarithm of a whole layer would count as its own.
                means += [torch.special.entr(head).sum(-1).mean() for head in seen.of(0)]
        return torch.stack(means)

    return work


def _peer(tokens: int) -> Work:
    from lens_peers import cached_run

    return cached_run(tokens)


def _check(tokens: int) -> None:
    """Our entropies are those of the patterns."""
    result, expected = _statistics(tokens)(), _patterns(tokens)().double()
    worst = (result - expected).abs().max().item()
    if not worst <= LIMIT:
        raise SystemExit(f"entropies differ by {worst:.1e} from those of the patterns")
    say(f"entropies of {len(result)} heads at {tokens} tokens differ by at most {worst:.1e}\n")


def _extra(name: str, tokens: int) -> int:
    # A short text first: the code itself and the threads also take room.
    _work(name, 64)()
    return peak_extra(_work(name, tokens), "cpu")


def _report(times: Race, memory: dict[str, int], names: list[str], tokens: int) -> dict[str, float]:
    rows = []
    for name in names:
        rows.append(
            [
                name,
                count(memory[name], "B"),
                count(times.seconds(name), "s"),
                count(times.host_seconds(name), "s"),
                f"{times.host_ratio(name, FORWARD):.2f}",
                f"{memory[name] / max(1, memory[FORWARD]):.1f}",
            ]
        )
    columns = ["", "extra memory", "wall", "cores", "cores / forward", "memory / forward"]
    show(f"GPT-2 small, 144 heads, one text of {tokens:,} tokens", columns, rows)
    figures = {
        "MB": memory[OURS] / 1e6,
        "core-seconds": times.host_seconds(OURS),
        "share of limit": 1 / times.host_ratio(OURS, FORWARD),
    }
    say(f"limit: a plain forward; all statistics reach {figures['share of limit']:.0%} of its rate")
    looking = times.host_ratio(OURS, FORWARD) - 1
    say(f"all statistics of all heads cost {looking:.0%} of a plain forward on top of it")
    more = memory[OURS] - memory[FORWARD]
    say(
        f"and {count(more, 'B')} more memory, where all patterns alone are "
        f"{count(144 * tokens**2 * 4, 'B')}"
    )
    if PEER in names:
        ratio, share = times.host_ratio(PEER, OURS), memory[OURS] / memory[PEER]
        say(
            f"goal against {PEER}: a tenth of its extra memory at most ({share:.1%}), and less of "
            f"the cores' time (theirs / ours {ratio:.2f}; theirs scores all words, ours none)"
        )
        figures |= {
            "TransformerLens, GB": memory[PEER] / 1e9,
            "TransformerLens, core-seconds": times.host_seconds(PEER),
            "share of core time": 1 / ratio,
        }
    return figures
