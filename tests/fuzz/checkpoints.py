"""Mutated folders of models: `transformers` must get the same numbers from what we accept."""

import atexit
import copy
import inspect
import json
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from manyheads import Ragged, apply_chat, load, save
from manyheads.errors import NonFiniteWarning
from manyheads.models.build import build
from manyheads.models.encoder import Encoder
from manyheads.models.readout import NoReadout
from manyheads.models.recipes import RECIPES
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from tests.checkpoints.peer_models import randomized

VOCABULARY = 61
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
IDS = [torch.tensor([3, 14, 15, 9, 26, 5, 35]), torch.tensor([8, 9, 7])]
TARGETS = [torch.tensor([0, 4, 6, 2]), torch.tensor([0, 38, 3])]
IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).sin().view(2, 3, 8, 8)
TEXTS = ("the head looks back", "  A b\n\tc", "Größe 東京 🙂", "")

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **NO_IDS,
}
BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
MIXED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIDES: dict[str, Any] = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 40, "vocab_size": VOCABULARY}
        | NO_IDS,
    ),
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT),
    "classifier": ("BertForSequenceClassification", BERT),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**BERT, **NO_IDS, "cls_token_id": None, "sep_token_id": None, "local_attention": 4},
    ),
    "llama": ("LlamaForCausalLM", LLAMA),
    "scaled": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"use_sliding_window": True, "sliding_window": 3}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", LLAMA | MIXED),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        LLAMA | MIXED | {"layer_types": ["full_attention"] * 2, "mlp_only_layers": [0]},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_heads": 4, "num_layers": 2}
        | {"vocab_size": VOCABULARY, "feed_forward_proj": "gated-gelu"},
    ),
    "marian": (
        "MarianMTModel",
        {"d_model": 32, "vocab_size": VOCABULARY, "decoder_start_token_id": 0, **SIDES}
        | {"max_position_embeddings": 40, "pad_token_id": 60},
    ),
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 24, "image_size": 8, "patch_size": 4},
    ),
}
# Keys that some files have and the ones we mutate may lack.
EXTRA_KEYS = (
    "partial_rotary_factor rope_theta rope_scaling rope_parameters torch_dtype dtype "
    "attention_bias mlp_bias qkv_bias layer_types sliding_window use_sliding_window is_decoder "
    "max_window_layers tie_word_embeddings hidden_act scale_attn_weights n_inner dense_act_fn "
    "is_gated_act feed_forward_proj position_embedding_type num_labels id2label norm_topk_prob "
    "mlp_only_layers headwise_attn_output_gate scale_embedding scale_decoder_outputs "
    "classifier_pooling original_max_position_embeddings type_vocab_size use_qk_norm num_experts "
    "architectures"
)
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 16, 24, 31, 32, 33, 61, 64, 128, 2**31, 10**8, 2**70),
    *(0.0, 0.5, 1.0, -0.25, 1e-12, 1e300, float("nan"), float("inf"), True, False, None),
    *("", "x", "gelu", "gelu_new", "relu", "silu", "float16", "bfloat16", "float64", "int8"),
    *([], {}, [1], ["full_attention"] * 2, ["sliding_attention", "full_attention"]),
    *({"rope_type": "linear", "factor": 2.0}, {"type": "dynamic"}, {"rope_type": "yarn"}),
    *({"0": "a", "1": "b", "2": "c"}, "\ud800", "x" * 5000, [[[]]]),
)


