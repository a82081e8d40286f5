"""What a kernel adds to the scores: any of the biases by position."""

from manyheads.parts.positions.alibi import AlibiBias
from manyheads.parts.positions.relative import BucketBias, ShawBias

__all__ = ["Bias"]

# Each has `score(head, row, query, key)`, elementwise over index tensors that broadcast: the same
# formula renders a block for one kernel and becomes a score_mod for another.
Bias = AlibiBias | BucketBias | ShawBias
