"""Products with integer weights: the operations of torch, and which of them suits this machine.

They round the inputs of a token to eight bits by the largest of them, except `Float` and the
products with bfloat16. So a token does not depend on the tokens beside it.
"""

import platform
import warnings
from abc import ABC, abstractmethod
from functools import cache
from threading import Lock
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
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
# The engine of linear_prepack is a setting of the whole process.
ENGINE = Lock()
# A product that saturates errs by far more than rounding its inputs to seven bits does.
TOLERANCE = 0.03


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

    def write(
        self, x: Float[Tensor, " columns"], out: Float[Tensor, " rows"]
    ) -> Float[Tensor, " rows"]:
        """The product with one vector, written to `out`."""
        return out.copy_(self(x.unsqueeze(0))[0])

    def add(
        self, total: Float[Tensor, " rows"], x: Float[Tensor, " columns"]
    ) -> Float[Tensor, " rows"]:
        """Add the product with one vector to `total`, in place."""
        return total.add_(self(x.unsqueeze(0))[0])


class FourBitGroups(Product):
    """KleidiAI's product of ARM with groups of four-bit codes."""

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if not ARM or not torch.backends.kleidiai.is_available():
            return "this torch has no KleidiAI"
        if codes.columns % GROUP:
            return f"{codes.columns} columns are not a multiple of {GROUP}"
        return None

    def __init__(self, codes: IntegerCodes) -> None:
        # The columns of a group, all columns, and the rows.
        self.size = GROUP, codes.columns, codes.rows
        self.packed = torch._dyn_quant_pack_4bit_weight(codes.codes, codes.scales, None, *self.size)

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

    def write(
        self, x: Float[Tensor, " columns"], out: Float[Tensor, " rows"]
    ) -> Float[Tensor, " rows"]:
        return torch.add(*self._parts(x), out=out)

    def add(
        self, total: Float[Tensor, " rows"], x: Float[Tensor, " columns"]
    ) -> Float[Tensor, " rows"]:
        first, second = self._parts(x)
        return total.add_(first).add_(second)

    def _parts(self, x: Float[Tensor, " columns"]) -> tuple[Tensor, ...]:
        both = torch._dyn_quant_matmul_4bit(x.unsqueeze(0), self.packed, *self.size)
        return both.view(2, -1).unbind()


class Dynamic(Product):
    """Eight-bit products by fbgemm on x86 and by oneDNN on ARM.

    `linear_dynamic` rounds all inputs by one scale. So the inputs of every token are divided by
    their largest magnitude before it, and a row with 1 and -1 is added, which fixes that scale.
    """

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        if codes.columns < 2:
            return "there is one column"
        return None if _engine() else "this torch has neither fbgemm for x86 nor oneDNN for ARM"

    def __init__(self, codes: IntegerCodes) -> None:
        scales = codes.scales.flatten()
        # oneDNN is slow on ARM with scales of its own for every row.
        self.scales = None if X86 else scales
        with ENGINE, warnings.catch_warnings():
            # torch announces the end of its quantized dtypes, which this operation reads.
            warnings.simplefilter("ignore")
            before = torch.backends.quantized.engine
            torch.backends.quantized.engine = _engine()
            try:
                if self.scales is None:
                    zeros = torch.zeros(len(scales), dtype=torch.long)
                    weight = torch._make_per_channel_quantized_tensor(
                        codes.codes, scales.double(), zeros, 0
                    )
                else:
                    weight = torch._make_per_tensor_quantized_tensor(codes.codes, 1.0, 0)
                self.packed = ops.quantized.linear_prepack(weight, None)
            finally:
                torch.backends.quantized.engine = before

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        count, columns = x.shape
        largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=1e-30)
        even = torch.empty(count + 1, columns)
        torch.div(x, largest, out=even[:count])
        even[count] = 0.0
        even[count, 0], even[count, 1] = 1.0, -1.0
        product: Tensor = ops.quantized.linear_dynamic(even, self.packed, not _has_vnni())[:count]
        product = product * largest
        return product if self.scales is None else product.mul_(self.scales)


class Int8Pack(Product):
    """torch's own eight-bit product with inputs in bfloat16, which x86 is fast at."""

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        return _why_not_packed(codes)

    def __init__(self, codes: IntegerCodes) -> None:
        self.codes, self.scales = codes.codes, codes.scales.flatten().bfloat16()

    def __call__(self, x: Float[Tensor, "n columns"]) -> Float[Tensor, "n rows"]:
        product: Tensor = torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales)
        return product.float()


class Int4Pack(Product):
    """torch's own four-bit product with inputs in bfloat16, which x86 is fast at."""

    @staticmethod
    def cannot(codes: IntegerCodes) -> str | None:
        return _why_not_packed(codes)

    def __init__(self, codes: IntegerCodes) -> None:
        digits = (codes.integers() + 8).int()
        self.packed = torch._convert_weight_to_int4pack_for_cpu(digits, 2)
        scales = codes.scales.T
        self.scales = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()

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
    "int8": (Digits, Dynamic, Int8Pack, Dequantized),
    "int4": (FourBitGroups, Int4Pack, Dequantized),
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


def _why_not_packed(codes: IntegerCodes) -> str | None:
    """Why torch's packed products with bfloat16 cannot, or should not, multiply by these codes."""
    if not X86:
        return "it is slower than float32 on ARM"
    if codes.columns % GROUP or codes.rows % 16:
        return f"{codes.rows} x {codes.columns} is not a multiple of 16 x {GROUP}"
    return None


def _engine() -> str:
    engines = torch.backends.quantized.supported_engines
    fastest = "fbgemm" if X86 else "onednn" if ARM else ""
    return fastest if fastest in engines else ""


@cache
def _has_vnni() -> bool:
    """Whether products of eight bits are exact; without VNNI sums of two can saturate."""
    check = getattr(torch.cpu, "_is_vnni_supported", None)
    return ARM or bool(check is not None and check())
