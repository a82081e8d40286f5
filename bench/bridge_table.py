"""Every class of `transformers` that can be built small here, wrapped and compared with itself.

For each: the logits wrapped and not; entropy and the weights on the previous, the first and the
induction token against those of the eager weights that the model returns; and the ablation of a
head against a hook on its output projection. `--write` makes docs/reference/wrapped-models.md, also
from the output of several parts.
"""

import argparse
import inspect
import json
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from manyheads import lens
from manyheads.bridge.structure import ProbedAttention
from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.errors import ManyheadsError
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.model_interface import ModelInputs
from manyheads.taps import Record, Site, Sublayer, Tap, Watcher

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "wrapped-models.md"
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "vocab_size": 120,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
    "word_embed_proj_dim": 32,
    "sliding_window": 7,
    "image_size": 16,
    "patch_size": 4,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
# What a generic config may have to change, or to leave to its default (None).
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": None, "head_dim": None},
    {"sliding_window": None},
    {"num_hidden_layers": None},
    {"intermediate_size": None},
    {"image_size": None, "patch_size": None},
)
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "pairs": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "base": modeling_auto.MODEL_MAPPING_NAMES,
}
TEXTS = [[5, 6, 7, 8, 9, 5, 6, 7, 10, 11, 5, 6], [20, 21, 22, 20, 21, 23, 24, 20, 25]]
ANSWERS = [[1, 30, 31, 30, 31, 32, 33], [1, 40, 41, 40, 42]]
MEASURES = ("entropy", "previous_token", "first_token", "induction")
LARGEST, SECONDS, CLOSE = 30e6, 100, 1e-5


@dataclass(slots=True)
class Row:
    """What was found out about a class."""

    name: str
    kind: str
    family: str
    status: str = ""
    shape: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        cells = [f"{self.differences.get(name, float('nan')):.0e}" for name in COLUMNS]
        shown = ["" if cell == "nan" else ("0" if cell == "0e+00" else cell) for cell in cells]
        note = NOTES.get(self.name, self.reason)
        name = f"{self.name} ({note})" if note else self.name
        return f"| {name} | {self.shape} | {' | '.join(shown)} |"


# Why a model differs from its own eager weights.
NO_SINK = "its eager weights leave the sink out of the softmax"
RETURNED = "by output_attentions"
NOTES = {
    "GraniteSWAForCausalLM": NO_SINK,
    "GraniteMoeSWAForCausalLM": NO_SINK,
    "ViTMAEModel": "it hides other patches at every call",
    "ConvBertForMaskedLM": f"{RETURNED}; padding changes its weights",
    "FSMTForConditionalGeneration": f"{RETURNED}; with a cache its own are without a mask",
    "FalconForCausalLM": f"{RETURNED}; with sdpa its own are without a mask",
    "ImageGPTForImageClassification": f"{RETURNED}; it averages over padding",
    "NystromformerForMaskedLM": f"{RETURNED}; padding changes its weights",
}
COLUMNS = ("logits", "statistics", "ablation")


