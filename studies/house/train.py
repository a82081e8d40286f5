"""Train one of the house models: python studies/house/train.py RUN.toml [key=value ...]

The same as `manyheads train`, for a machine without the command line's packages.
"""

import sys
from pathlib import Path

from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import read_run

if __name__ == "__main__":
    finished = train(read_run(Path(sys.argv[1]), sys.argv[2:]))
    print(finished)
