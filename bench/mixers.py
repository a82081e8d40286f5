"""Time and memory of every kind of attention as the text grows: `python bench/mixers.py`.

One layer of width 512 with its projections, one text, float32 on the CPU and bfloat16 on CUDA.
Reported are a forward pass, a forward with a backward, a generation step after so many tokens, and
the most memory beyond that of the loaded layer. On the CPU every kind and length runs in a process
of its own, and time is processor seconds of one thread, which other work on the machine hardly
changes; the best of the rounds counts. Two checks come first: fused attention equals the explicit
pattern, and a mixer that is run in segments equals itself run whole.

`--write` puts the table into docs/concepts/kinds-of-attention.md and draws its picture;
`--table-only` does it from what was measured before.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "concepts" / "kinds-of-attention.md"
PICTURE = HERE.parent / "docs" / "images" / "kinds-of-attention.png"
WIDTH, HEADS, WINDOW, BLOCK = 512, 8, 128, 64
BASELINE = "full, fused"
CPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CUDA_LENGTHS = (*CPU_LENGTHS, 32768, 65536, 131072)
SECONDS_TO_GIVE_UP = 300
PEERS = ("fla-core",)


@dataclass(frozen=True, slots=True)
class Kind:
    """A row: its config for texts of so many tokens."""

    make: Callable[[int], Any]
    # Beyond this the process would need more memory than most machines have.
    longest: int = 10**9
    # Whether a step of generation is timed.
    generates: bool = True


def kinds() -> dict[str, Kind]:
    from manyheads import AttentionConfig
    from manyheads.mixers import (
        S4D,
        BigBird,
        Fourier,
        GatedDelta,
        KimiDelta,
        LinearAttention,
        Longformer,
        LshAttention,
        Mamba,
        Mamba2,
        MlpMixer,
        Performer,
    )
    from manyheads.parts import Blocks, Causal, Full, Window

    def attention(mask: Any, kernel: str = "auto") -> Callable[[int], Any]:
        return lambda _: AttentionConfig(width=WIDTH, heads=HEADS, mask=mask, kernel=kernel)

    def always(mixer: Any, **options: Any) -> Callable[[int], Any]:
        return lambda _: mixer(width=WIDTH, **options)

    heads, size = {"heads": HEADS}, WIDTH // HEADS
    delta = {"head_size": size, "key_heads": HEADS, "key_size": size}
    return {
        "full, explicit pattern": Kind(attention(Causal(), "reference"), 8192),
        BASELINE: Kind(attention(Causal())),
        "full both ways, fused": Kind(attention(Full()), generates=False),
        "local window": Kind(attention(Window(WINDOW))),
        "block-local": Kind(attention(Blocks(BLOCK)), generates=False),
        "Longformer": Kind(always(Longformer, window=WINDOW, **heads), generates=False),
        "BigBird": Kind(
            lambda tokens: BigBird(
                width=WIDTH, heads=HEADS, block=BLOCK, max_length=max(tokens, 4096)
            ),
            generates=False,
        ),
        "LSH": Kind(always(LshAttention, rounds=2, **heads), generates=False),
        "linear": Kind(always(LinearAttention, **heads)),
        "linear both ways": Kind(always(LinearAttention, causal=False, **heads), generates=False),
        "Performer": Kind(always(Performer, features=128, **heads)),
        "retention": Kind(always(LinearAttention, decay="heads", **heads)),
        "S4D": Kind(always(S4D)),
        "Mamba": Kind(always(Mamba, inner=2 * WIDTH, dt_rank=WIDTH // 16)),
        "Mamba-2 (SSD)": Kind(always(Mamba2, heads=2 * HEADS, head_size=size, state_size=size)),
        "gated delta net": Kind(always(GatedDelta, **delta, **heads)),
        "Kimi delta": Kind(always(KimiDelta, head_size=size, **heads)),
        "Fourier": Kind(always(Fourier), generates=False),
        "MLP-mixer": Kind(
            lambda tokens: MlpMixer(width=WIDTH, length=tokens, hidden=256), generates=False
        ),
    }


def make_layer(config: Any, device: str) -> Any:
    """The attention or mixer alone, and how it is called."""
    import torch

    from manyheads import AttentionConfig
    from manyheads.attention import Attention
    from manyheads.mixers.batch_segments import mix
    from manyheads.mixers.build import make_mixer

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if isinstance(config, AttentionConfig):
        layer: Any = Attention(config).to(device, dtype)
        return layer, layer
    mixer = make_mixer(config).to(device, dtype)
    return mixer, lambda x: mix(mixer, x)


def make_decoder(config: Any, device: str) -> Any:
    """A decoder of this one layer, for generation."""
    import torch

    from manyheads import AttentionConfig, build
    from manyheads.models import (
        Branch,
        DecoderConfig,
        Embedding,
        LanguageHead,
        LayerConfig,
        StackConfig,
    )

    attends = isinstance(config, AttentionConfig)
    layer = LayerConfig(
        attention=Branch(config) if attends else None,
        mixer=None if attends else Branch(config),
        feedforward=None,
    )
    model = build(
        DecoderConfig(
            embedding=Embedding(vocabulary=64, width=WIDTH),
            stack=StackConfig(width=WIDTH, layers=(layer,)),
            readout=LanguageHead(),
        ),
        seed=0,
    )
    return model.eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def measure(name: str, tokens: int, device: str, rounds: int) -> dict[str, float]:
    """All figures of one kind at one length."""
    import torch

    from manyheads.ragged import Ragged

    torch.set_num_threads(1)
    kind = kinds()[name]
    config = kind.make(tokens)
    layer, run = make_layer(config, device)
    dtype = next(layer.parameters(), torch.zeros(1)).dtype
    text = Ragged.from_list([torch.randn(tokens, WIDTH, device=device, dtype=dtype)])
    small = Ragged.from_list([text.values[: tokens if name == "MLP-mixer" else 256]])
    learns = Ragged.from_list([text.values.clone().requires_grad_()])
    result: dict[str, float] = {}

    def forward(x: Ragged = text) -> None:
        with torch.no_grad():
            run(x)

    def train() -> None:
        layer.zero_grad(set_to_none=True)
        run(learns).values.sum().backward()

    if device == "cpu":
        forward(small)
    for title, work in (("forward", forward), ("training", train)):
        result[title], result[f"{title} MiB"] = timed(work, device, rounds)
    if kind.generates:
        result["step"], result["cache MiB"] = generation(config, tokens, device)
    return result


def timed(work: Callable[[], None], device: str, rounds: int) -> tuple[float, float]:
    """Seconds of the best round, and mebibytes at the highest point beyond those before."""
    from side_by_side import peak_extra

    best, memory = math.inf, 0.0
    for number in range(rounds + (device == "cuda")):
        if number == 0:
            start = time.process_time()
            memory = peak_extra(work, device) / 2**20  # type: ignore[arg-type]
            seconds = time.process_time() - start
        else:
            seconds = once(work, device)
        # The first call on CUDA also compiles.
        best = min(best, seconds) if number or device == "cpu" else best
        if 20 < best < math.inf:
            break
    return best, memory


def once(work: Callable[[], None], device: str) -> float:
    import torch

    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def generation(config: Any, tokens: int, device: str) -> tuple[float, float]:
    """Seconds of one step after `tokens`, and the mebibytes of the cache.

    On CUDA it is the recorded step that `generate` replays, where the layer can be recorded.
    """
    import torch

    from manyheads.decoding.steps.cuda_graph import CudaGraphSteps, cannot
    from manyheads.ragged import Ragged

    model = make_decoder(config, device)
    text = torch.randint(64, (1, tokens), device=device)
    with torch.inference_mode():
        if cannot(model, torch.device(device)) is None:
            steps = CudaGraphSteps(model, 1, tokens + 64)
            steps.start(Ragged.from_padded(text))
            steps.next(text[:, 0])
            program, cache = steps.latest, steps.cache
            assert program is not None
            step = program.graph.replay
        else:
            cache = model.new_cache()
            for part in text.split(2048, dim=1):
                model(part, cache=cache)
            step = lambda: model(text[:, :1], cache=cache)  # noqa: E731
        return timed(step, device, 20)[0], cache.nbytes / 2**20


def check(device: str) -> None:
    """What is timed below gives the right answers."""
    import torch

    from manyheads.ragged import Ragged

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    text = Ragged.from_list([torch.randn(5000, WIDTH, device=device, dtype=dtype)])
    short = Ragged.from_list([text.values[:600]])
    rows = kinds()
    with torch.no_grad():
        fused, explicit = (
            make_layer(rows[name].make(600), device)[1](short).values.float()
            for name in (BASELINE, "full, explicit pattern")
        )
        limit = 1e-5 if device == "cpu" else 2e-2
        worst = float((fused - explicit).abs().max())
        assert worst < limit, f"fused attention differs from the pattern by {worst:.1e}"
        for name, kind in rows.items():
            layer, run = make_layer(kind.make(5000), device)
            if getattr(layer, "carries_state", False):
                worst = float((run(text).values - layer(text).values).abs().max())
                assert worst < 1e-3, f"{name} in segments differs by {worst:.1e}"


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope of a line through the last three points, both axes logarithmic."""
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, values, strict=True)][-3:]
    middle = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    rise = sum((x - middle[0]) * (y - middle[1]) for x, y in points)
    return rise / sum((x - middle[0]) ** 2 for x, _ in points)