class TooLong(Exception):  # noqa: N818, it is not an error of the model
    """A class took too long to build or run."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def build_small(family: str, name: str) -> Any:
    """A tiny model of the class with random weights, heads far from uniform."""
    config_class = CONFIG_MAPPING[family]
    known = set(inspect.signature(config_class).parameters)
    for each in config_class.__mro__:
        known |= set(getattr(each, "__annotations__", {}))
    known |= set(getattr(config_class, "attribute_map", {}))
    wanted = {key: value for key, value in TINY.items() if key in known}
    error: Exception = ValueError("no config fits")
    for changes in CHANGES:
        changed = {key: changes.get(key, value) for key, value in wanted.items()}
        try:
            config = config_class(**{k: v for k, v in changed.items() if v is not None})
            with torch.device("meta"):
                size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
            if size > LARGEST:
                raise MemoryError(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = getattr(transformers, name)(config).eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() == 2:
                        weight.normal_(std=0.2)
                for module in model.modules():
                    # Padding has no vector, and MobileBERT reads the neighbors of each token.
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        module.weight[module.padding_idx] = 0
            inputs_of(model)
            return model
        except TooLong:
            raise
        except Exception as caught:
            error = caught
    raise error


def inputs_of(model: Any) -> Any:
    """Texts, pairs, images or sounds, and a first forward that shows whether they fit."""
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(1)
    accepts = set(inspect.signature(model.forward).parameters)
    texts: Any = TEXTS
    if config.is_encoder_decoder and main == "input_ids" and "decoder_input_ids" in accepts:
        texts = list(zip(TEXTS, ANSWERS, strict=True))
    elif main == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        channels = getattr(config, "num_channels", 3) or 3
        pixels = torch.randn(2, 1, channels, side, side, generator=generator)
        texts = [{"pixel_values": each} for each in pixels]
    elif main == "input_values":
        texts = [{"input_values": torch.randn(1, 1600, generator=generator)} for _ in range(2)]
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 16)
        bins = getattr(config, "num_mel_bins", 80)
        texts = [{"input_features": torch.randn(1, bins, frames, generator=generator)}]
    if isinstance(texts[0], dict) and "decoder_input_ids" in accepts:
        texts = [{**each, "decoder_input_ids": torch.tensor([ANSWERS[0]])} for each in texts]
    with torch.no_grad():
        model(**arguments_of(texts[0]))
    return texts


def arguments_of(text: Any) -> dict[str, Tensor]:
    if isinstance(text, dict):
        return dict(text)
    if isinstance(text, tuple):
        source, target = (torch.tensor([each]) for each in text)
        return {"input_ids": source, "decoder_input_ids": target}
    return {"input_ids": torch.tensor([text])}


def first_tensor(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return next(each for each in output.values() if isinstance(each, Tensor))


def compare(row: Row, model: Any) -> None:
    """Fill in the differences of one class."""
    texts = inputs_of(model)
    wrapped = wrap(model, example=arguments_of(texts[0]))
    stacks = wrapped.structure.stacks
    row.shape = ", ".join(
        f"{'' if name == 'main' else name + ' '}{each.depth}x{each.attentions[0][0].heads}"
        for name, each in stacks.items()
    )
    if wrapped.structure.by_weights:
        row.reason = RETURNED
    elif wrapped.structure.silent:
        row.reason = f"{len(wrapped.structure.silent)} attentions are not seen"
    inputs = read_inputs(wrapped, texts)
    whole = inputs.select([0]) if inputs.examples else inputs
    arguments, known = wrapped.read(whole)
    with torch.no_grad():
        plain = first_tensor(model(**arguments))
        with wrapped.watching(Record([Site(0, Tap.QUERY)]), known):
            seen = model(**arguments)
    lengths = known.get(wrapped.readout_stack)
    real: Any = slice(None)
    if lengths is not None and plain.dim() == 3:
        columns = torch.arange(lengths.longest)
        real = columns < torch.tensor(lengths.each)[:, None]
    difference = (plain - first_tensor(seen))[real].abs().max()
    row.differences["logits"] = float(difference / plain.abs().max().clamp(min=1))
    row.differences |= compare_statistics(wrapped, model, texts)
    row.differences |= compare_ablation(wrapped, whole)


def compare_statistics(wrapped: Any, model: Any, texts: Any) -> dict[str, float]:
    """The largest difference from the measures of the eager weights."""
    result = lens.statistics(wrapped, texts, progress=False)
    expected: dict[tuple[str, Sublayer, int, int], dict[str, list[float]]] = {}
    blocks: dict[tuple[str, Sublayer], list[int]] = {}
    for block in result.blocks:
        blocks.setdefault((block.stack, block.sublayer), []).append(block.layer)
    before = model.config._attn_implementation
    for text in texts:
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                output = model(**arguments_of(text), output_attentions=True)
        finally:
            model.set_attn_implementation(before)
        for (stack, sublayer), layers in blocks.items():
            weights = [each for each in weights_of(output, stack, sublayer) if each is not None]
            if len(weights) != len(layers):
                return {}
            ids = ids_of(text, stack) if sublayer is Sublayer.ATTENTION else None
            for layer, each in zip(layers, weights, strict=True):
                for head, pattern in enumerate(each[0]):
                    here = expected.setdefault((stack, sublayer, layer, head), {})
                    for name, values in measures_of(pattern.double(), ids).items():
                        here.setdefault(name, []).extend(values)
    worst = 0.0
    for address in result.addresses:
        here = expected[address.stack, address.sublayer, address.head.layer, address.head.head]
        crosses = address.sublayer is Sublayer.CROSS
        for name in ("entropy",) if crosses else MEASURES:
            if here.get(name) and name in result.names:
                mean = sum(here[name]) / len(here[name])
                worst = max(worst, abs(result.of(address)[name] - mean))
    return {"statistics": worst}


def weights_of(output: Any, stack: str, sublayer: Sublayer) -> Any:
    if sublayer is Sublayer.CROSS:
        return getattr(output, "cross_attentions", None) or ()
    for name in (f"{stack}_attentions", "attentions"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return ()


def ids_of(text: Any, stack: str) -> list[int] | None:
    name = "decoder_input_ids" if stack == "decoder" else "input_ids"
    result = arguments_of(text).get(name)
    return None if result is None else result[0].tolist()


def measures_of(pattern: Tensor, ids: list[int] | None) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    for i, weights in enumerate(pattern):
        values["entropy"].append(float(-torch.special.xlogy(weights, weights).sum()))
        values["first_token"].append(float(weights[0]))
        if 0 < i <= len(weights):
            values["previous_token"].append(float(weights[i - 1]))
        if ids is not None and len(ids) == len(pattern) and ids[i] in ids[:i]:
            after = [j + 1 for j in range(i) if ids[j] == ids[i]]
            values["induction"].append(float(weights[after].sum()))
    return values


def compare_ablation(wrapped: WrappedModel, inputs: ModelInputs) -> dict[str, float]:
    """The second head of the last attention that is not shared, zeroed both ways."""
    stack = wrapped.structure.stacks[wrapped.readout_stack]
    uses = Counter(id(facts.module) for facts, _ in stack.attentions)
    alone = [pair for pair in stack.attentions if uses[id(pair[0].module)] == 1]
    chosen = [pair for pair in alone if pair[0].projection is not None and pair[0].heads > 1]
    if not chosen:
        return {}
    facts, layer = chosen[-1]
    sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
    site = Site(layer, Tap.HEAD_OUTPUT, sublayer, stack.name)
    with torch.no_grad():
        edited = final_of(wrapped, inputs, ActivationEditor({site: _without_second}))
        with hooked(facts):
            expected = final_of(wrapped, inputs, Record(()))
    difference = (edited - expected).abs().max()
    return {"ablation": float(difference / expected.abs().max().clamp(min=1))}


def final_of(wrapped: WrappedModel, inputs: ModelInputs, watch: Watcher) -> Tensor:
    hidden = wrapped.run_inputs(inputs, watch).hidden
    return hidden if isinstance(hidden, Tensor) else hidden.values


def _without_second(values: Tensor) -> Tensor:
    values = values.clone()
    values[:, 1] = 0
    return values


@contextmanager
def hooked(facts: ProbedAttention) -> Iterator[None]:
    def hook(_: nn.Module, args: Any) -> Any:
        split = args[0].unflatten(-1, (facts.heads, -1)).clone()
        split[..., 1, :] = 0
        return (split.flatten(-2), *args[1:])

    assert facts.projection is not None
    handle = facts.projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def examine(kind: str, family: str, name: str) -> Row:
    row = Row(name, kind, family)
    try:
        with time_limit(SECONDS):
            model = build_small(family, name)
    except Exception as error:
        row.status, row.reason = "not built", f"{type(error).__name__}: {first_line(error)}"
        return row
    try:
        with time_limit(SECONDS):
            compare(row, model)
    except ManyheadsError as error:
        row.status, row.reason = "cannot", first_line(error)
        return row
    except Exception as error:
        row.status, row.reason = "fails", f"{type(error).__name__}: {first_line(error)}"
        return row
    far = {name for name, value in row.differences.items() if not value <= CLOSE}
    row.status = "differs" if far else "equal"
    return row


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else ""


def classes(only: list[str]) -> Iterator[tuple[str, str, str]]:
    seen: set[str] = set()
    families: set[str] = set()
    for kind, mapping in KINDS.items():
        for family, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names[:1]:
                known = name in seen or (kind == "base" and family in families)
                if known or (only and not any(each in name for each in only)):
                    continue
                seen.add(name)
                families.add(family)
                yield kind, family, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of class names")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th class, from the i-th")
    parser.add_argument(
        "--write", nargs="*", help="write the page, from the output of parts if any"
    )
    arguments = parser.parse_args()
    if arguments.write:
        lines = [line for file in arguments.write for line in Path(file).read_text().splitlines()]
        known = [Row(**json.loads(line)) for line in lines if line.startswith("{")]
        # A class that was examined again replaces its first row.
        rows = list({row.name: row for row in known}.values())
    else:
        rows = examine_all(arguments.only, *map(int, arguments.part.split("/")))
    print(Counter(row.status for row in rows), file=sys.stderr)
    if arguments.write is not None:
        PAGE.write_text(page(rows))


def examine_all(only: list[str], index: int, count: int) -> list[Row]:
    """One row per class, each printed as JSON."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for number, each in enumerate(classes(only)):
        if number % count == index:
            rows.append(examine(*each))
            print(json.dumps(asdict(rows[-1])), flush=True)
    return rows


