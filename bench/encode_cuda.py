"""Encoding on CUDA against transformers: the shape of ModernBERT-base, in bfloat16."""

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import Work, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.ragged import Lengths, Ragged

__all__ = ["run"]

OURS, COMPILED = "manyheads eager", "manyheads"
# Where texts are of mixed lengths the peer computes padding, up to one of two lengths: that of the
# longest text allowed, as the goals were measured, or that of the longest in the batch.
THEIRS, KINDER = "transformers, padded to the most", "padded to the longest"
# The longest text, how many there are, and the goals for equal and for mixed lengths.
WORK = ((512, 128, 3.2, 6.0), (8192, 16, 3.9, 10.0))
# Of the length of a text's hidden states; both round to eight bits in every layer.
LIMIT = 3e-2
# The largest batch is tried with these shares of what fits by the memory of smaller ones.
FILLED = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7)


def run(rounds: int, quick: bool) -> dict[str, float]:
    peer, ours = _pair()
    peak = _matmul_peak()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    rows = []
    figures = {}
    for longest, count_of_texts, equal_goal, mixed_goal in WORK[:1] if quick else WORK:
        for mixed, goal in ((False, equal_goal), (True, mixed_goal)):
            lengths = _lengths(longest, count_of_texts, mixed)
            draw = torch.Generator().manual_seed(1)
            ids = torch.randint(10, 50000, (sum(lengths),), generator=draw).cuda()
            batch = Ragged(ids, Lengths.of(lengths, "cuda"))
            entrants: dict[str, Work] = {
                COMPILED: partial(_read, compiled, batch),
                OURS: partial(_read, ours, batch),
                THEIRS: partial(_read_theirs, peer, *_padded(batch, longest)),
            }
            if max(lengths) < longest:
                entrants[KINDER] = partial(_read_theirs, peer, *_padded(batch, max(lengths)))
            off = _check(entrants, batch)
            times = race(entrants, device="cuda", rounds=rounds)
            useful = _flops(ours, lengths) / times.seconds(COMPILED)
            # Without padding the two ways are one.
            kinder = KINDER if KINDER in entrants else THEIRS
            rates = (COMPILED, OURS, THEIRS, kinder)
            work = f"{longest} {'mixed' if mixed else 'equal'}"
            figures[f"{work}, times transformers"] = times.ratio(kinder, COMPILED)
            figures[f"{work}, times transformers padded to the most"] = times.ratio(
                THEIRS, COMPILED
            )
            figures[f"{work}, share of limit"] = useful / peak
            rows.append(
                [
                    f"{longest}, {'mixed' if mixed else 'equal'}",
                    *(f"{sum(lengths) / times.seconds(one) / 1e3:,.0f}" for one in rates),
                    f"{times.ratio(THEIRS, COMPILED):.2f}",
                    f"{times.ratio(kinder, COMPILED):.2f}",
                    f"{goal}",
                    f"{useful / peak:.0%}",
                    f"{off:.0e}",
                ]
            )
            if mixed:
                say(_lengths_in_words(lengths, longest))
    say("")
    columns = ["", COMPILED, "eager", "peer, to the most", "to the longest"]
    columns += ["ratio, most", "longest", "goal", "of limit", "differ"]
    show("ModernBERT-base, thousand real tokens a second", columns, rows)
    say("peer: transformers with SDPA, whose texts of mixed lengths are padded to the most tokens")
    say("a text may have, as where the goals come from, or to the longest of the batch: kinder")
    say("limit: products of weights and of visible pairs at the rate of a large matrix product")
    # FP8 is left out: quantized in passes of its own, the products of a layer take longer. Kernels
    # of our own for residual plus norm and for GeGLU are left out too: they are less than 1 %
    # faster than compiled code.
    if not quick:
        figures |= _largest_batches(ours, peer, WORK[-1][0])
    return figures


def _largest_batches(ours: Any, peer: Any, longest: int) -> dict[str, float]:
    """How many texts of mixed lengths fit into memory at once, without compiling."""

    def read_ours(texts: int) -> Tensor:
        return _read(ours, _mixed(longest, texts))

    def read_theirs(texts: int) -> Tensor:
        return _read_theirs(peer, *_padded(_mixed(longest, texts), longest))

    figures: dict[str, float] = {}
    rows = []
    for name, read in ((OURS, read_ours), (THEIRS, read_theirs)):
        texts = _largest_batch(read)
        tokens = sum(_lengths(longest, texts, True))
        figures[f"largest batch, {name}, texts"] = texts
        rows.append([name, f"{texts:,}", f"{tokens:,}"])
    show(f"largest batch, mixed lengths up to {longest}", ["", "texts", "real tokens"], rows)
    return figures


