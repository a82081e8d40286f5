"""Causal analysis: ablation, patching, path patching, gradient importance."""
