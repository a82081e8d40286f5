"""Train a model: objectives, optimisers, schedules, the loop, its checkpoints."""
