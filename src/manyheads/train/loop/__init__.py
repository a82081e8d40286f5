"""The training loop: steps, checkpoints, validation, telemetry, and the folder of a run."""
