"""Triton kernels that choose the next token of each sequence from its logits, on the device alone.

A row of logits is read once, in chunks, each of which hands over its most likely tokens. One
program per row decides by these, and reads the whole row again only where they do not suffice, such
as without any filter. The rules are those of `sampling.Sample`.

Importing this file needs triton: import it only where there is a CUDA device.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# Logits per program of the first pass, and how many of them it hands over.
CHUNK, SLOTS = 4096, 128
CHUNK_WARPS, ROW_WARPS = 4, 16
# Low bits of a float32 that are zero in every number of a type.
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """Integers in the order of the numbers x; a step of one is a step to the next number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return tl.where(bits < 0, bits ^ (0x7FFFFFFF >> SHIFT), bits)


@triton.jit
def _lowest(SHIFT: tl.constexpr):
    """Below the integer of every number."""
    return tl.full((), -1, tl.int32) << (31 - SHIFT)


@triton.jit
def _between(low, over):
    """The middle of two integers whose difference may not fit; `low` if there is none between."""
    return (low >> 1) + (over >> 1) + (low & over & 1)


@triton.jit
def _load_values(at, start, count, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    return tl.load(at + place, mask=place < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(x, highest, temperature):
    # One division for all numbers.
    return tl.exp((x - highest) * (1.0 / temperature))


@triton.jit
def _most_likely_of_chunks(logits_at, values_at, ids_at, vocabulary, stride, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    x = _load_values(logits_at + row.to(tl.int64) * stride, chunk * CHUNK, vocabulary, CHUNK)
    highest = tl.max(x, 0)
    place = tl.where(x == highest, tl.arange(0, CHUNK), CHUNK)
    at = row * tl.num_programs(1) + chunk
    tl.store(values_at + at, highest)
    tl.store(ids_at + at, chunk * CHUNK + tl.min(place, 0))


@triton.jit
def _finish(row, token, vocabulary, chosen_at, steps_at, tokens_at, width, RING: tl.constexpr):
    """Write the token where the next step and the host read it; the sequence is a step further."""
    # Of logits that are no numbers, none is chosen; the next step must find a row all the same.
    token = tl.maximum(tl.minimum(token, vocabulary - 1), 0).to(tl.int64)
    step = tl.load(steps_at + row)
    tl.store(chosen_at + row, token)
    tl.store(tokens_at + (step % RING) * width + row, token)
    tl.store(steps_at + row, step + 1)


@triton.jit
def _choose_most_likely(
    values_at,
    ids_at,
    chosen_at,
    steps_at,
    tokens_at,
    vocabulary,
    chunks,
    width,
    CHUNKS: tl.constexpr,
    RING: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = row * chunks + chunk
    x = tl.load(values_at + at, mask=chunk < chunks, other=float("-inf"))
    ids = tl.load(ids_at + at, mask=chunk < chunks, other=0)
    token = tl.min(tl.where((x == tl.max(x, 0)) & (chunk < chunks), ids, vocabulary), 0)
    _finish(row, token, vocabulary, chosen_at, steps_at, tokens_at, width, RING)


@triton.jit
def _likely_of_chunks(
    logits_at,
    settings_at,
    values_at,
    ids_at,
    statistics_at,
    vocabulary,
    stride,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The most likely tokens of a chunk, at most SLOTS of them, in the order of their ids.

    Besides, its largest logit, the sum of its weights relative to that, the largest logit that is
    not among those tokens, and the smallest that is, if they are enough for `top_k`.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, top_k = tl.load(settings_at), tl.load(settings_at + 3)
    x = _load_values(logits_at + row.to(tl.int64) * stride, chunk * CHUNK, vocabulary, CHUNK)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    key = tl.where(inside, _ordered(x, SHIFT), _lowest(SHIFT))
    highest = tl.max(x, 0)
    # All of the chunk if it is small. Else fewer tokens than there is room for are enough, which
    # saves most of the steps to the exact bound.
    low, low_number = _lowest(SHIFT) + 1, tl.sum(inside.to(tl.int32), 0)
    over, over_number = _ordered(highest, SHIFT) + 1, tl.full((), 0, tl.int32)
    least = tl.minimum(top_k, SLOTS // 2).to(tl.int32)
    if low_number <= SLOTS:
        over, over_number = low, low_number
    middle = _between(low, over)
    while (over_number < least) & (middle > low):
        number = tl.sum((key >= middle).to(tl.int32), 0)
        fits = number <= SLOTS
        low = tl.where(fits, low, middle)
        over, over_number = tl.where(fits, middle, over), tl.where(fits, number, over_number)
        middle = _between(low, over)
    handed_over = key >= over
    slot = tl.cumsum(handed_over.to(tl.int32), 0) - 1
    at = (row * tl.num_programs(1) + chunk).to(tl.int64)
    tl.store(values_at + at * SLOTS + slot, x, mask=handed_over)
    tl.store(ids_at + at * SLOTS + slot, place, mask=handed_over)
    empty = tl.arange(0, SLOTS)
    tl.store(values_at + at * SLOTS + empty, float("-inf"), mask=empty >= over_number)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    missing = tl.max(tl.where(handed_over, float("-inf"), x), 0)
    smallest = tl.min(tl.where(handed_over, x, float("inf")), 0)
    tl.store(statistics_at + at * 4, highest)
    if top_k >= vocabulary:
        # Else the sum of those `top_k` is what counts.
        tl.store(statistics_at + at * 4 + 1, tl.sum(_weight(x, finite, temperature), 0))
    tl.store(statistics_at + at * 4 + 2, missing)
    enough = over_number >= top_k
    tl.store(statistics_at + at * 4 + 3, tl.where(enough, smallest, float("-inf")))


@triton.jit
def _number_from(at, count, low, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the values have a key of at least `low`."""
    numbers = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        key = _ordered(_load_values(at, start, count, BLOCK), SHIFT)
        numbers += (key >= low).to(tl.int32)
    return tl.sum(numbers, 0)


@triton.jit
def _weight_from(at, count, low, highest, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of all values whose key is at least `low`."""
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        x = _load_values(at, start, count, BLOCK)
        weight = _weight(x, highest, temperature)
        totals += tl.where(_ordered(x, SHIFT) >= low, weight, 0.0)
    return tl.sum(totals, 0)


@triton.jit
def _threshold(
    at,
    count,
    vocabulary,
    whole,
    highest,
    enough,
    temperature,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest key that stays, and how many of the tokens with this key stay.

    At least `top_k` values are known to reach `enough`.
    """
    low = _lowest(SHIFT)
    ties = tl.full((), 0, tl.int32) + vocabulary
    if top_k < vocabulary:
        low = tl.maximum(low, _ordered(enough, SHIFT))
        over = _ordered(highest, SHIFT) + 1
        middle = _between(low, over)
        while middle > low:
            number = _number_from(at, count, middle, SHIFT, BLOCK)
            # The set is what matters, not the lowest key of those that give it.
            over = tl.where(number < top_k, middle, tl.where(number == top_k, middle + 1, over))
            low = tl.where(number < top_k, low, middle)
            middle = _between(low, over)
        whole = _weight_from(at, count, low, highest, temperature, SHIFT, BLOCK)
    if top_p < 1.0:
        target = top_p * whole
        nucleus = low
        over = _ordered(highest, SHIFT) + 1
        middle = _between(nucleus, over)
        while middle > nucleus:
            weight = _weight_from(at, count, middle, highest, temperature, SHIFT, BLOCK)
            over = tl.where(weight >= target, over, middle)
            nucleus = tl.where(weight >= target, middle, nucleus)
            middle = _between(nucleus, over)
        above = _weight_from(at, count, nucleus + 1, highest, temperature, SHIFT, BLOCK)
        equal = _weight_from(at, count, nucleus, highest, temperature, SHIFT, BLOCK) - above
        number = _number_from(at, count, nucleus, SHIFT, BLOCK)
        number -= _number_from(at, count, nucleus + 1, SHIFT, BLOCK)
        needed = tl.ceil((target - above) / tl.maximum(equal, 1e-30) * number)
        # All of them stay where their weight is too small for a float.
        ties = tl.where(needed < number, tl.maximum(needed, 1.0).to(tl.int32), ties)
        low = nucleus
    return low, ties


@triton.jit
def _weights(
    at,
    start,
    count,
    low,
    ties,
    min_p,
    highest,
    temperature,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of a block, zero for the tokens that are out, and how many have the key `low`."""
    x = _load_values(at, start, count, BLOCK)
    key = _ordered(x, SHIFT)
    tie = (key == low).to(tl.int32)
    stays = (key > low) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties))
    weight = _weight(x, highest, temperature)
    return tl.where(stays & (weight >= min_p), weight, 0.0), tl.sum(tie, 0)


@triton.jit
def _draw(
    at,
    count,
    low,
    ties,
    min_p,
    highest,
    temperature,
    uniform,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The place at which the sum of the weights passes the share `uniform` of their total."""
    total = tl.full((), 0.0, tl.float64)
    left = ties
    for start in range(0, count, BLOCK):
        weight, equal = _weights(
            at, start, count, low, left, min_p, highest, temperature, SHIFT, BLOCK
        )
        total += tl.sum(weight, 0).to(tl.float64)
        left -= equal
    goal = uniform.to(tl.float64) * total
    # The last block that begins before the goal, and what was before it.
    before = tl.full((), 0.0, tl.float64)
    block_before = before
    block = tl.full((), 0, tl.int32)
    left = ties
    block_left = left
    for start in range(0, count, BLOCK):
        weight, equal = _weights(
            at, start, count, low, left, min_p, highest, temperature, SHIFT, BLOCK
        )
        weight_of_block = tl.sum(weight, 0).to(tl.float64)
        reached = (weight_of_block > 0.0) & (before <= goal)
        block = tl.where(reached, start, block)
        block_before = tl.where(reached, before, block_before)
        block_left = tl.where(reached, left, block_left)
        before += weight_of_block
        left -= equal
    weight, equal = _weights(
        at, block, count, low, block_left, min_p, highest, temperature, SHIFT, BLOCK
    )
    passed = block_before + tl.cumsum(weight.to(tl.float64), 0) <= goal
    # Rounding may leave the goal above the last sum.
    last = tl.max(tl.where(weight > 0.0, tl.arange(0, BLOCK), 0), 0)
    return block + tl.minimum(tl.sum(passed.to(tl.int32), 0), last)


@triton.jit
def _choose_by_chance(
    logits_at,
    settings_at,
    uniforms_at,
    values_at,
    ids_at,
    statistics_at,
    chosen_at,
    steps_at,
    tokens_at,
    vocabulary,
    stride,
    chunks,
    width,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(settings_at), tl.load(settings_at + 1)
    min_p, top_k = tl.load(settings_at + 2), tl.load(settings_at + 3).to(tl.int32)
    uniform = tl.load(uniforms_at + row * RING + tl.load(steps_at + row) % RING)
    chunk = tl.arange(0, CHUNKS)
    present = chunk < chunks
    at = statistics_at + (row * chunks + chunk) * 4
    largest = tl.load(at, mask=present, other=float("-inf"))
    totals = tl.load(at + 1, mask=present & (top_k >= vocabulary), other=0.0)
    missing = tl.max(tl.load(at + 2, mask=present, other=float("-inf")), 0)
    enough = tl.max(tl.load(at + 3, mask=present, other=float("-inf")), 0)
    highest = tl.max(largest, 0)
    whole = tl.sum(totals * _weight(largest, highest, temperature), 0)
    count = chunks * SLOTS
    likely_at = values_at + row * count
    low, ties = _threshold(
        likely_at,
        count,
        vocabulary,
        whole,
        highest,
        enough,
        temperature,
        top_k,
        top_p,
        SHIFT,
        BLOCK,
    )
    # Nothing stays that the chunks have not handed over.
    complete = _ordered(missing, SHIFT) < low
    complete = complete | (_weight(missing, highest, temperature) < min_p)
    complete = complete | (missing == float("-inf"))
    if complete:
        place = _draw(
            likely_at, count, low, ties, min_p, highest, temperature, uniform, SHIFT, BLOCK
        )
        token = tl.load(ids_at + row * count + place)
    else:
        row_at = logits_at + row * stride
        # Of so many values, several are on their way at once.
        low, ties = _threshold(
            row_at,
            vocabulary,
            vocabulary,
            whole,
            highest,
            enough,
            temperature,
            top_k,
            top_p,
            SHIFT,
            4 * BLOCK,
        )
        token = _draw(
            row_at,
            vocabulary,
            low,
            ties,
            min_p,
            highest,
            temperature,
            uniform,
            SHIFT,
            4 * BLOCK,
        )
    _finish(row, token, vocabulary, chosen_at, steps_at, tokens_at, width, RING)


def choose_most_likely(
    logits: Float[Tensor, "b v"],
    chosen: Int[Tensor, " b"],
    steps: Int[Tensor, " b"],
    tokens: Int[Tensor, "ring rows"],
) -> None:
    """Write the first of the most likely tokens of a row to `chosen` and its step of `tokens`."""
    (rows, vocabulary), chunk = logits.shape, _chunk(logits)
    chunks = triton.cdiv(vocabulary, chunk)
    values = logits.new_empty(rows, chunks, dtype=torch.float32)
    ids = logits.new_empty(rows, chunks, dtype=torch.int32)
    _most_likely_of_chunks[(rows, chunks)](
        logits, values, ids, vocabulary, logits.stride(0), CHUNK=chunk, num_warps=8
    )
    _choose_most_likely[(rows,)](
        values,
        ids,
        chosen,
        steps,
        tokens,
        vocabulary,
        chunks,
        tokens.shape[1],
        CHUNKS=triton.next_power_of_2(chunks),
        RING=tokens.shape[0],
        num_warps=1,
    )


def choose_by_chance(
    logits: Float[Tensor, "b v"],
    settings: Float[Tensor, "4"],
    uniforms: Float[Tensor, "rows ring"],
    chosen: Int[Tensor, " b"],
    steps: Int[Tensor, " b"],
    tokens: Int[Tensor, "ring rows"],
) -> None:
    """The same with a token drawn by a uniform number per row and step.

    `settings` are temperature, top_p, min_p and top_k, of which the last three are 1, 0 and the
    vocabulary to keep all tokens.
    """
    (rows, vocabulary), chunk = logits.shape, _chunk(logits)
    chunks = triton.cdiv(vocabulary, chunk)
    values = logits.new_empty(rows, chunks, SLOTS, dtype=torch.float32)
    ids = logits.new_empty(rows, chunks, SLOTS, dtype=torch.int32)
    statistics = logits.new_empty(rows, chunks, 4, dtype=torch.float32)
    shift = ZERO_BITS[logits.dtype]
    _likely_of_chunks[(rows, chunks)](
        logits,
        settings,
        values,
        ids,
        statistics,
        vocabulary,
        logits.stride(0),
        CHUNK=chunk,
        SLOTS=SLOTS,
        SHIFT=shift,
        num_warps=CHUNK_WARPS,
    )
    _choose_by_chance[(rows,)](
        logits,
        settings,
        uniforms,
        values,
        ids,
        statistics,
        chosen,
        steps,
        tokens,
        vocabulary,
        logits.stride(0),
        chunks,
        tokens.shape[1],
        CHUNKS=triton.next_power_of_2(chunks),
        SLOTS=SLOTS,
        SHIFT=shift,
        BLOCK=4096,
        RING=tokens.shape[0],
        num_warps=ROW_WARPS,
    )


def _chunk(logits: Float[Tensor, "b v"]) -> int:
    """Logits per program: fewer where the vocabulary is small."""
    return min(CHUNK, max(256, triton.next_power_of_2(logits.shape[1])))
