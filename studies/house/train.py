"""Train one of the house models: python studies/house/train.py RUN.toml [key=value ...]

The same as `manyheads train`, for a machine without the command line's packages.
"""

import sys
from pathlib import Path

from manyheads.train.run import read_run
from manyheads.train.session import train

if __name__ == "__main__":
    finished = train(read_run(Path(sys.argv[1]), sys.argv[2:]))
    print(finished)