def _largest_batch(read: Callable[[int], Tensor]) -> int:
    few, more = 16, 32
    memory = {texts: peak_extra(partial(read, texts), "cuda") for texts in (few, more)}
    per_text = (memory[more] - memory[few]) / (more - few)
    torch.cuda.empty_cache()
    fits = torch.cuda.mem_get_info()[0] / per_text
    for share in FILLED:
        texts = int(share * fits)
        try:
            read(texts)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        return texts
    raise SystemExit(f"a batch of {texts} texts does not fit, although {few} fit many times")


def _mixed(longest: int, texts: int) -> Ragged:
    lengths = _lengths(longest, texts, True)
    return Ragged(torch.randint(10, 50000, (sum(lengths),)).cuda(), Lengths.of(lengths, "cuda"))


def _pair() -> tuple[Any, Any]:
    """One set of random weights in both."""
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    make: Any = ModernBertModel
    peer = make._from_config(ModernBertConfig(), attn_implementation="sdpa", dtype=torch.bfloat16)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = load(folder, device="cuda")
    return peer.to("cuda").eval(), ours


def _matmul_peak() -> float:
    size = 8192
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    times = race({"product": lambda: square @ square}, device="cuda", rounds=10)
    peak = 2 * size**3 / times.seconds("product")
    say(f"{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}")
    say(f"a product of {size} x {size} matrices reaches {count(peak, 'FLOP/s')}\n")
    return peak


def _lengths(longest: int, texts: int, mixed: bool) -> list[int]:
    """Equal, or normal around half the longest."""
    if not mixed:
        return [longest] * texts
    draw = torch.Generator().manual_seed(longest)
    drawn = torch.normal(longest / 2, longest / 6, (texts,), generator=draw)
    return [int(length) for length in drawn.clamp(16, longest)]


@torch.inference_mode()
def _read(model: Any, batch: Ragged) -> Tensor:
    hidden: Tensor = model(batch).hidden.values
    return hidden


@torch.inference_mode()
def _read_theirs(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    hidden: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden


def _padded(batch: Ragged, length: int) -> tuple[Tensor, Tensor | None]:
    """Ids of one length, and where they are real; no mask where all are."""
    if set(batch.lengths.each) == {length}:
        return batch.values.view(-1, length), None
    ids = batch.to_padded()
    ids = F.pad(ids, (0, length - ids.shape[1]))
    each = torch.tensor(batch.lengths.each, device=ids.device)
    return ids, (torch.arange(length, device=ids.device) < each[:, None]).long()


def _lengths_in_words(lengths: list[int], longest: int) -> str:
    mean = sum(lengths) / len(lengths)
    return (
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens: {mean / longest:.0%} of "
        f"them are real, padded to {longest}; {mean / max(lengths):.0%}, padded to the longest"
    )


def _check(entrants: dict[str, Work], batch: Ragged) -> float:
    """The largest difference of a text from transformers, as a share of its length."""
    expected = entrants[KINDER if KINDER in entrants else THEIRS]()
    worst = 0.0
    for name in (OURS, COMPILED):
        result = batch.with_values(entrants[name]())
        for index, length in enumerate(batch.lengths.each):
            one, other = result.of(index).float(), expected[index, :length].float()
            worst = max(worst, float((one - other).norm() / other.norm()))
    if not worst <= LIMIT:
        raise SystemExit(f"a text differs by {worst:.1e} of its length, more than {LIMIT}")
    return worst


def _flops(model: Any, lengths: list[int]) -> float:
    """Two a weight and token, and four a visible pair, head and channel."""
    stack = model.config.stack
    products = [parameter.numel() for parameter in model.parameters() if parameter.dim() == 2]
    products.remove(model.embedding.tokens.weight.numel())
    pairs = 0
    for layer in stack.layers:
        attention = layer.attention.inner
        reach = attention.mask.reach
        seen = sum(
            sum(min(i, reach.before) + min(n - 1 - i, reach.after) + 1 for i in range(n))
            if reach.before < n
            else n * n
            for n in lengths
        )
        pairs += seen * attention.heads * attention.size
    return 2.0 * sum(products) * sum(lengths) + 4.0 * pairs
