"""Whole models, each a list of layer configs."""
