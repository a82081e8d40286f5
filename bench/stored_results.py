"""Results of benches as files: what was measured, on which machine, with which versions, when.

A bench that is started with `--store` writes NAME-MACHINE.json into bench/results; x86 is a machine
with AVX512-VNNI, x86-avx512 one with AVX512 alone, and x86-avx2 one with neither. The tables of the
README and the docs are made of these files (`comparison_tables.py`).
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from side_by_side import say

from manyheads.atomic_write import atomic_write

__all__ = ["Figures", "RESULTS", "add_store", "describe", "installed", "introduce", "store"]

# Numbers by name, or rows of numbers by name.
Figures = Mapping[str, float | Mapping[str, Any]]

RESULTS = Path(__file__).with_name("results")
# Instructions that the speed of matrix products depends on.
FLAGS = (
    *("asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
)
SHORT = {"aarch64": "arm", "arm64": "arm", "x86_64": "x86", "AMD64": "x86"}


def add_store(parser: argparse.ArgumentParser) -> None:
    """The option with which a bench stores its figures; without it a run leaves nothing behind."""
    parser.add_argument(
        *("--store",),
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="store the figures in this folder, bench/results unless named",
    )


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe(device: str, peers: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, flags of its processor, cores, versions of torch and of the peers, date."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    lines = [line.partition(":") for line in text.splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    processor = " ".join([platform.machine(), fields.get("model name", "")]).strip()
    versions = {name: installed(name) for name in peers}
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor,
        "flags": [flag for flag in FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: value for name, value in versions.items() if value is not None},
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def introduce(device: str, *peers: str) -> None:
    """Print where and with what a bench runs."""
    run = describe(device, peers)
    absent = [f"{name} (not installed)" for name in peers if name not in run["versions"]]
    versions = [f"{name} {value}" for name, value in run["versions"].items()]
    say(f"{run['date']}, {run['machine']}, {run['cores']} cores, {' '.join(run['flags'])}")
    say(", ".join([*versions, *absent]))


def store(folder: Path | None, name: str, device: str, figures: Figures, *peers: str) -> None:
    """Write the figures with all that is to be known about the run; nothing without a folder."""
    if folder is None:
        return
    result = describe(device, peers)
    machine = result["machine"].lower().removeprefix("nvidia ")
    short = re.sub(r"[^a-z0-9]+", "-", machine) if device == "cuda" else platform.machine()
    short = SHORT.get(short, short)
    if short == "x86" and "avx512_vnni" not in result["flags"]:
        short = "x86-avx512" if "avx512f" in result["flags"] else "x86-avx2"
    options = [option for option in sys.argv[1:] if option not in {"--store", str(folder)}]
    command = " ".join([Path(sys.argv[0]).name, *options])
    result = {"bench": name, "command": command, **result, "figures": figures}
    file = folder / f"{name}-{short}.json"
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
    say(
        f"stored in {file}; `python bench/readme_table.py --write` puts the figures into the tables"
    )
