"""Redundant, dead and collapsed heads and layers."""
