"""One training run twice: by a run file, and as anyone would write it with transformers.

    python studies/parity/run.py [--text FILE_OR_FOLDER] [key=value ...]
    python studies/parity/run.py run.device=cuda
    python studies/parity/run.py run.tokens=0 run.steps=20 data.batch=512    # a slow machine

A GPT-2 of ten million weights learns two million tokens of the Python standard library's sources,
or of a text of your own. Both runs start from the same weights, see the same tokens in the same
order and take the same optimizer. Their losses are compared step by step and written to
result.json beside this file. Settings such as run.steps=20 replace what run.toml says.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.data.chunks import FixedChunks
from manyheads.data.sources.texts import TextFiles
from manyheads.data.store import open_store
from manyheads.data.stream import Stream
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.progress import Progress
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import Run, apply_settings, parse_run, read_toml

HERE = Path(__file__).parent
WORK = Path("build/parity")
ENTRIES = 4096
# About three million tokens.
CHARACTERS = 11_000_000
# Within so much over the first steps, is what must be shown.
FIRST, LIMIT = 20, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="what to learn, instead of Python's sources")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="in place of run.toml's")
    arguments = parser.parse_args()
    prepare(arguments.text)
    run = parse_run(apply_settings(read_toml(HERE / "run.toml"), arguments.settings))
    finished = train(run, fresh=True)
    if finished.exit_code:
        sys.exit(finished.exit_code)
    ours = [line["loss"] for line in MetricsLog(run.run.folder / "metrics.jsonl").read()]
    peer = plain_losses(run)
    result = compared(run, ours, peer) | {
        "device": run.run.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "text": "the Python standard library" if arguments.text is None else arguments.text.name,
    }
    file = HERE / "result.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(file)
    print(json.dumps({key: result[key] for key in result if key != "losses"}, indent=1))
    if not result["largest difference of the first steps"] <= LIMIT:
        sys.exit(f"the first {FIRST} steps differ by more than {LIMIT}")


def prepare(text: Path | None) -> None:
    """The text, a tokenizer that learned from it, and the weights that both runs start from."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    with (WORK / "train.txt").open("w", encoding="utf-8") as file:
        written = 0
        for passage in sources() if text is None else texts_of(text):
            written += file.write(passage[: CHARACTERS - written])
            if written == CHARACTERS:
                break
    tokenizer = train_tokenizer(TextFiles(str(WORK / "train.txt")), ENTRIES)
    tokenizer.save(str(WORK / "tokenizer.json"))
    torch.manual_seed(0)
    make: Any = GPT2LMHeadModel
    model = make(
        GPT2Config(
            vocab_size=ENTRIES,
            n_positions=256,
            n_embd=320,
            n_layer=7,
            n_head=5,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.save_pretrained(WORK / "start")


def sources() -> Iterator[str]:
    """The modules of the standard library, in the order of their names."""
    folder = Path(os.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        if not {"site-packages", "test", "tests", "lib2to3"} & set(file.parts):
            yield file.read_text("utf-8", errors="replace")


def texts_of(place: Path) -> Iterator[str]:
    for passage in TextFiles(str(place)).read():
        yield passage.text


def batches(run: Run) -> Iterator[Tensor]:
    """The tokens of every step, in the order of the run."""
    [data] = run.data
    [place] = (WORK / "store").iterdir()
    pieces = FixedChunks(open_store(place), length=data.max_length)
    stream = Stream(pieces, batch_tokens=data.micro_batch_size, micro_batches=data.micro_batches)
    for step in islice(stream.steps(), run.ends[-1]):
        [batch] = step.batches
        assert batch.texts is not None
        yield batch.texts.to_padded()


def plain_losses(run: Run) -> list[float]:
    """Every step's loss, as anyone would write it."""
    from transformers import GPT2LMHeadModel

    device = run.run.device
    load: Any = GPT2LMHeadModel.from_pretrained
    model = load(WORK / "start").to(device).train()
    named = dict(model.named_parameters())
    decaying = [one for name, one in named.items() if one.dim() == 2 and "wte" not in name]
    decaying = [one for one in decaying if one is not named["transformer.wpe.weight"]]
    spared = [one for one in named.values() if all(one is not other for other in decaying)]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    result = []
    with Progress("transformers", total=run.ends[-1]) as bar:
        for step, ids in enumerate(batches(run)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * run.phases.lr_factor(step)
            ids = ids.to(device)
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
            bar.advance()
    return result


def compared(run: Run, ours: list[float], peer: list[float]) -> dict[str, Any]:
    [data] = run.data
    apart = [abs(one - other) for one, other in zip(ours, peer, strict=True)]
    last = min(FIRST, len(ours))
    return {
        "parameters": sum(each.numel() for each in _weights()),
        "steps": len(ours),
        "tokens": len(ours) * data.sizes[0],
        "largest difference of the first steps": max(apart[:FIRST]),
        "largest difference of all steps": max(apart),
        "mean loss of the last steps": {
            "ours": sum(ours[-last:]) / last,
            "theirs": sum(peer[-last:]) / last,
        },
        "losses": {"ours": ours, "theirs": peer},
    }


def _weights() -> Iterator[Tensor]:
    from safetensors.torch import load_file

    yield from load_file(WORK / "start/model.safetensors").values()


if __name__ == "__main__":
    main()
