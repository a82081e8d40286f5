"""Texts and images to ragged batches: read, tokenize, store, pack, mask.

>>> from manyheads import data
>>> tokenizer = data.train_tokenizer(data.InMemoryTexts(("one two",) * 3), size=300, progress=False)
"""

from manyheads.data.batch import Batch
from manyheads.data.chunks import DocumentChunks, FixedChunks, MixedChunks
from manyheads.data.images import ImageArrays, ImageFolder, read_image
from manyheads.data.labeled import Examples, LabeledTexts, TaggedTexts, TextPairs
from manyheads.data.masking import Masking
from manyheads.data.sources.rows import FileRows, HubRows
from manyheads.data.sources.texts import InMemoryTexts, RowTexts, TextFiles
from manyheads.data.store import TokenStore, open_store
from manyheads.data.stream import Stream, StreamPosition, StreamStep
from manyheads.data.tokenize import write_store
from manyheads.data.tokenizer_training import train_tokenizer

__all__ = [
    "Batch",
    "DocumentChunks",
    "Examples",
    "FileRows",
    "FixedChunks",
    "HubRows",
    "ImageArrays",
    "ImageFolder",
    "InMemoryTexts",
    "LabeledTexts",
    "Masking",
    "MixedChunks",
    "RowTexts",
    "Stream",
    "StreamPosition",
    "StreamStep",
    "TaggedTexts",
    "TextFiles",
    "TextPairs",
    "TokenStore",
    "open_store",
    "read_image",
    "train_tokenizer",
    "write_store",
]
