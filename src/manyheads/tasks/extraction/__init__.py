"""Extraction and classification: entities, scores, calibration."""
