"""What the gated-attention study reports (arXiv 2505.06708), and its claims."""

import math

from studies.study import Claim

SOURCE = "Qiu and others 2025, arXiv 2505.06708"
# Perplexity of a mixture of experts with 15 billion weights after 400 billion tokens.
PERPLEXITY = {
    "plain": 6.026,
    "G1 channel": 5.761,
    "G2 channel": 5.820,
    "G3 channel": 6.016,
    "G4 channel": 5.981,
    "G5 channel": 6.017,
    "G1 head": 5.792,
    "G2 head": 5.808,
    "G1 shared": 5.801,
    "G2 shared": 5.867,
    "G1 added SiLU": 5.821,
    "G1 times SiLU": 5.822,
    "RMSNorm of heads": 5.847,
    "SiLU of heads": 5.975,
    # From 5.95 to 5.98.
    "wider feed-forward": 5.965,
    "one more head": 5.965,
}
# The share of attention on the first token.
FIRST_TOKEN = {
    "plain": 0.467,
    "G1 channel": 0.048,
    "G1 head": 0.073,
    "G1 shared": 0.301,
    "G2 channel": 0.297,
    "reads nothing": 0.364,
    "not sparse": 0.451,
}


def loss_reduction(name: str) -> float | None:
    """By how many percent the published loss is below that of the plain model."""
    if name not in PERPLEXITY:
        return None
    return 100 * (1 - math.log(PERPLEXITY[name]) / math.log(PERPLEXITY["plain"]))


CLAIMS = {
    "gain": Claim(
        "A gate after attention, one value per channel, lowers the loss: perplexity from 6.026 to "
        "5.761.",
        SOURCE,
    ),
    "place": Claim(
        "The place matters: after attention (5.761) and on values (5.820) gates help; on keys "
        "(6.016), on queries (5.981) and after the output projection (6.017) they hardly do.",
        SOURCE,
    ),
    "weights": Claim(
        "The gain is not that of more weights: wider models without a gate reach 5.95 to 5.98.",
        SOURCE,
    ),
    "head": Claim(
        "One value per head, with few weights, has most of the gain (5.792 against 5.761).", SOURCE
    ),
    "shared": Claim(
        "Heads need gates of their own: shared by all heads, G1 reaches 5.801 instead of 5.761 and "
        "G2 5.867 instead of 5.820.",
        SOURCE,
    ),
    "multiply": Claim(
        "To multiply by a sigmoid (5.761) is better than to add SiLU (5.821) or to multiply by it "
        "(5.822).",
        SOURCE,
    ),
    "nonlinear": Claim(
        "What is not linear between values and output projection helps by itself: RMSNorm of the "
        "heads' outputs reaches 5.847, SiLU of them only 5.975.",
        SOURCE,
    ),
    "sinks": Claim(
        "Gates remove attention sinks: the first token's share falls from 0.467 to 0.048.", SOURCE
    ),
    "activations": Claim(
        "Gates remove massive activations: the largest, mean over layers, falls from 1,053 to 94.",
        SOURCE,
    ),
    "controls": Claim(
        "It takes a gate that reads the input and can close: one that reads nothing leaves 0.364 "
        "of the attention on the first token, one of 0.5 + 0.5 sigmoid 0.451, against 0.048.",
        SOURCE,
    ),
    "sparse": Claim(
        "Gates learn to be nearly closed: a mean of 0.116 after attention, 0.221 on values.", SOURCE
    ),
}
