"""See, measure and reshape every attention head, at full speed."""

from manyheads.attention import Attention, AttentionConfig
from manyheads.bridge.wrapped_model import wrap
from manyheads.cache import Cache, DynamicCache, StaticCache
from manyheads.checkpoints.classification_head import with_classes
from manyheads.checkpoints.deferred.sharded_load import load_sharded
from manyheads.checkpoints.folder import load, save
from manyheads.data.images import read_image
from manyheads.decoding.chat import apply_chat, chat_prompt
from manyheads.decoding.generation import generate, stream
from manyheads.decoding.generation_config import Generation, GenerationConfig
from manyheads.decoding.guard import Guard, GuardReport
from manyheads.decoding.sampling import BeamSearch, Greedy, Sample
from manyheads.encoding.classify import classify, classify_images, tag
from manyheads.encoding.encode import encode
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import ManyheadsError
from manyheads.lens.measure.live_statistics import monitor
from manyheads.models.build import build, get_config, list_configs
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.padding import Output
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.vision import Vision, VisionConfig
from manyheads.ragged import Lengths, Ragged
from manyheads.report.notebook import show
from manyheads.taps import Head, Record, Site, Sublayer, Tap, Watcher

__all__ = [
    "Attention",
    "AttentionConfig",
    "BeamSearch",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "DynamicCache",
    "Encoder",
    "EncoderConfig",
    "Generation",
    "GenerationConfig",
    "Greedy",
    "Guard",
    "GuardReport",
    "Head",
    "Lengths",
    "ManyheadsError",
    "Output",
    "Ragged",
    "Record",
    "Sample",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Site",
    "StaticCache",
    "Sublayer",
    "Tap",
    "Vision",
    "VisionConfig",
    "Watcher",
    "apply_chat",
    "build",
    "chat_prompt",
    "classify",
    "classify_images",
    "encode",
    "encode_tokens",
    "generate",
    "get_config",
    "list_configs",
    "load",
    "load_sharded",
    "monitor",
    "read_image",
    "save",
    "show",
    "stream",
    "tag",
    "with_classes",
    "wrap",
]