INTRODUCTION = """# Wrapped models

Every class of `transformers` that a generic tiny config builds, wrapped by `manyheads.wrap` and
compared with itself: the largest difference of the logits (relative to the largest logit), of
entropy, previous-token, first-token and induction weights from those of the eager weights, and of
the hidden states without one head from those of a hook. An empty cell means that the model returns
no eager weights, or that the output projection of its heads was not found. Models marked "by
output_attentions" do not dispatch their attention and are read the slower way. Made by
`python bench/bridge_table.py --write` with transformers {version}."""


def page(rows: list[Row]) -> str:
    """The page of the docs."""
    counts = Counter(row.status for row in rows)
    lines = [
        *INTRODUCTION.format(version=transformers.__version__).splitlines(),
        "",
        f"{counts['equal']} classes are equal to {CLOSE:g}, {counts['differs']} differ.",
        "",
        f"| class | layers x heads | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|",
    ]
    compared = [row for row in rows if row.status in ("equal", "differs")]
    lines += [str(row) for row in sorted(compared, key=lambda row: row.name)]
    for status, title in (
        ("cannot", "Cannot be wrapped"),
        ("fails", "Fail"),
        ("not built", "Not built by the generic config"),
    ):
        some = sorted((row for row in rows if row.status == status), key=lambda row: row.name)
        if some:
            lines += ["", f"## {title}", "", "| class | why |", "|---|---|"]
            lines += [f"| {row.name} | {row.reason.replace('|', '/')} |" for row in some]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