def crossover(kind: dict[str, Any], full: dict[str, Any]) -> str:
    """From which measured length on a forward pass takes less time than fused full attention."""
    shared = [length for length in kind if length in full]
    for index, length in enumerate(shared):
        if all(kind[each]["forward"] < full[each]["forward"] for each in shared[index:]):
            return f"{int(length):,}"
    return "none"


def run_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every kind: on the CPU a process per length, since memory is that of the process."""
    lengths = arguments.tokens or (CPU_LENGTHS if arguments.device == "cpu" else CUDA_LENGTHS)
    for name in arguments.kinds or list(kinds()):
        result: dict[str, Any] = {}
        longest = kinds()[name].longest
        possible = [tokens for tokens in lengths if tokens <= longest]
        run = run_alone if arguments.device == "cpu" else run_here
        for tokens in possible:
            one, problem = run(name, tokens, arguments)
            if one is None:
                print(f"{name:24} {tokens:8,}  {problem}", flush=True)
                break
            result[str(tokens)] = one
            print(f"{name:24} {tokens:8,}  {in_words(one)}", flush=True)
        yield {name: result}


def run_alone(
    name: str, tokens: int, arguments: argparse.Namespace
) -> tuple[dict[str, float] | None, str]:
    """What a process of its own measures, or why it ended early."""
    command = [sys.executable, __file__, "--one", name, "--device", arguments.device]
    command += ["--rounds", str(arguments.rounds), "--tokens", str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS_TO_GIVE_UP
        )
    except subprocess.TimeoutExpired:
        return None, f"not done in {SECONDS_TO_GIVE_UP} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    return None, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:90]


def run_here(
    name: str, tokens: int, arguments: argparse.Namespace
) -> tuple[dict[str, float] | None, str]:
    """On CUDA memory is told by torch, and a process for each would mostly load libraries."""
    import torch

    try:
        return measure(name, tokens, arguments.device, arguments.rounds), ""
    except Exception as error:
        return None, str(error).splitlines()[0][:90]
    finally:
        torch.cuda.empty_cache()


def in_words(one: dict[str, float]) -> str:
    parts = [
        f"{title} {one[title] * 1e3:9,.1f} ms {one[f'{title} MiB']:7,.0f} MiB"
        for title in ("forward", "training")
    ]
    if "step" in one:
        parts.append(f"step {one['step'] * 1e3:7.2f} ms, cache {one['cache MiB']:,.2f} MiB")
    return ", ".join(parts)


def machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, one thread"
    return f"{name}, torch {torch.__version__.partition('+')[0]}"


def table(measured: dict[str, Any]) -> str:
    """The rows of the page: growth, crossover, and the figures at the longest text."""
    rows, full = measured["kinds"], measured["kinds"][BASELINE]
    longest = max(int(length) for length in full)
    unit, scale = ("s", 1.0) if measured["device"] == "cpu" else ("ms", 1e3)
    lines = [
        f"| kind | time grows as | memory grows as | faster than fused from "
        f"| forward at {longest:,} | with backward | step | memory, forward |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_length in rows.items():
        lengths = [int(each) for each in by_length]
        if len(lengths) < 3:
            continue
        last = by_length[str(lengths[-1])]
        reached = "" if lengths[-1] == longest else f" (at {lengths[-1]:,})"
        grows = exponent(lengths, [each["forward"] for each in by_length.values()])
        memory = [max(each["forward MiB"], 0.1) for each in by_length.values()]
        step = f"{last['step'] * 1e3:.2f} ms" if "step" in last else "-"
        lines.append(
            f"| {name} | n^{grows:.2f} | n^{exponent(lengths, memory):.2f} "
            f"| {'' if name == BASELINE else crossover(by_length, full)} "
            f"| {last['forward'] * scale:.2f} {unit}{reached} "
            f"| {last['training'] * scale:.2f} {unit} | {step} | {last['forward MiB']:,.0f} MiB |"
        )
    return "\n".join(lines)


def write(measured: dict[str, Any]) -> None:
    """Put the table between its marks on the page, and draw all times over length."""
    device = measured["device"]
    start, end = f"<!-- {device} table -->", f"<!-- end of {device} table -->"
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.index(start) + len(start), text.index(end)
    said = f"\n\n{measured['machine']}:\n\n{table(measured)}\n\n"
    PAGE.write_text(text[:head] + said + text[tail:], encoding="utf-8")
    draw()


def draw() -> None:
    from matplotlib.figure import Figure

    results = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("mixers-*"))
    ]
    figure = Figure(figsize=(6.4 * len(results) + 2.6, 5.2), layout="constrained")
    for number, measured in enumerate(results, start=1):
        axes = figure.add_subplot(1, len(results), number)
        for index, (name, by_length) in enumerate(measured["kinds"].items()):
            axes.plot(
                [int(each) for each in by_length],
                [each["forward"] for each in by_length.values()],
                color="black" if name == BASELINE else f"C{index % 10}",
                linestyle=("-", "--", ":")[index // 10 % 3],
                linewidth=2.5 if name == BASELINE else 1.4,
                marker="o",
                markersize=3,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a forward pass")
        lengths = sorted({int(each) for row in measured["kinds"].values() for each in row})
        axes.set_xticks(lengths, [f"{each:,}" for each in lengths], fontsize=8)
        axes.minorticks_off()
        axes.set_title(measured["machine"], fontsize=10)
        axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the text")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the figures and renew the page")
    parser.add_argument("--table-only", action="store_true", help="renew the page, measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        for tokens in arguments.tokens:
            result = measure(arguments.one, tokens, arguments.device, arguments.rounds)
            print(json.dumps(result), flush=True)
        return
    file = RESULTS / f"mixers-{arguments.device}.json"
    if file.is_file() and (arguments.kinds or arguments.table_only):
        measured = json.loads(file.read_text(encoding="utf-8"))
    else:
        from stored_results import describe

        head = {"bench": "mixers", **describe(arguments.device, PEERS)}
        head["machine"] = machine(arguments.device)
        measured = {**head, "device": arguments.device, "kinds": {}}
    if not arguments.table_only:
        check(arguments.device)
        for row in run_all(arguments):
            joined = measured["kinds"] | row
            measured["kinds"] = {name: joined[name] for name in kinds() if name in joined}
            if arguments.write:
                RESULTS.mkdir(exist_ok=True)
                file.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if BASELINE in measured["kinds"]:
        print(table(measured))
    if arguments.write or arguments.table_only:
        write(measured)


if __name__ == "__main__":
    main()
