"""Heads chosen by what they do in a task, and checked on halves of it that did not choose them."""
