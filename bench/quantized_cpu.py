"""Weights of eight and four bits on the CPU: `python bench/quantized_cpu.py`.

SmolLM2 generates beside float32 and llama.cpp (package xllamacpp), and MiniLM encodes beside
float32 and onnxruntime. All run in turn in one process on one thread; a time is the processor's,
the least of the rounds. What is lost is measured on texts that the weights were not rounded by.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from encode_peers import OnnxRuntime, minilm
from side_by_side import race, say, show
from stored_results import add_store, introduce, store
from torch import Tensor

from manyheads import encode, generate, load
from manyheads.checkpoints.hub import folder_of
from manyheads.lens.inputs.synthetic import passages
from manyheads.quantization import measure_quality
from manyheads.quantization.integer_layers import IntegerWeight
from manyheads.quantization.model_weights import built_in_texts

__all__ = ["main"]

WEIGHTS = ("float32", "int8", "int4")
# The file of SmolLM2 has four bits, which may stay.
GENERATION = (*WEIGHTS, "stored")
PROMPT = 32
PEERS = ("xllamacpp", "onnxruntime")
GOALS = {
    "generation int8, times float32": 1.8,
    "generation int8, core time over llama.cpp q8_0, at most": 1.3,
    "encoding int8, times float32": 1.4,
    "encoding int8, cosine": 0.99,
    "perplexity int8, at most": 0.01,
    "perplexity int4, at most": 0.05,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--only", choices=("generation", "encoding"))
    add_store(parser)
    arguments = parser.parse_args()
    if arguments.store and arguments.only:
        parser.error("--store: figures of a part of the work are not stored, drop --only")
    torch.set_num_threads(1)
    introduce("cpu", *PEERS)
    results: dict[str, Any] = {"goals": GOALS}
    if arguments.only != "encoding":
        results |= generation(arguments.rounds, arguments.new_tokens)
    if arguments.only != "generation":
        results["encoding"] = encoding(arguments.rounds)
    # Other work on the machine stretches even core time a little.
    results["load"] = os.getloadavg()[0]
    store(arguments.store, "quantized", "cpu", results, *PEERS)


def generation(rounds: int, new_tokens: int) -> dict[str, Any]:
    models: dict[str, Any] = {name: load("smollm2", weights=_weights(name)) for name in GENERATION}
    quality = {name: measure_quality(models[name], models["float32"]) for name in GENERATION[1:]}
    for name, line in quality.items():
        say(f"{name}: {line}")
    draw = random.Random(0)
    ids = [draw.randrange(49_000) for _ in range(PROMPT)]
    writers: dict[str, Callable[[int], Any]] = {
        name: partial(_write, model, ids) for name, model in models.items()
    }
    with tempfile.TemporaryDirectory() as place:
        if find_spec("xllamacpp") is not None:
            for kind in ("F32", "Q8_0", "Q4_0"):
                writers[f"llama.cpp {kind}"] = _llama(Path(place) / f"{kind}.gguf", kind, ids)
        first = {f"{name} prompt": partial(write, 1) for name, write in writers.items()}
        whole = {name: partial(write, 1 + new_tokens) for name, write in writers.items()}
        read = sum(tensor.nbytes for tensor in models["float32"].state_dict().values())
        block = torch.ones(read // 4)
        times = race({**first, **whole, "reading": block.sum}, device="cpu", rounds=rounds)
    prompt = {name: min(times.host[f"{name} prompt"]) for name in writers}
    token = {name: (min(times.host[name]) - prompt[name]) / new_tokens for name in writers}
    reading = min(times.host["reading"])
    rows = []
    for name in writers:
        size = _bytes(models[name]) if name in models else 0
        limit = reading * size / read
        rows.append(
            {
                "name": name,
                "ms per token": round(token[name] * 1e3, 2),
                "times float32": round(token["float32"] / token[name], 2),
                "ms of prompt": round(prompt[name] * 1e3, 1),
                "MB": round(size / 1e6) or None,
                "share of reading limit": round(limit / token[name], 2) if size else None,
                "operations": _operations(models[name]) if name in models else None,
            }
        )
    table = [[str(value) for value in row.values()] for row in rows]
    show(f"SmolLM2, {PROMPT} tokens read, {new_tokens} written", list(rows[0]), table)
    return {
        "generation": rows,
        "quality": {
            name: {
                "perplexity": line.perplexity,
                "original perplexity": line.original_perplexity,
                "change": line.change,
                "cosine": line.cosine,
                "tokens": line.tokens,
            }
            for name, line in quality.items()
        },
    }


def encoding(rounds: int) -> list[dict[str, Any]]:
    texts = [*passages(), *built_in_texts("evaluation")]
    texts = [part for text in texts for part in (text, *text.split(". "))]
    models: dict[str, Any] = {name: load(minilm(), weights=_weights(name)) for name in WEIGHTS}
    encoders: dict[str, Callable[[], Tensor]] = {
        name: partial(_encode, model, texts) for name, model in models.items()
    }
    for int8 in (False, True):
        peer = OnnxRuntime(threads=1, int8=int8)
        encoders[f"onnxruntime {'int8' if int8 else 'float32'}"] = partial(peer.encode, texts)
    exact = encoders["float32"]()
    times = race(encoders, device="cpu", rounds=rounds)
    rows = []
    for name, work in encoders.items():
        cosine = torch.cosine_similarity(work(), exact, dim=-1)
        rows.append(
            {
                "name": name,
                "core seconds": round(min(times.host[name]), 3),
                "times float32": round(min(times.host["float32"]) / min(times.host[name]), 2),
                "mean cosine": round(float(cosine.mean()), 4),
                "least cosine": round(float(cosine.min()), 4),
            }
        )
    table = [[str(value) for value in row.values()] for row in rows]
    show(f"MiniLM, {len(texts)} texts", list(rows[0]), table)
    return rows


def _weights(name: str) -> Any:
    return None if name == "float32" else name


def _write(model: Any, ids: list[int], new_tokens: int) -> Tensor:
    [result] = generate(model, [ids], max_new_tokens=new_tokens, eos_token_ids=(), progress=False)
    return torch.tensor(result.ids)


def _encode(model: Any, texts: list[str]) -> Tensor:
    return torch.as_tensor(encode(model, texts, progress=False))


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _operations(model: Any) -> str:
    parts = [part for part in model.modules() if isinstance(part, IntegerWeight)]
    names = {type(part.product(tokens)).__name__: None for part in parts for tokens in (1, PROMPT)}
    return " and ".join(names) or "float32"


def _llama(file: Path, kind: str, ids: list[int]) -> Callable[[int], Any]:
    """llama.cpp on one thread, with the same weights in a format of its own."""
    import xllamacpp

    _write_gguf(folder_of("smollm2"), file, kind)
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 512, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.verbosity, settings.n_gpu_layers, settings.cache_ram_mib = -1, 0, 0
    server = xllamacpp.Server(settings)
    options = {"prompt": ids, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    return lambda count: server.handle_completions({**options, "n_predict": count})


def _write_gguf(source: Path, target: Path, kind: str) -> None:
    """The same model with its matrices in another format."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    chosen = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            outer = field.types[0]
            inner = field.types[-1] if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), outer, inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            values = gguf.quants.quantize(values, chosen)
            writer.add_tensor(tensor.name, values, raw_dtype=chosen)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
