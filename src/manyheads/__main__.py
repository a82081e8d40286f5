"""`python -m manyheads` is `manyheads`."""

import sys

from manyheads.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
