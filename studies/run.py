"""Run studies: every arm and seed, in one process or in several.

    python -m studies.run gates --quick
    python -m studies.run gates sinks --device cuda --workers 8 --minutes 9
    python -m studies.run gates --page          # only the picture and the page of its result

What has ended is kept: the same command goes on where it was stopped.
"""

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch

from manyheads.errors import InputError
from manyheads.formatting import alternatives
from manyheads.progress import Progress
from studies import pages
from studies.study import Arm, Result, Study, Values

HERE = Path(__file__).parent


def study_names() -> list[str]:
    return sorted(file.parent.name for file in HERE.glob("*/study.py"))


def find_study(name: str) -> Study:
    if name not in study_names():
        raise InputError(f"there is no study {name!r}", f"use {alternatives(study_names())}")
    return import_module(f"studies.{name}.study").STUDY


def run_study(
    names: Sequence[str],
    level: str = "full",
    *,
    device: str = "cpu",
    workers: int = 1,
    minutes: float | None = None,
    out: Path = HERE,
) -> dict[str, Result]:
    """Measure the arms of studies that `out/NAME/result.json` lacks, and write their pages.

    No arm starts once so many minutes have passed. Several workers take arms of all studies
    together, so that none of them waits for the last arm of one.
    """
    results = {name: _started(name, level, device, out) for name in names}
    todo = [
        (name, arm)
        for name, result in results.items()
        for arm in find_study(name).arms(result.settings)
        if not result.has(arm)
    ]
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with Progress("studies", total=len(todo), unit="runs") as bar:
        for name, arm, values, seconds in _measure(todo, results, device, workers, deadline):
            results[name].add(arm, values, seconds)
            results[name].write(out / name / "result.json")
            bar.advance()
    for name, result in results.items():
        if result.arms:
            pages.write_page(find_study(name), result, out / name)
    return results


def _started(name: str, level: str, device: str, out: Path) -> Result:
    """The result as far as it has come with these settings, or a new one."""
    settings = find_study(name).settings(level)
    file = out / name / "result.json"
    if file.is_file():
        result = Result.read(file)
        if result.settings == Result(name, level, settings, "").settings:
            return result
        raise InputError(
            f"{file} has a result of other settings", "give another folder, or delete it"
        )
    return Result(name, level, settings, machine_name(device))


def machine_name(device: str) -> str:
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.machine() + " CPU"
    return f"{chip}, torch {torch.__version__.split('+')[0]}"


def _measure(
    todo: Sequence[tuple[str, Arm]],
    results: dict[str, Result],
    device: str,
    workers: int,
    deadline: float | None,
) -> Iterator[tuple[str, Arm, Values, float]]:
    def late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    if workers == 1:
        for name, arm in todo:
            if late():
                return
            yield name, arm, *run_arm(name, arm, results[name].settings, device)
        return
    waiting = list(todo)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: dict[Future[tuple[Values, float]], tuple[str, Arm]] = {}
        while waiting or running:
            while waiting and len(running) < workers and not late():
                name, arm = waiting.pop(0)
                future = pool.submit(run_arm, name, arm, results[name].settings, device)
                running[future] = name, arm
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield *running.pop(future), *future.result()


def run_arm(name: str, arm: Arm, settings: dict[str, object], device: str) -> tuple[Values, float]:
    """Measure one arm; in a process of its own where there are several."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(arm.seed)
    start = time.perf_counter()
    values = find_study(name).run(arm, settings, device)
    return values, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*study_names(), "all"], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="minutes on two CPU cores")
    parser.add_argument("--test", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of the results")
    parser.add_argument("--page", action="store_true", help="only write the pages again")
    arguments = parser.parse_args()
    names = study_names() if "all" in arguments.names else arguments.names
    if arguments.page:
        for name in names:
            folder = arguments.out / name
            pages.write_page(find_study(name), Result.read(folder / "result.json"), folder)
        return
    level = "quick" if arguments.quick else "test" if arguments.test else "full"
    results = run_study(
        names,
        level,
        device=arguments.device,
        workers=arguments.workers,
        minutes=arguments.minutes,
        out=arguments.out,
    )
    for name, result in results.items():
        print(pages.summary(find_study(name), result))


if __name__ == "__main__":
    main()
