"""Products with integer weights: the operations of torch, and which of them suits this machine.

They round the inputs of a token to eight bits by the largest of them, except `Dequantized`,
`WeightedSum`, `HalfWeights` and `Int4Pack`. So a token does not depend on the tokens beside it.
"""

import os
import platform
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from jaxtyping import Int8 as Int8Rows
from torch import Tensor

from manyheads.quantization.integer_codes import (
    GROUP,
    IntegerCodes,
    WeightName,
    join_pairs,
    round_weight,
)

ARM = platform.machine() in ("aarch64", "arm64")
X86 = platform.machine() in ("x86_64", "AMD64")
ops: Any = torch.ops
# Engines of torch's quantized operations, and the lock of the setting that names one of them.
FBGEMM, ONEDNN = "fbgemm", "onednn"
ENGINE = Lock()
# A product that saturates errs by far more than rounding its inputs does.
TOLERANCE = 0.03
# Inputs are rounded to integers up to this, and never by a scale that is too small to divide by.
LARGEST_INPUT, SMALLEST_INPUT = 127, 1e-30


class Product(ABC):
    """x W^T for one matrix of codes, packed as an operation reads it."""

    most_tokens: ClassVar[float] = float("inf")

    @staticmethod
    @abstractmethod
    def cannot(codes: IntegerCodes) -> str | None:
        """Why this operation cannot multiply by these codes here; None if it can."""

    @abstractmethod
    def __init__(self, codes: IntegerCodes) -> None: ...

    @abstractmethod
    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        """The product in float32, in memory of its own."""

    def plus(
        self, x: Float[Tensor, "n columns"], bias: Float[Tensor, " rows"]
    ) -> Float[Tensor, "n rows"]:
        """The product and a bias."""
        return self(x).add_(bias)

    def writer(self, out: Float[Tensor, " rows"]) -> Callable[[Tensor], Tensor]:
        """A function that writes the product with one vector to `out`."""
        return lambda x: out.copy_(self(x.unsqueeze(0))[0])

    def adder(self) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of a total and a vector that adds the product to the total, in place."""
        return lambda total, x: total.add_(self(x.unsqueeze(0))[0])


class Int8(Product):
    """oneDNN's product of int8 with int8, whose sums are exact."""

    # Tokens that are multiplied at once, so that buffers stay in the cache of a core.
    block: ClassVar[int] = 128

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:  # noqa: ARG004
        if not X86 or not torch.backends.mkldnn.is_available():
            return "it is measured on x86 with oneDNN alone"
        if not _has_vnni():
            return "without AVX512-VNNI float32 inputs are faster"
        return None

    def __init__(self, codes: IntegerCodes) -> None:
        self.codes, self.scales = codes.codes, codes.scales.flatten()

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        return self._multiply(x, None)

    def plus(
        self, x: Float[Tensor, "n columns"], bias: Float[Tensor, " rows"]
    ) -> Float[Tensor, "n rows"]:
        return self._multiply(x, bias)

    def _multiply(
        self, x: Float[Tensor, "n columns"], bias: Float[Tensor, " rows"] | None
    ) -> Float[Tensor, "n rows"]:
        """Block by block."""
        rows, columns = self.codes.shape
        result, size = torch.empty(len(x), rows), min(self.block, len(x))
        scaled, integers = torch.empty(size, columns), torch.empty(size, columns, dtype=torch.int8)
        for part, target in zip(x.split(self.block), result.split(self.block), strict=True):
            if len(part) < size:
                scaled, integers = scaled[: len(part)], integers[: len(part)]
            # A tenth of the time of a norm by rows.
            steps = torch.abs(part, out=scaled).amax(1, keepdim=True)
            steps = steps.clamp_(min=SMALLEST_INPUT).div_(LARGEST_INPUT)
            integers.copy_(torch.div(part, steps, out=scaled).round_())
            product = self._product(integers, target)
            if bias is None:
                torch.mul(product, steps, out=target)
            else:
                torch.addcmul(bias, product, steps, out=target)
        return result

    def _product(
        self, integers: Int8Rows[Tensor, "n columns"], out: Float[Tensor, "n rows"]
    ) -> Float[Tensor, "n rows"]:
        """With inputs that were divided by their steps, in `out` where that saves a copy."""
        return out.copy_(torch._int_mm(integers, self.codes.T)).mul_(self.scales)

    def writer(self, out: Float[Tensor, " rows"]) -> Callable[[Tensor], Tensor]:
        multiply, zeros = self._multiplier(), torch.zeros_like(out)

        def write(x: Tensor) -> Tensor:
            sums, step = multiply(x)
            return torch.addcmul(zeros, out.copy_(sums), self.scales, value=step, out=out)

        return write

    def adder(self) -> Callable[[Tensor, Tensor], Tensor]:
        multiply, product = self._multiplier(), torch.empty(len(self.scales))

        def add(total: Tensor, x: Tensor) -> Tensor:
            sums, step = multiply(x)
            return total.addcmul_(product.copy_(sums), self.scales, value=step)

        return add

    def _multiplier(self) -> Callable[[Tensor], tuple[Tensor, float]]:
        """A function from a vector to sums and the worth of one, in buffers of its own."""
        rows, count = self.codes.shape
        zeros, scaled = torch.zeros(count), torch.empty(count)
        integers = torch.empty(count, 1, dtype=torch.int8)
        sums = torch.empty(rows, 1, dtype=torch.int32)
        row, vector = sums[:, 0], integers[:, 0]

        def multiply(x: Tensor) -> tuple[Tensor, float]:
            largest = torch.abs(x, out=scaled).amax().item()
            step = max(largest, SMALLEST_INPUT) / LARGEST_INPUT
            # A factor as `alpha` takes a quarter of the time of a product with a number.
            vector.copy_(torch.add(zeros, x, alpha=1 / step, out=scaled).round_())
            # With AMX half the time of the vector by the matrix, and no more without.
            torch._int_mm(self.codes, integers, out=sums)
            return row, step

        return multiply


