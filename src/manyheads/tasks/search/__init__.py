"""Search: documents, indexes, late interaction, answers and their evaluation."""
