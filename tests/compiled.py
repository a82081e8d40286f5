"""What tests of compiled models share."""

import einops
import torch


def keep_einops_whole() -> None:
    """Have the compiler take a call of einops as one operation, as it did up to einops 0.8.1.

    Otherwise it traces how every pattern is read, which is most of all that there is to trace.
    Steps of decoding and models with adapters are compiled as einops is now.
    """
    for function in (einops.einsum, einops.rearrange, einops.reduce):
        torch.compiler.allow_in_graph(function)
