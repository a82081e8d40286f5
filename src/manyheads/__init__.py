"""See, measure and reshape every attention head, at full speed."""

from importlib import import_module as _import_module
from inspect import isfunction as _isfunction

from manyheads.argument_checks import checked as _checked

# Where each public name lives. It is fetched when first used, so that the command line can answer
# before torch is loaded. Type checkers read __init__.pyi, and a test holds the two together.
_HOMES = {
    "attention": ("Attention", "AttentionConfig"),
    "bridge.wrapped_model": ("wrap",),
    "cache": ("Cache", "DynamicCache", "StaticCache"),
    "checkpoints.classification_head": ("with_classes",),
    "checkpoints.deferred.sharded_load": ("load_sharded",),
    "checkpoints.folder": ("load", "save"),
    "data.images": ("read_image",),
    "decoding.chat": ("apply_chat", "chat_prompt"),
    "decoding.generation": ("generate", "stream"),
    "decoding.generation_config": ("Generation", "GenerationConfig"),
    "decoding.guard": ("Guard", "GuardReport"),
    "decoding.sampling": ("BeamSearch", "Greedy", "Sample"),
    "encoding.classify": ("classify", "classify_images", "tag"),
    "encoding.encode": ("encode",),
    "encoding.token_vectors": ("encode_tokens",),
    "errors": ("ManyheadsError",),
    "lens.measure.live_statistics": ("monitor",),
    "models.build": ("build", "get_config", "list_configs"),
    "models.decoder": ("Decoder", "DecoderConfig"),
    "models.padding": ("Output",),
    "models.encoder": ("Encoder", "EncoderConfig"),
    "models.seq2seq": ("Seq2Seq", "Seq2SeqConfig"),
    "models.vision": ("Vision", "VisionConfig"),
    "ragged": ("Lengths", "Ragged"),
    "report.notebook": ("show",),
    "taps": ("Head", "Record", "Site", "Sublayer", "Tap", "Watcher"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'manyheads' has no attribute {name!r}")
    value = getattr(_import_module(f"manyheads.{_HOME_OF[name]}"), name)
    # A function with a signature of its own has checked arguments: see bridge/automatic.py.
    if _isfunction(value) and not hasattr(value, "__signature__"):
        value = _checked(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
