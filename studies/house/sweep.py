"""Several runs of a bundled model side by side, and the figures of each: sweep.py JOBS TO

A line of JOBS is a name, a run file and what differs from it: `seed-4 studies/house/house-gpt.toml
run.seed=4 optimizer.decay=0.2`. Three run at a time, since one alone does not fill a large GPU. The
models go to TO in half precision, and a line of figures is printed as each is done.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from pack import LENGTH, TEXTS, figures, watched

from manyheads.checkpoints.folder import load, save
from manyheads.taps import Tap

HERE = Path(__file__).parent
HELD_OUT = Path("build/house/held-out.txt")
AT_A_TIME, MANY = 3, 96


def main(jobs: Path, to: Path) -> None:
    lines = [line.split() for line in jobs.read_text().splitlines() if line.strip()]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in as_completed([pool.submit(_trained, to, *job) for job in lines]):
            print(done.result(), flush=True)


def _trained(to: Path, name: str, file: str, *settings: str) -> str:
    folder, log = Path("build/house") / name, to / f"{name}.log"
    to.mkdir(parents=True, exist_ok=True)
    tables_of_run = [str(HERE / "train.py"), file, f'run.folder="{folder}"', *settings]
    with log.open("w") as said:
        done = subprocess.run(
            [sys.executable, *tables_of_run], stdout=said, stderr=said, check=False
        )
    if done.returncode:
        return f"{name} failed, see {log}"
    tables_of_run = [__file__, "--figures", str(folder), str(to / name)]
    printed = subprocess.run(
        [sys.executable, *tables_of_run], capture_output=True, text=True, check=False
    )
    return f"{name} {printed.stdout.strip() or printed.stderr[-500:]}"


def tell(folder: Path, to: Path) -> None:
    """The figures of the model as it would be shipped."""
    save(load(folder / "model", dtype=torch.bfloat16), to)
    model, text = load(to).float(), HELD_OUT.read_text()
    result = figures(model, text)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    bits = [line["validation"] for line in lines if "validation" in line][-1]["bits_per_byte"]
    ids = model.tokenizer.encode(text[: 16 * LENGTH * MANY]).ids[: LENGTH * MANY]
    layers = range(len(model.stack.layers))
    many = [
        watched(model, rows, Tap.PATTERN, layers)[..., 0].mean()
        for rows in torch.tensor(ids).view(-1, TEXTS, LENGTH)
    ]
    print(
        f"bits per byte {bits:.4f}, induction {result['induction'][0]:.3f}, previous token "
        f"{result['previous token'][0]:.3f}, largest {result['largest']:.1f}, share on the first "
        f"token {result['first']:.5f}, over {MANY} texts {torch.stack(many).mean():.5f}"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "3")
    if sys.argv[1] == "--figures":
        tell(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
