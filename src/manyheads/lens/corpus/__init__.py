"""Every head over a whole corpus: measures, distances, tokens, examples."""
