"""Triton kernels of the mixers, for CUDA: importing any of them needs triton."""
