"""The commands of `manyheads.tasks`."""
