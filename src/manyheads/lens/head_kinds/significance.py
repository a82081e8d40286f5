"""Chance: p-values, the Benjamini-Hochberg correction, and intervals of fractions."""

from math import erfc, sqrt

import numpy as np
from jaxtyping import Bool, Float

# The expected fraction of wrong labels among those that are given.
FALSE_DISCOVERY_RATE = 0.05
# Two-sided 95% of a normal distribution.
NORMAL_95 = 1.959964

Floats = Float[np.ndarray, " h"]


def chance_above(values: Floats, bounds: Floats, errors: Floats, samples: Floats) -> Floats:
    """One-sided p-values that the true value is at most its bound; 1 where something is unknown.

    Student's t with `samples` - 1 degrees of freedom, in the normal approximation 26.7.8 of
    Abramowitz and Stegun.

    >>> p = chance_above(np.array([0.5, 0.7]), np.full(2, 0.5), np.full(2, 0.1), np.full(2, 1e9))
    >>> p.round(4).tolist()
    [0.5, 0.0228]
    """
    freedom = np.fmax(samples - 1, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        t = (values - bounds) / errors
        z = t * (1 - 1 / (4 * freedom)) / np.sqrt(1 + t**2 / (2 * freedom))
    return np.array([1.0 if np.isnan(score) else 0.5 * erfc(score / sqrt(2)) for score in z])


def benjamini_hochberg(p: Floats, rate: float = FALSE_DISCOVERY_RATE) -> Bool[np.ndarray, " h"]:
    """Which tests are significant at a false discovery rate (Benjamini and Hochberg, 1995).

    >>> benjamini_hochberg(np.array([0.04, 0.012, 0.9, 0.03])).tolist()
    [False, True, False, False]
    """
    order = np.sort(p)
    below = order <= rate * np.arange(1, len(p) + 1) / max(1, len(p))
    return p <= order[below][-1] if below.any() else np.zeros(len(p), dtype=bool)


def interval(score: float, error: float, samples: float = np.nan) -> tuple[float, float]:
    """The 95% interval of a score between 0 and 1 with a standard error.

    With `samples` it is Wilson's interval of a fraction, of as many independent samples as give
    that error, which stays informative at 0 and 1; otherwise that of a normal distribution.

    >>> [round(end, 3) for end in interval(1.0, 0.0, 48.0)]
    [0.926, 1.0]
    >>> [round(end, 3) for end in interval(0.5, 0.1)]
    [0.304, 0.696]
    """
    if np.isnan(samples):
        low, high = max(0.0, score - NORMAL_95 * error), min(1.0, score + NORMAL_95 * error)
        # Rounding may leave a score of 1 just above 1.
        return (low, max(high, score)) if not np.isnan(error) else (np.nan, np.nan)
    spread = score * (1 - score)
    count = min(samples, spread / error**2) if spread > 0 and error > 0 else samples
    if not count > 0:
        return np.nan, np.nan
    shrink = 1 + NORMAL_95**2 / count
    center = (score + NORMAL_95**2 / (2 * count)) / shrink
    half = NORMAL_95 / shrink * sqrt(spread / count + NORMAL_95**2 / (4 * count**2))
    return max(0.0, center - half), min(1.0, center + half)