@cache
def _home() -> Path:
    """The folder of the models before any mutation, removed with the process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    home = Path(tempfile.mkdtemp(prefix="fuzz-base-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@cache
def original(name: str) -> Path:
    """A small model with large random weights and a tokenizer, saved by `transformers`."""
    place = _home() / name
    kind, shape = FAMILIES[name]
    opener = getattr(transformers, kind)
    model = opener(opener.config_class(**copy.deepcopy(shape)))
    randomized(model).save_pretrained(place)
    shutil.copy(_tokenizer(), place / "tokenizer.json")
    return place


@cache
def _tokenizer() -> Path:
    """A tokenizer of pieces of words, with 61 tokens at most."""
    from tokenizers import models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "</s>"])
    made.train_from_iterator(["the head looks back at the other head again and again"], trainer)
    made.save(str(_home() / "tokenizer.json"))
    return _home() / "tokenizer.json"


def copied(name: str, folder: Path) -> Path:
    """A copy to mutate; links would change the original."""
    return Path(shutil.copytree(original(name), folder / "model"))


def ours(model: Any) -> list[Tensor]:
    """What our model says of the fixed inputs, one tensor per input."""
    with torch.no_grad():
        if isinstance(model, Vision):
            out = model(IMAGES.to(next(model.parameters()).dtype))
        elif isinstance(model, Seq2Seq):
            out = model(Ragged.from_list(IDS), Ragged.from_list(TARGETS))
        else:
            out = model(Ragged.from_list(IDS))
    result = out.hidden if out.logits is None else out.logits
    return result.to_list() if isinstance(result, Ragged) else list(result)


def peer_model(folder: Path, name: str, model: Any) -> list[Tensor] | None:
    """The same from `transformers`, through the class for the head we found; None if it refuses."""
    _home()
    named = json.loads((folder / CONFIG).read_text()).get("architectures") or [""]
    kind = named[0] if isinstance(named, list) and isinstance(named[0], str) else ""
    if isinstance(model.config.readout, NoReadout):
        kind = "T5EncoderModel" if name == "t5" else "AutoModel"
    opener = getattr(transformers, kind, None) or getattr(transformers, FAMILIES[name][0])
    with torch.no_grad():
        try:
            other = opener.from_pretrained(folder, attn_implementation="eager").eval()
            if isinstance(model, Vision):
                outputs = [other(each[None].to(other.dtype)) for each in IMAGES]
            elif isinstance(model, Seq2Seq):
                pairs = zip(IDS, TARGETS, strict=True)
                outputs = [other(one[None], decoder_input_ids=two[None]) for one, two in pairs]
            else:
                outputs = [other(each[None]) for each in IDS]
        except Exception:
            return None
    bare = isinstance(model.config.readout, NoReadout)
    return [(each.last_hidden_state if bare else each.logits)[0] for each in outputs]


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.shape == right.shape, f"{tuple(left.shape)} and {tuple(right.shape)}"
        exact = left.dtype in (torch.float32, torch.float64)
        left, right = left.float(), right.float()
        scale = right[right.isfinite()].abs().max().item() if right.isfinite().any() else 1.0
        bound = (2e-4 if exact else 0.06) * max(scale, 1.0)
        if torch.isfinite(right).all() or exact:
            torch.testing.assert_close(left, right, atol=bound, rtol=1e-3, equal_nan=True)


def judged(folder: Path, name: str) -> str:
    """Load the folder and compare; what `transformers` refuses must not have changed anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(folder)
    if not all(each.isfinite().all() for each in model.state_dict().values()):
        assert any(issubclass(each.category, NonFiniteWarning) for each in caught)
        return "harmless"
    result, expected = ours(model), peer_model(folder, name, model)
    if expected is not None:
        assert_close(result, expected)
        return "equal"
    # They may refuse a key that means nothing to us, beside another that both follow.
    before, after = (json.loads((each / CONFIG).read_text()) for each in (original(name), folder))
    for key in {*before, *after}:
        restored = {**after, key: before[key]} if key in before else {**after}
        if key not in before:
            restored.pop(key)
        if restored == after:
            continue
        (folder / CONFIG).write_text(json.dumps(restored))
        expected = peer_model(folder, name, model)
        if expected is not None:
            assert_close(result, expected)
            return "harmless"
    assert_close(result, ours(load(original(name))))
    return "harmless"


def mutated(random: Random, value: Any) -> Any:
    """Another value: from the list, or near the old one."""
    if isinstance(value, bool) or random.random() < 0.5:
        return not value if isinstance(value, bool) else random.choice(VALUES)
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, 2 * value, value // 2, float(value), -value])
    if isinstance(value, float):
        return random.choice([value * 2, value / 10, -value, 0.0, 1.0])
    if isinstance(value, str):
        return random.choice([value[:-1], value.upper(), value + "x", [value]])
    if isinstance(value, list) and value:
        return random.choice([value[:-1], [*value, value[0]], value[::-1], value[0]])
    if isinstance(value, dict) and value:
        key = random.choice(sorted(value))
        return {**value, key: mutated(random, value[key])}
    return random.choice(VALUES)


