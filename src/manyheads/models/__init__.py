"""Models and what they are made of: an embedding, a stack of layer configs and a readout."""

from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.padding import Output
from manyheads.models.provenance import DenseProjection, LateInteractionConfig, QueryExpansion
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    ReadoutTransform,
    SpanHead,
    TokenHead,
)
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, Vision, VisionConfig

__all__ = [
    "Branch",
    "ClassHead",
    "Decoder",
    "DecoderConfig",
    "DenseProjection",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "Initialization",
    "LanguageHead",
    "LateInteractionConfig",
    "LayerConfig",
    "NoReadout",
    "Output",
    "Patches",
    "QueryExpansion",
    "ReadoutTransform",
    "Seq2Seq",
    "Seq2SeqConfig",
    "StackConfig",
    "SpanHead",
    "TokenHead",
    "Vision",
    "VisionConfig",
]
