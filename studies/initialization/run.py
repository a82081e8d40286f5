"""Early learning curves of fresh models, here and in transformers.

    python studies/initialization/run.py [--images FOLDER] [--only bert ...]

A small model of every family learns for a few steps: ours with our initial weights, theirs with
theirs, with the same shape, data, order and optimizer, for three seeds. Texts are the help topics
that come with Python, as bytes. The ViT needs the four files of Fashion-MNIST, for example of the
Debian package dataset-fashion-mnist. The table goes to result.json beside this file.
"""

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.checkpoints.families import FAMILIES
from manyheads.models.build import build
from manyheads.models.initialization import Initialization
from manyheads.ragged import Ragged

SEEDS, WARM_UP, RATE = (0, 1, 2), 10, 1e-3
TEXT_STEPS, IMAGE_STEPS = 80, 120
BATCH, LENGTH, MASK_ID, VOCABULARY = 8, 48, 256, 260
TEST_IMAGES = 2_000

Batch = tuple[Tensor, Tensor]
Logits = Callable[[Tensor, Tensor], Tensor]

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
NO_MARKS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SHAPE),
    "modernbert": ("ModernBertForMaskedLM", SHAPE | NO_MARKS | {"local_attention": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        GPT2 | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    ),
    "llama": ("LlamaForCausalLM", SHAPE | {"num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", SHAPE | {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", SHAPE | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", SHAPE | {"num_key_value_heads": 2, "head_dim": 16}),
    "t5": (
        "T5ForConditionalGeneration",
        T5 | {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "marian": (
        "MarianMTModel",
        SIDES | {"d_model": 64, "vocab_size": VOCABULARY, "pad_token_id": 259, "dropout": 0.0},
    ),
    "vit": (
        "ViTForImageClassification",
        SHAPE
        | {
            "num_hidden_layers": 4,
            "image_size": 28,
            "patch_size": 7,
            "num_channels": 1,
            "num_labels": 10,
        },
    ),
}
# What was drawn before this study.
BEFORE = {
    "vit": Initialization(draw="truncated", zero_readout=True),
    "t5": Initialization(),
    "bert": Initialization(draw="truncated"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="a folder with the files of Fashion-MNIST")
    parser.add_argument("--only", nargs="*", choices=FAMILY, default=list(FAMILY))
    settings = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(__file__).parent / "result.json"
    table = json.loads(file.read_text()) if file.exists() else {}
    for name in settings.only:
        if name == "vit" and settings.images is None:
            print("vit: left out, it needs --images")
            continue
        arms = ["transformers", "ours"] + (["ours, before"] if name in BEFORE else [])
        table[name] = {
            arm: summary([learn(name, arm, seed, settings.images) for seed in SEEDS])
            for arm in arms
        }
        print(name, json.dumps(table[name]), flush=True)
        file.write_text(json.dumps(table, indent=1) + "\n")


def summary(runs: list[list[float]]) -> dict[str, list[float]]:
    """Mean and deviation over the seeds: the loss at a quarter and at the end, and the accuracy."""
    names = ("quarter", "end", "accuracy")
    return {
        name: [round(mean(each), 3), round(stdev(each), 3)]
        for name, each in zip(names, zip(*runs, strict=True), strict=False)
    }


def learn(name: str, arm: str, seed: int, images: Path | None) -> list[float]:
    steps = IMAGE_STEPS if name == "vit" else TEXT_STEPS
    model, logits = fresh(name, arm, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1, (at + 1) / WARM_UP))
    losses = []
    batches = pictures(images, seed) if name == "vit" and images else texts(name, seed)
    for _, (x, answers) in zip(range(steps), batches, strict=False):
        loss = F.cross_entropy(logits(x, answers).flatten(0, -2), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    quarter = steps // 4
    result = [mean(losses[quarter - 5 : quarter + 5]), mean(losses[-10:])]
    if name == "vit" and images:
        x, answers = fashion(images, "t10k")
        with torch.no_grad():
            right = logits(x[:TEST_IMAGES], answers).argmax(-1) == answers[:TEST_IMAGES]
        result.append(right.float().mean().item())
    return result


def fresh(name: str, arm: str, seed: int) -> tuple[nn.Module, Logits]:
    """A model with its own initial weights, and its logits for a batch."""
    import transformers

    kind = getattr(transformers, FAMILY[name][0])
    config = kind.config_class(**FAMILY[name][1])
    torch.manual_seed(seed)
    if arm == "transformers":
        peer = kind(config).train()
        return peer, lambda x, answers: their_logits(name, peer, x, answers)
    described = config.to_dict() | {"architectures": [FAMILY[name][0]]}
    ours = FAMILIES[described["model_type"]].read_config(described)
    if arm == "ours, before":
        ours = replace(ours, init=BEFORE[name])
    model: Any = build(ours, seed=seed).train()
    return model, lambda x, answers: our_logits(name, model, x, answers)


def their_logits(name: str, model: Any, x: Tensor, answers: Tensor) -> Tensor:
    if name == "vit":
        return model(pixel_values=x).logits
    if name in ("t5", "marian"):
        return model(input_ids=x, decoder_input_ids=shifted(answers)).logits
    return model(input_ids=x).logits


def our_logits(name: str, model: Any, x: Tensor, answers: Tensor) -> Tensor:
    if name in ("t5", "marian"):
        return model(x, shifted(answers)).logits
    logits = model(x).logits
    return logits.values if isinstance(logits, Ragged) else logits


def shifted(answers: Tensor) -> Tensor:
    return F.pad(answers[:, :-1], (1, 0))


def texts(name: str, seed: int) -> Iterator[Batch]:
    """Batches of bytes: masked ones to fill in, next ones to predict, or a text to write again."""
    data = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=random)
        rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
        if name in ("bert", "modernbert"):
            masked = torch.rand(BATCH, LENGTH, generator=random) < 0.15
            x = rows[:, :-1].masked_fill(masked, MASK_ID)
            yield x, rows[:, :-1].masked_fill(~masked, -100)
        elif name in ("t5", "marian"):
            yield rows[:, :-1], rows[:, :-1]
        else:
            yield rows[:, :-1], rows[:, 1:]


def pictures(folder: Path, seed: int) -> Iterator[Batch]:
    images, classes = fashion(folder, "train")
    random = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (64,), generator=random)
        yield images[chosen], classes[chosen]


@cache
def fashion(folder: Path, split: str) -> Batch:
    """Images of mean zero and deviation one, and their classes."""
    pixels, labels = (
        np.frombuffer(gzip.decompress(next(folder.glob(f"{split}-{kind}*.gz")).read_bytes()), "u1")
        for kind in ("images", "labels")
    )
    images = torch.tensor(pixels[16:]).view(-1, 1, 28, 28).float() / 255
    return (images - 0.286) / 0.353, torch.tensor(labels[8:]).long()


if __name__ == "__main__":
    main()
