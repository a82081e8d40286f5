"""A pattern in few bytes: of each query the largest weights, eight bits each, packed and zipped."""

import gzip
from base64 import b64encode

import numpy as np
from jaxtyping import Float, Integer

__all__ = ["pack", "quantise"]

# Keys are kept from the largest on until a query has shown this much of its weight.
ENOUGH = 0.98


def quantise(weights: Float[np.ndarray, "t k"]) -> Integer[np.ndarray, "t k"]:
    """255 times the root of a weight: small ones, which are many, keep more of their digits.

    >>> quantise(np.array([[1.0, 0.25, 0.0001, 0.0]])).tolist()
    [[255, 128, 3, 0]]
    """
    return np.rint(np.sqrt(np.clip(weights, 0, 1)) * 255).astype(np.uint8)


def pack(keys: Integer[np.ndarray, "t k"], weights: Float[np.ndarray, "t k"]) -> str:
    """Base64 of a zip of: keys of each query, what each key is beyond the one before, weights.

    Counts and weights have a byte, steps two, the low bytes of all before the high ones. A row has
    its largest weight first; keys lie in order within a query, so that steps are small.
    """
    small = quantise(weights)
    before = np.cumsum(weights, axis=1) - weights
    kept = (small > 0) & (before < ENOUGH)
    order = np.argsort(np.where(kept, keys, np.iinfo(np.int64).max), axis=1, kind="stable")
    keys, small, kept = (
        np.take_along_axis(each, order, axis=1) for each in (keys.astype(np.int64), small, kept)
    )
    steps = np.diff(keys, axis=1, prepend=0)[kept].astype("<u2")
    counts = kept.sum(axis=1).astype(np.uint8)
    parts = (counts, steps & 255, steps >> 8, small[kept])
    raw = b"".join(part.astype(np.uint8).tobytes() for part in parts)
    # No time of writing, so that the same pattern is the same text.
    return b64encode(gzip.compress(raw, compresslevel=9, mtime=0)).decode("ascii")
