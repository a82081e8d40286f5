"""Time the pass of the atlas beside eager attention: `python bench/atlas.py`.

A model of the width of SmolLM2 with random weights reads texts of one length. Ours is one pass of
`lens.atlas`: all measures with their errors, distances, tokens and examples of every head. Beside
it stands the way in which HeadVis' data are made elsewhere: transformers with eager attention gives
whole patterns, from which its six metrics, the weight that each token receives and the largest
weight of each text are taken. The six metrics are compared before anything is timed; the pass is
also compared with the same model reading the texts and measuring nothing, its limit.
"""

import argparse
import os
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from side_by_side import Race, Work, alone, check_agreement, count, peak_extra, race, say, show
from stored_results import add_store, introduce, store
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.lens.corpus.corpus_pass import read_corpus
from manyheads.lens.corpus.pass_state import PassSettings
from manyheads.lens.head_kinds.head_tests import OFFSETS
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site

__all__ = ["main"]

OURS, PEER, READING = "atlas", "eager patterns", "reading alone"
SAME = ("self", "previous_token", "entropy", "distance")
VOCABULARY, LEAST_INDUCTION = 2_000, 0.01
# Products on CUDA may round to 10 bits.
LIMIT = {"cpu": 1e-4, "cuda": 1e-3}


def make_texts(tokens: int, texts: int) -> Tensor:
    return torch.randint(VOCABULARY, (texts, tokens), generator=torch.Generator().manual_seed(1))


def make_models(layers: int, tokens: int, device: str) -> tuple[Any, build.Model]:
    """The same weights in transformers and here."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=tokens,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    peer = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in peer.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            # Patterns of random weights are flat; these have peaks.
            parameter.mul_(8.0)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model = load(folder)
    return peer.to(device), model.to(device).eval()


def atlas_pass(model: build.Model, texts: Tensor) -> Tensor:
    """The six metrics of every head, of all that the pass has measured."""
    settings = PassSettings(max_length=texts.shape[1], offsets=OFFSETS)
    done, measured = read_corpus(model, list(texts.cpu()), settings, progress=False)
    columns = [torch.from_numpy(measured[name].means) for name in SAME]
    sums = list(done.sums.blocks.values())
    squares = torch.cat([torch.from_numpy(part.squares / part.counts[0]) for part in sums])
    copied = torch.cat([torch.from_numpy(part.copied / part.counts[1]) for part in sums])
    return torch.stack([*columns, squares - columns[-1].square(), copied])


def eager_pass(model: Any, texts: Tensor) -> Tensor:
    """The same from whole patterns, a text at a time."""
    totals: Tensor | float = 0.0
    queries = repeated = 0
    received = torch.zeros(VOCABULARY, device=texts.device)
    largest = []
    for text in texts:
        with torch.inference_mode():
            patterns = model(text[None], output_attentions=True, logits_to_keep=1).attentions
            place = torch.arange(len(text), device=text.device)
            away = (place[:, None] - place).float()
            copies = (text[:, None] == text).tril(-1)
            after = copies.roll(1, dims=1)
            rows = []
            for pattern in patterns:
                weights = pattern[0]
                copied = weights[:, after]
                parts = (
                    weights.diagonal(0, 1, 2).sum(1),
                    weights.diagonal(-1, 1, 2).sum(1),
                    torch.special.entr(weights).sum((1, 2)),
                    (weights * away).sum((1, 2)),
                    (weights * away.square()).sum((1, 2)),
                    copied.masked_fill(copied < LEAST_INDUCTION, 0.0).sum(1),
                )
                rows.append(torch.stack(parts))
                received.index_add_(0, text, weights.sum((0, 1)))
                largest.append(weights[:, 1:, 1:].amax((1, 2)))
            totals = totals + torch.cat(rows, dim=1).double()
        queries, repeated = queries + len(text), repeated + int(copies.any(1).sum())
    assert isinstance(totals, Tensor)
    itself, previous, entropy, distance, square, copied = totals.cpu()
    mean = distance / queries
    return torch.stack(
        [
            itself / queries,
            previous / (queries - len(texts)),
            entropy / queries,
            mean,
            square / queries - mean.square(),
            copied / repeated,
        ]
    )


class Blind:
    """A watcher that wants to see nothing."""

    def wants(self, _: Site) -> bool:
        return False

    def see(self, _: Site, __: Ragged | Patterns) -> None: ...


def reading(model: build.Model, texts: Tensor) -> Tensor:
    """The same texts in batches of one, nothing measured."""
    with torch.inference_mode():
        for text in texts:
            model.run_hidden(ModelInputs(ids=Ragged.from_list([text])), Blind())
    return texts[:1, :1]


def entrants(layers: int, tokens: int, texts: int, device: str) -> dict[str, Work]:
    peer, model = make_models(layers, tokens, device)
    batch = make_texts(tokens, texts).to(device)
    return {
        OURS: lambda: atlas_pass(model, batch),
        PEER: lambda: eager_pass(peer, batch),
        READING: lambda: reading(model, batch),
    }


def memory(name: str, layers: int, tokens: int, device: str) -> int:
    """Of one text, in a process of its own."""
    return peak_extra(entrants(layers, tokens, 1, device)[name], device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--corpus", type=int, default=8192, help="tokens of all texts together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="how often each entrant is timed")
    add_store(parser)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    introduce(device, "transformers")
    # Other work on a small machine stretches the time, not what the processor spends.
    ratio = Race.ratio if device == "cuda" else Race.host_ratio
    rows = []
    figures = {}
    for tokens in arguments.tokens:
        texts = max(1, arguments.corpus // tokens)
        work = entrants(arguments.layers, tokens, texts, device)
        compared = {name: work[name] for name in (OURS, PEER)}
        # Distances as shares of the length.
        scales = 1 / torch.tensor([1, 1, 1, tokens, tokens**2, 1])[:, None]
        answer = partial(torch.mul, scales)
        worst = check_agreement(compared, truth=PEER, limit=LIMIT[device], answer=answer)
        say(f"{texts} x {tokens} tokens: six metrics differ by {worst:.1e} at most")
        timed = race(work, device=device, rounds=arguments.rounds, warmups=0)
        figures[f"{tokens}, times eager"] = ratio(timed, PEER, OURS)
        figures[f"{tokens}, share of limit"] = 1 / ratio(timed, OURS, READING)
        for name in work:
            used = alone(memory, name, arguments.layers, tokens, device)
            if name != READING:
                figures[f"{tokens}, {'eager, ' if name == PEER else ''}GB"] = used / 1e9
            rows.append(
                [
                    f"{texts} x {tokens}",
                    name,
                    count(timed.seconds(name) / (texts * tokens), "s"),
                    f"{ratio(timed, PEER, name):.2f}",
                    f"{ratio(timed, name, READING):.2f}",
                    count(used, "B"),
                ]
            )
    columns = ("texts", "", "a token", "times as fast as eager", "times reading alone", "memory")
    show(f"One pass over a corpus, {arguments.layers} layers, {device}", columns, rows)
    shares = [
        f"{figures[f'{tokens}, share of limit']:.0%} at {tokens}" for tokens in arguments.tokens
    ]
    say(f"limit: reading alone; the pass reaches {', '.join(shares)} tokens")
    store(arguments.store, "atlas", device, figures, "transformers")


if __name__ == "__main__":
    main()
