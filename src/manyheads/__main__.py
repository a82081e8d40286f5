"""`manyheads` and `python -m manyheads`: Ctrl-C ends the program in one line, at any moment."""

import os
import signal
import sys
from types import FrameType

FAILED = 1


def main() -> int:
    """Run the command line, with Ctrl-C handled before anything large is imported."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from manyheads.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        return FAILED
    finally:
        # Nothing is left to interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the program at once until torch has been imported.

    An import that is interrupted may swallow the exception or raise another one, and before torch
    is there no work has begun.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        signal.default_int_handler(number, frame)
    os.write(2, b"error: interrupted.\n")
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