class PackedInt8(Int8):
    """The same with AMX, whose product scales the sums as it writes them.

    Without AMX oneDNN has no fast form of it.
    """

    block = 512

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if not hasattr(ops.onednn, "qlinear_pointwise"):
            return "this torch has no product of packed weights"
        return Int8.cannot(codes) or (None if _has_amx() else "the processor has no AMX")

    def __init__(self, codes: IntegerCodes) -> None:
        super().__init__(codes)
        self.packed = ops.onednn.qlinear_prepack(codes.codes, None)
        self.zeros = torch.zeros(codes.rows, dtype=torch.long)

    def _product(
        self,
        integers: Int8Rows[Tensor, "n columns"],
        out: Float[Tensor, "n rows"],  # noqa: ARG002
    ) -> Float[Tensor, "n rows"]:
        inputs, weights = (integers, 1.0, 0), (self.packed, self.scales, self.zeros)
        outputs: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        product: Tensor = ops.onednn.qlinear_pointwise(*inputs, *weights, *outputs)
        return product


class FourBitGroups(Product):
    """KleidiAI's product of ARM with groups of four-bit codes."""

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if not ARM or not torch.backends.kleidiai.is_available():
            return "this torch has no KleidiAI"
        if codes.columns % GROUP:
            return f"{codes.columns} columns are not a multiple of {GROUP}"
        return None if codes.offsets is None else "KleidiAI's groups have no offsets"

    def __init__(self, codes: IntegerCodes) -> None:
        # The columns of a group, all columns, and the rows.
        self.size = GROUP, codes.columns, codes.rows
        scales = codes.scales.bfloat16()
        self.packed = torch._dyn_quant_pack_4bit_weight(codes.codes, scales, None, *self.size)

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        return torch._dyn_quant_matmul_4bit(x, self.packed, *self.size)


