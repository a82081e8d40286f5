"""Attention kernels, all with the result of `reference`."""
