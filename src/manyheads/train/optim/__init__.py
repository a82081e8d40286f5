"""Optimizers, their parameter groups and update rules, and learning-rate schedules."""
