"""manyheads completion: a script that teaches a shell our commands and options."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from manyheads.cli.commands import WORKING

__all__ = ["Completion"]


@dataclass(frozen=True, slots=True)
class Completion:
    """Print a script that lets the shell complete commands, options, models and files.

    For example: eval "$(manyheads completion bash)"

    That line in ~/.bashrc, or with zsh in ~/.zshrc after compinit; for fish: manyheads completion
    fish > ~/.config/fish/completions/manyheads.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell to print it for."""

    def run(self) -> int:
        """Print the script."""
        from manyheads.checkpoints.hub import HOUSE
        from manyheads.cli import shells

        write = {"bash": shells.bash, "zsh": shells.zsh, "fish": shells.fish}[self.shell]
        print(write({**WORKING, "completion": Completion}, HOUSE), end="")
        return 0