def mutate_json(random: Random, file: Path, extra: tuple[str, ...] = ()) -> None:
    """Change, remove or add a few keys, or damage the text itself."""
    content = json.loads(file.read_text())
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        kind, keys = random.random(), sorted(content)
        if kind < 0.12 and keys:
            content.pop(random.choice(keys))
        elif kind < 0.3 and extra:
            key = random.choice(extra)
            content[key] = mutated(random, content.get(key))
        elif keys:
            key = random.choice(keys)
            content[key] = mutated(random, content[key])
    text = json.dumps(content)
    damage = random.random()
    if damage < 0.03:
        text = text[: random.randrange(len(text))]
    elif damage < 0.05:
        deep = random.choice([100, 5_000, 200_000])
        text = text[:-1] + ', "deep": ' + "[" * deep + "]" * deep + "}"
    file.write_text(text)


def config(random: Random, folder: Path) -> str:
    name = random.choice(sorted(FAMILIES))
    place = copied(name, folder)
    mutate_json(random, place / CONFIG, tuple(EXTRA_KEYS.split()))
    return judged(place, name)


def weight_bytes(random: Random, folder: Path) -> str:
    """Bytes flipped, cut off, added or zeroed, in the header or behind it."""
    name = random.choice(sorted(FAMILIES))
    file = copied(name, folder) / WEIGHTS
    data = bytearray(file.read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    start, stop = random.choice([(0, 8), (8, header), (header, len(data))])
    place = random.randrange(start, stop)
    match random.randrange(5):
        case 0:
            data[place] ^= 1 << random.randrange(8)
        case 1:
            data = data[:place]
        case 2:
            data[place:place] = random.randbytes(random.randrange(1, 9))
        case 3:
            data[place : place + 8] = bytes(8)
        case _:
            data[place : min(place + 4, len(data))] = random.randbytes(4)
    file.write_bytes(data)
    return judged(file.parent, name)


def changed_tensor(random: Random, tensor: Tensor) -> Tensor:
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn)
    match random.randrange(8):
        case 0 | 1:
            return tensor.to(random.choice(dtypes))
        case 2:
            return tensor.mT.contiguous() if tensor.dim() > 1 else tensor[None]
        case 3:
            return tensor[:-1].contiguous() if tensor.dim() else tensor[None]
        case 4:
            return tensor.flatten()
        case 5:
            return torch.cat([tensor, tensor]) if tensor.dim() else tensor
        case 6:
            filled = tensor.clone()
            filled.view(-1)[: random.randrange(1, 4)] = random.choice(
                [float("nan"), float("inf"), 1e4, 0.0]
            )
            return filled
    return tensor[:0].contiguous() if tensor.dim() else tensor


def tensors(random: Random, folder: Path) -> str:
    """Tensors missing, added, renamed, of another shape or dtype, or with NaN."""
    name = random.choice(sorted(FAMILIES))
    place = copied(name, folder)
    content = load_file(place / WEIGHTS)
    for _ in range(random.choice([1, 1, 2])):
        key = random.choice(sorted(content))
        match random.randrange(6):
            case 0:
                content.pop(key)
            case 1:
                content[random.choice(["x", key + ".bias", f"model.{key}", ""])] = torch.ones(3)
            case 2:
                content[key.replace("weight", "gamma")] = content.pop(key)
            case _:
                content[key] = changed_tensor(random, content[key])
    if random.random() < 0.15:
        content = {key: each.half() for key, each in content.items()}
    save_file(content, place / WEIGHTS, {"format": "pt"})
    if random.random() < 0.5:
        described = json.loads((place / CONFIG).read_text())
        described["dtype"] = random.choice([None, "float32", "float16", "bfloat16", "float64"])
        (place / CONFIG).write_text(json.dumps(described))
    return judged(place, name)


