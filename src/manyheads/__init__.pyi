"""See, measure and reshape every attention head, at full speed."""

from manyheads.attention import Attention, AttentionConfig
from manyheads.cache import Cache, DynamicCache, StaticCache
from manyheads.checkpoints.classification_head import with_classes
from manyheads.checkpoints.folder import load, save
from manyheads.data.image_preprocessing import read_image
from manyheads.decoding.chat import apply_chat, chat_prompt
from manyheads.decoding.generation import generate, stream
from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.output import Generation
from manyheads.decoding.sampling import BeamSearch, Greedy, Sample
from manyheads.encoding.classify import classify, classify_images
from manyheads.encoding.encode import encode
from manyheads.encoding.tag import tag
from manyheads.errors import ManyheadsError
from manyheads.models.build import build, get_config, list_configs
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.initialisation import Initialisation
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.padding import Output
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, TokenHead, Transform
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, Vision, VisionConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import All, Blocks, Causal, GlobalTokens, Prefix, RandomBlocks, Window
from manyheads.parts.norms import Both, LayerNorm, NoNorm, Post, Pre, RMSNorm
from manyheads.parts.positions import (
    Alibi,
    Grid,
    Learned,
    NoPosition,
    Rotary,
    Shaw,
    Sinusoidal,
    T5Buckets,
)
from manyheads.parts.positions.rotary import NTK, Linear, Llama3, YaRN
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap, Watcher

__all__ = [
    "Alibi",
    "All",
    "Attention",
    "AttentionConfig",
    "BeamSearch",
    "Blocks",
    "Both",
    "Branch",
    "Cache",
    "Causal",
    "ClassHead",
    "Decoder",
    "DecoderConfig",
    "DynamicCache",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "Experts",
    "Gate",
    "GeGLU",
    "Generation",
    "GenerationConfig",
    "GlobalTokens",
    "Greedy",
    "Grid",
    "Head",
    "Initialisation",
    "LanguageHead",
    "LayerConfig",
    "LayerNorm",
    "Learned",
    "Lengths",
    "Linear",
    "Llama3",
    "MLP",
    "ManyheadsError",
    "NTK",
    "NoNorm",
    "NoPosition",
    "NoReadout",
    "Output",
    "Patches",
    "Post",
    "Pre",
    "Prefix",
    "RMSNorm",
    "Ragged",
    "RandomBlocks",
    "Record",
    "Rotary",
    "Sample",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Shaw",
    "Sinusoidal",
    "Site",
    "StackConfig",
    "StaticCache",
    "Sublayer",
    "SwiGLU",
    "T5Buckets",
    "Tap",
    "TokenHead",
    "Transform",
    "Vision",
    "VisionConfig",
    "Watcher",
    "Window",
    "YaRN",
    "apply_chat",
    "build",
    "chat_prompt",
    "classify",
    "classify_images",
    "encode",
    "generate",
    "get_config",
    "list_configs",
    "load",
    "read_image",
    "save",
    "stream",
    "tag",
    "with_classes",
]