class Digits(Product):
    """The same for eight bits: a code is two digits of four, 16 times the first plus the second.

    ARM has no fast product of eight bits for few tokens in torch, and two products of four bits
    take half the time of one in float32.
    """

    most_tokens = 4

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        return FourBitGroups.cannot(codes)

    def __init__(self, codes: IntegerCodes) -> None:
        integers, scales = codes.integers(), codes.scales
        first = (integers.short() + 8) >> 4
        digits = torch.cat((first.to(torch.int8), (integers.short() - 16 * first).to(torch.int8)))
        # With one group per row the scales are float32.
        self.size = codes.columns, codes.columns, 2 * codes.rows
        both = torch.cat((16 * scales, scales))
        self.packed = torch._dyn_quant_pack_4bit_weight(join_pairs(digits), both, None, *self.size)

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        both = torch._dyn_quant_matmul_4bit(x, self.packed, *self.size)
        first, second = both.chunk(2, dim=1)
        return first + second

    def writer(self, out: Float[Tensor, " rows"]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.add(*self._parts(x), out=out)

    def adder(self) -> Callable[[Tensor, Tensor], Tensor]:
        def add(total: Tensor, x: Tensor) -> Tensor:
            first, second = self._parts(x)
            return total.add_(first).add_(second)

        return add

    def _parts(self, x: Float[Tensor, " columns"]) -> tuple[Tensor, ...]:
        both = torch._dyn_quant_matmul_4bit(x.unsqueeze(0), self.packed, *self.size)
        return both.view(2, -1).unbind()


class WeightedSum(Product):
    """For one token the sum of the columns of codes, each times its input, in float32.

    fbgemm sums rows of a table of bytes in this way, for bags of words. Without VNNI nothing in
    torch reads eight bits faster, and products of eight bits are exact for inputs of seven alone,
    which cost SmolLM2 12 % of its perplexity.
    """

    most_tokens = 1
    # Rows of the weight that are summed at once, in the registers of AVX2.
    rows_at_once: ClassVar[int] = 96

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:  # noqa: ARG004
        return _why_not_fbgemm()

    def __init__(self, codes: IntegerCodes) -> None:
        self.scales, (rows, columns) = codes.scales.flatten(), codes.codes.shape
        # For every block of rows a table with a row per column, whose end says what bytes mean.
        blocks = F.pad(codes.codes, (0, 0, 0, -rows % self.rows_at_once))
        table = blocks.unflatten(0, (-1, self.rows_at_once)).transpose(1, 2).flatten(0, 1)
        scale_and_offset = torch.tensor([1.0, -128.0]).view(torch.uint8)
        table = (table.short() + 128).to(torch.uint8)
        self.table = torch.cat((table, scale_and_offset.expand(len(table), -1)), dim=1)
        self.blocks = len(table) // columns
        self.starts = torch.arange(0, len(table), columns, dtype=torch.int32)

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        return torch.stack([self._sums(vector) for vector in x]).mul_(self.scales)

    def writer(self, out: Float[Tensor, " rows"]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.mul(self._sums(x), self.scales, out=out)

    def adder(self) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda total, x: total.addcmul_(self._sums(x), self.scales)

    def _sums(self, x: Float[Tensor, " columns"]) -> Float[Tensor, " rows"]:
        entries, inputs = _numbers(len(self.table)), x.expand(self.blocks, -1).reshape(-1)
        bags = (self.table, entries, self.starts, False, 0, False, inputs, None, False)
        sums: Tensor = ops.quantized.embedding_bag_byte_rowwise_offsets.default(*bags)
        return sums.view(-1)[: len(self.scales)]


@cache
def _numbers(count: int) -> Int[Tensor, " count"]:
    return torch.arange(count, dtype=torch.int32)


class HalfWeights(Product):
    """fbgemm's product of inputs in float32 with weights in half precision, copies of two bytes.

    Codes of eight bits are exact in it.
    """

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if codes.name == "int4" and _has_avx512():
            return "with AVX512 four bits are read faster"
        return _why_not_fbgemm()

    def __init__(self, codes: IntegerCodes) -> None:
        # Scaled by rows, so that no weight is too small for half precision.
        values = codes.integers().float() if codes.name == "int8" else codes.values()
        self.scales = codes.scales.flatten()
        if codes.name == "int4":
            self.scales = values.abs().amax(1).clamp_(min=SMALLEST_INPUT)
            values = values / self.scales[:, None]
        with _quantized_by(FBGEMM):
            self.packed = ops.quantized.linear_prepack_fp16(values, None)

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        return self._sums(x).mul_(self.scales)

    def plus(
        self, x: Float[Tensor, "n columns"], bias: Float[Tensor, " rows"]
    ) -> Float[Tensor, "n rows"]:
        sums = self._sums(x)
        return torch.addcmul(bias, sums, self.scales, out=sums)

    def writer(self, out: Float[Tensor, " rows"]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.mul(self._sums(x.unsqueeze(0))[0], self.scales, out=out)

    def adder(self) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda total, x: total.addcmul_(self._sums(x.unsqueeze(0))[0], self.scales)

    def _sums(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        sums: Tensor = ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        return sums


class Dynamic(Product):
    """oneDNN's product of eight bits on ARM.

    `linear_dynamic` rounds all inputs by one scale. So the inputs of every token are divided by
    their largest magnitude before it, and a row with 1 and -1 is added, which fixes that scale.
    """

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if codes.columns < 2:
            return "there is one column"
        if not ARM or ONEDNN not in torch.backends.quantized.supported_engines:
            return "it is measured on ARM with oneDNN alone"
        return None

    def __init__(self, codes: IntegerCodes) -> None:
        # oneDNN is slow with scales of its own for every row.
        self.scales = codes.scales.flatten()
        with _quantized_by(ONEDNN):
            weight = torch._make_per_tensor_quantized_tensor(codes.codes, 1.0, 0)
            self.packed = ops.quantized.linear_prepack(weight, None)

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        count, columns = x.shape
        largest = x.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_INPUT)
        even = torch.empty(count + 1, columns)
        torch.div(x, largest, out=even[:count])
        even[count] = 0.0
        even[count, 0], even[count, 1] = 1.0, -1.0
        product: Tensor = ops.quantized.linear_dynamic(even, self.packed, False)[:count]
        return (product * largest).mul_(self.scales)


class Int4Pack(Product):
    """torch's own four-bit product with inputs in bfloat16, which x86 is fast at for few tokens."""

    # For more it is faster to unpack the weights once and to multiply in float32.
    most_tokens = 64

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if not X86:
            return "it is slower than float32 on ARM"
        if not _has_avx512():
            return "without AVX512 products of half precision are faster"
        if codes.columns % GROUP or codes.rows % 16:
            return f"{codes.rows} x {codes.columns} is not a multiple of 16 x {GROUP}"
        return None

    def __init__(self, codes: IntegerCodes) -> None:
        digits = (codes.integers() + 8).int()
        self.packed = torch._convert_weight_to_int4pack_for_cpu(digits, 2)
        parts = codes.scales.T.bfloat16(), codes.zeros().T.bfloat16()
        self.scales = torch.stack(parts, dim=-1).contiguous()

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        args = self.packed, GROUP, self.scales
        product: Tensor = torch._weight_int4pack_mm_for_cpu(x.bfloat16(), *args)
        return product.float()


class Dequantized(Product):
    """The definition: the weights that the codes stand for, in float32, whatever the machine."""

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:  # noqa: ARG004
        return None

    def __init__(self, codes: IntegerCodes) -> None:
        self.codes = codes

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        return F.linear(x, self.codes.values())


# The fastest first; the first one that can is used.
PRODUCTS: dict[WeightName, tuple[type[Product], ...]] = {
    "int8": (Digits, PackedInt8, Int8, WeightedSum, HalfWeights, Dynamic, Dequantized),
    "int4": (FourBitGroups, Int4Pack, HalfWeights, Dequantized),
}


def choose_product(codes: IntegerCodes, tokens: int) -> type[Product]:
    """The fastest operation for these codes and so many tokens."""
    return next(
        product
        for product in PRODUCTS[codes.name]
        if tokens <= product.most_tokens and why_not(product, codes) is None
    )


def why_not(product: type[Product], codes: IntegerCodes) -> str | None:
    """Why an operation is not used for these codes; None if it can be."""
    return product.cannot(codes) or _wrong_result(product, codes.name)


@cache
def _wrong_result(product: type[Product], name: WeightName) -> str | None:
    """Multiply extreme codes once, since some processors saturate where others do not."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2 * GROUP, generator=draw).sign()
    codes, x = round_weight(weight, name), torch.randn(3, 2 * GROUP, generator=draw).abs()
    if product.cannot(codes) is not None:
        return None
    exact = Dequantized(codes)(x)
    try:
        error = (product(codes)(x) - exact).norm() / exact.norm()
    except RuntimeError as problem:
        return f"torch cannot run it here ({str(problem).partition(chr(10))[0][:100]})"
    return None if error < TOLERANCE else f"its results are wrong by {error:.0%} on this processor"


def _why_not_fbgemm() -> str | None:
    if X86 and FBGEMM in torch.backends.quantized.supported_engines:
        return None
    return "it is measured on x86 with fbgemm alone"


@contextmanager
def _quantized_by(engine: str) -> Iterator[None]:
    """Pack weights for an engine of torch's quantized operations, a setting of the process."""
    with ENGINE, warnings.catch_warnings():
        # torch announces the end of its quantized dtypes, which these operations read.
        warnings.simplefilter("ignore")
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


@cache
def _has_vnni() -> bool:
    """Whether products of eight bits are exact; without VNNI sums of two can saturate."""
    check = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(check is not None and check())


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def _has_amx() -> bool:
    """Whether the processor multiplies tiles, and oneDNN was not told to leave them out."""
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return "ONEDNN_MAX_CPU_ISA" not in os.environ and bool(check is not None and check())