def index(random: Random, folder: Path) -> str:
    """Weights in several files, and an index that may name others, outside the folder too."""
    name = random.choice(sorted(FAMILIES))
    place = copied(name, folder)
    content = load_file(place / WEIGHTS)
    (place / WEIGHTS).rename(folder / "outside.safetensors")
    names = [f"model-{number}.safetensors" for number in range(random.randrange(1, 4))]
    where = {key: random.choice(names) for key in content}
    for file in names:
        parts = {key: each for key, each in content.items() if where[key] == file}
        save_file(parts, place / file, {"format": "pt"})
    written: dict[str, Any] = {"metadata": {}, "weight_map": where}
    key, leaves = random.choice(sorted(where)), False
    match random.randrange(9):
        case 0:
            outside = ("../outside.safetensors", str(folder / "outside.safetensors"))
            where[key], leaves = random.choice(outside), True
        case 1:
            (place / names[0]).unlink()
            (place / names[0]).symlink_to(folder / "outside.safetensors")
            leaves = True
        case 2:
            where[key] = random.choice(["", ".", "x", "\0", "x" * 5000, "config.json", "a/../b"])
        case 3:
            where.pop(key)
        case 4:
            written["weight_map"] = mutated(random, where)
        case 5:
            os.truncate(place / names[0], random.randrange(200))
        case 6:
            (place / names[0]).unlink()
            os.mkfifo(place / names[0])
        case 7:
            where["x"] = names[0]
    (place / INDEX).write_text(json.dumps(written))
    outcome = judged(place, name)
    assert not leaves, "a file outside the folder was read"
    return outcome


def tokenizer(random: Random, folder: Path) -> str:
    """A mutated tokenizer.json is refused, or encodes as the tokenizers package does."""
    place = copied("gpt2", folder)
    file = place / "tokenizer.json"
    if random.random() < 0.6:
        content = json.loads(file.read_text())
        inner = random.choice(
            [content, content["model"], content["model"], content["pre_tokenizer"]]
        )
        key = random.choice(sorted(inner))
        if random.random() < 0.2:
            inner.pop(key)
        else:
            inner[key] = mutated(random, inner[key])
        file.write_text(json.dumps(content))
    else:
        data = bytearray(file.read_bytes())
        data[random.randrange(len(data))] = random.randrange(256)
        file.write_bytes(data)
    model = load(place)
    other = Tokenizer.from_file(str(file))
    other.no_padding()
    other.no_truncation()
    for text in TEXTS:
        try:
            expected = other.encode(text).ids
        except Exception:
            # The package itself fails on this text.
            return "refused"
        assert model.tokenizer.encode(text).ids == expected
    save(model, folder / "again")
    assert load(folder / "again").tokenizer.to_str() == model.tokenizer.to_str()
    return "equal"


def side_files(random: Random, folder: Path) -> str:
    """Files beside the weights: damaged, links, pipes, folders; the model stays the same."""
    name = random.choice(sorted(FAMILIES))
    place = copied(name, folder)
    names = ("generation_config.json", "tokenizer_config.json", "preprocessor_config.json")
    more = ("special_tokens_map.json", "chat_template.jinja", "vocab.json", "modules.json", CONFIG)
    file = place / random.choice((*names, *names, *more))
    file.unlink(missing_ok=True)
    leaves = False
    match random.randrange(7):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            (folder / "secret").write_text("{}")
            file.symlink_to(folder / "secret")
            leaves = True
        case 3:
            file.symlink_to(file.name)
        case 4:
            file.write_bytes(random.randbytes(20))
        case _:
            file.write_text(json.dumps(mutated(random, random.choice(VALUES))))
            if file.suffix == ".json":
                made = {key: random.choice(VALUES) for key in random.sample(EXTRA_KEYS.split(), 3)}
                keys = ("pad_token_id", "eos_token_id", "chat_template", "size", "eos_token")
                made |= {key: random.choice(VALUES) for key in keys}
                file.write_text(json.dumps(made))
    model = load(place)
    assert not leaves, "a file outside the folder was read"
    result = ours(model)
    assert_close(result, ours(load(original(name))))
    save(model, folder / "again")
    assert_close(ours(load(folder / "again")), result)
    return "harmless"


