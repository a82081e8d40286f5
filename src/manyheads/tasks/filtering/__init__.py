"""Filtering a corpus with a classifier, on one machine or many."""
