"""Mixers with a softmax over few keys: windows, global tokens, random blocks."""