def saved(random: Random, folder: Path) -> str:
    """What we say of a saved folder is true: `transformers` opens it, or only we do."""
    model = randomized(build(random_config(random)))
    message = save(model, folder / "model")
    again = load(folder / "model")
    assert again.config == model.config
    assert_close(ours(again), ours(model))
    if message.opened_by != "transformers":
        uneven = "per_layer_config" in json.loads((folder / "model" / CONFIG).read_text())
        assert uneven or message.family in ("manyheads", "qwen3")
        return "equal"
    name = "t5" if isinstance(model, Encoder) and message.family == "t5" else "llama"
    expected = peer_model(folder / "model", name, model)
    assert expected is not None, f"transformers cannot open what was saved as {message.family}"
    assert_close(ours(model), expected)
    return "equal"


def random_config(random: Random) -> Any:
    """A small model of any recipe, with a part or two exchanged."""
    from dataclasses import replace

    from manyheads.parts import feedforward, masks, norms
    from manyheads.parts.positions import rotary

    recipe = random.choice(["llama", "llama", *RECIPES])
    shape: dict[str, Any] = {"width": 32, "heads": 4, "layers": 2, "hidden": 24}
    shape |= {"image": 8, "patch": 4, "vocabulary": VOCABULARY}
    shape |= {"kv_heads": random.choice([1, 2, 4]), "head_size": random.choice([8, 8, 6, 16])}
    accepted = inspect.signature(RECIPES[recipe]).parameters
    options = {
        "tied": random.choice([True, False]),
        "norm_heads": random.choice([True, False]),
        "experts": random.choice([0, 0, 4]),
        "top_k": 2,
    }
    chosen = {
        key: each for key, each in options.items() if key in accepted and random.random() < 0.6
    }
    if not chosen.get("experts"):
        chosen = {key: each for key, each in chosen.items() if key not in ("experts", "top_k")}
    config = RECIPES[recipe](
        **{key: each for key, each in (shape | chosen).items() if key in accepted}
    )
    if not hasattr(config, "stack") or random.random() < 0.3:
        return config
    changes: dict[str, Any] = random.choice(
        [
            {"bias": random.choice(["none", "inputs", "output", "all"])},
            {"mask": masks.Window(random.randrange(4))},
            {"position": rotary.Rotary(fraction=0.5)},
            {"position": rotary.Rotary(scaling=rotary.LinearScaling(factor=2.0))},
            {"query_norm": norms.RMSNorm(eps=1e-6), "key_norm": norms.RMSNorm(eps=1e-6)},
            {"scale": 0.5},
            {"sink": "learned"},
        ]
    )
    changed = random.choice([(0,), (1,), (0, 1), (0, 1)])
    layers = list(config.stack.layers)
    for index in changed:
        layer = layers[index]
        inner = replace(layer.attention.inner, **changes)
        layers[index] = replace(layer, attention=replace(layer.attention, inner=inner))
        if random.random() < 0.2:
            dense = feedforward.SwiGLU(width=32, hidden=16)
            layers[index] = replace(
                layers[index], feedforward=replace(layer.feedforward, inner=dense)
            )
    return replace(config, stack=replace(config.stack, layers=tuple(layers)))


PIECES = (
    "{{ messages[0].content }}",
    "{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}\n{% endfor %}",
    "{{ bos_token }}",
    "{% if add_generation_prompt %}>{% endif %}",
    "{{ messages | tojson }}",
    "{{ messages | length // 0 }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ messages[99].content }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ range(10 ** 9) | list }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% set x = namespace(y='a') %}{% for i in range(50) %}{% set x.y = x.y ~ x.y %}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{% generation %}{{ 1 }}{% endgeneration %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ (1, 2) | string }}{{ '%s' % 3 }}{{ 7 | round(1) }}",
)


def chat_template(random: Random, folder: Path) -> str:
    """A template is refused, or rendered as `transformers` renders it."""
    del folder
    template = "".join(random.choice(PIECES) for _ in range(random.randrange(1, 4)))
    if random.random() < 0.2:
        cut = random.randrange(len(template))
        template = template[:cut] + random.choice(["", "{{", "%}", "\0"]) + template[cut + 1 :]
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<é>"}]
    result = apply_chat(messages, {"chat_template": template, "bos_token": "<s>"})
    from transformers.utils.chat_template_utils import render_jinja_template

    other, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert result == other[0]
    return "equal"


ATTACKS: list[Callable[[Random, Path], str]] = [
    config,
    weight_bytes,
    tensors,
    index,
    tokenizer,
    side_files,
    saved,
    chat_template,
]
SLOW = [chat_template]
