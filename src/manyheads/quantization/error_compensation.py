"""Four-bit codes whose rounding errors are compensated by the columns that follow.

GPTQ (arXiv 2210.17323): with inputs x of a text, the error of a layer is that of W x, so a column
that is rounded down can be made up for by other columns whose inputs are correlated with its own.
Columns with large inputs come first, since those that come last have nothing left to correct them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.quantization.integer_codes import (
    GROUP,
    LARGEST,
    SMALLEST,
    IntegerCodes,
    group_scales,
    pack,
    split_groups,
)

# Added to the diagonal, as a fraction of its mean, so that few inputs do not determine too much. It
# was chosen by bench/damping_cpu.py, on another text than losses are reported on.
DAMPING = 0.1
# Columns that are compensated one by one; those behind them follow in one product.
BLOCK = 128


def compensated_codes(
    weight: Float[Tensor, "rows columns"], gram: Float[Tensor, "columns columns"]
) -> IntegerCodes:
    """Four-bit codes for inputs whose products with one another sum up to `gram`."""
    weight, gram = weight.detach().float(), gram.float().clone()
    columns, diagonal = weight.shape[1], gram.diagonal()
    # A channel that is always zero: any code is right.
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    scales = group_scales(split_groups(weight), split_groups(diagonal[None]))
    order = diagonal.argsort(descending=True)
    spread = _inverse_factor(gram[order][:, order])
    own = spread.diagonal().tolist()
    # A row per column of the weight, since columns are read one after another.
    remaining = weight.T[order].contiguous()
    by_column = scales.float().T[order // GROUP].contiguous()
    integers = torch.empty(remaining.shape, dtype=torch.int8)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty(stop - start, len(weight))
        for column in range(start, stop):
            values, scale = remaining[column], by_column[column]
            codes = (values / scale).round_().clamp_(SMALLEST["int4"], LARGEST["int4"])
            integers[column] = codes
            error = torch.sub(values, codes.mul_(scale), out=errors[column - start])
            error /= own[column]
            remaining[column + 1 : stop].addr_(spread[column, column + 1 : stop], error, alpha=-1)
        remaining[stop:].addmm_(spread[start:stop, stop:].T, errors, alpha=-1)
    ordered = torch.empty_like(integers)
    ordered[order] = integers
    return pack(ordered.T.contiguous(), scales, "int4")


def _inverse_factor(gram: Float[Tensor, "columns columns"]) -> Float[Tensor, "columns columns"]:
    """The upper triangle U of the inverse, which is U^T U."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True)
