"""How much of the data makes a step of a run."""

from dataclasses import dataclass

from manyheads.errors import ConfigError
from manyheads.train.schedules import BatchGrowth

__all__ = ["Amount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much makes a step: `batch` tokens (of images, images), at most `micro_batch` at a time.

    A batch may grow. 0 takes it whole; gradients of its micro-batches are summed, so that the
    second number changes memory and speed alone.
    """

    batch: int | BatchGrowth
    micro_batch: int = 0

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or self.micro_batch < 0:
            raise ConfigError(
                f"batch={min(self.sizes)} and micro_batch={self.micro_batch}", "use 1 or more"
            )
        if isinstance(self.batch, BatchGrowth) and not self.micro_batch:
            raise ConfigError("a batch that grows is made of micro-batches", "give micro_batch")
        for size in self.sizes:
            if size % self.room:
                raise ConfigError(
                    f"batch={size} is no multiple of micro_batch={self.room}",
                    f"use a batch of {-(-size // self.room) * self.room}",
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that the batch ever is."""
        if isinstance(self.batch, BatchGrowth):
            return (*self.batch.sizes, self.batch.last)
        return (self.batch,)

    @property
    def room(self) -> int:
        """Of one micro-batch."""
        return self.micro_batch or self.sizes[0]

    def micro_batches(self, step: int) -> int:
        """Of a step, counted from the start of its phase."""
        tokens = self.batch.tokens(step) if isinstance(self.batch, BatchGrowth) else self.batch
        return tokens // self.room
