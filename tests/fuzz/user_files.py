"""Mutated files of users: results of the lens, indexes, adapters, run files, filtered corpora.

Whatever is accepted must do what the intact file does: an index gives the same hits, a filter that
continues writes the same rows.
"""

import atexit
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import torch

from manyheads import Ragged, build, lens, load, with_classes
from manyheads.surgery import LoraConfig, adapt, load_adapter, save_adapter
from manyheads.tasks import Document, Index, filter_corpus
from manyheads.tasks.filtering import corpus_filter
from manyheads.train.run_file.run_config import read_run
from tests.encoding.tiny import small
from tests.fuzz import arguments, training
from tests.fuzz.checkpoints import VALUES, mutated

DEEP = (100, 900, 5_000, 200_000)
# Calls of the lens whose results are saved; the others have none or take long.
RESULTS = (
    *("ablate", "attribute_logits", "collapse", "compare", "dead_heads"),
    *("importance", "logit_lens", "neurons", "overlap", "patch", "patterns", "probe"),
    *("redundancy", "score_circuits", "statistics", "weight_similarity"),
)
# Each takes time that grows with a power of the length, or doubles with every character.
PATTERNS = (
    *(r"(.*)*x", r"(a|a)*b", r"(\w+\.?)+!", ".*" * 20 + "x", "(" * 200, "[", r".*q_proj", "^model"),
    *(r"layers\.(0|1)\.self_attn\.q_proj", "(?P<n>a)(?P=n)", "\\", "q_proj", "(" + "w|" * 5000),
)


@cache
def home() -> Path:
    """The folder of the intact files, removed with the process."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys or indices."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutated_json(random: Random, content: Any) -> str:
    """The text of a value with some others in it, at any depth, or with damage to the text."""
    content = deepcopy(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        table, key = random.choice(list(places(content)) or [(content, None)])
        match random.randrange(8):
            case 0 if key is not None:
                del table[key]
            case 1 if isinstance(table, dict):
                table[random.choice(("", "x", "kind", "0", "\0"))] = random.choice(VALUES)
            case 2 if isinstance(table, list):
                table.append(random.choice([*VALUES, *table[:1]]))
            case _ if key is not None:
                table[key] = mutated(random, table[key])
    text = json.dumps(content)
    match random.randrange(20):
        case 0:
            return text[: random.randrange(len(text))]
        case 1:
            deep = random.choice(DEEP)
            return '{"deep": ' + "[" * deep + "]" * deep + "," + text[1:]
        case 2:
            table, key = random.choice(list(places(content)) or [({"x": 0}, "x")])
            deep, table[key] = random.choice(DEEP), "@"
            return json.dumps(content).replace('"@"', '{"a":' * deep + "1" + "}" * deep)
        case 3:
            return random.choice(
                ("", "null", "[]", "5", '"x"', "[{}]", "NaN", "1" * 9000, "\ufeff{}")
            )
    return text


def damage(random: Random, file: Path) -> None:
    """Damage to bytes, or something else in place of the file."""
    kind = random.choice(("bytes", "bytes", "bytes", "loop", "folder", "nowhere", "empty"))
    if kind == "bytes":
        return training.damage(random, file)
    file.unlink()
    if kind == "loop":
        file.symlink_to(file.name)
    elif kind == "nowhere":
        file.symlink_to("nowhere")
    elif kind == "folder":
        file.mkdir()
    else:
        file.touch()
    return None


@cache
def result_of(name: str) -> Any:
    function, options = arguments._lens()[name]
    torch.manual_seed(0)
    return function(**options)


def lens_results(random: Random, folder: Path) -> str:
    """A result that is accepted can be printed and saved again."""
    suffix = random.choice(("json", "json", "json", "safetensors"))
    file = folder / f"result.{suffix}"
    result_of(random.choice(RESULTS)).save(file)
    if random.random() < 0.25:
        damage(random, file)
    elif suffix == "json":
        file.write_text(mutated_json(random, json.loads(file.read_text())))
    else:
        data = file.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        about = mutated_json(random, json.loads(header["__metadata__"]["manyheads"]))
        header["__metadata__"]["manyheads"] = about
        if random.random() < 0.3:
            header.pop(random.choice(sorted(header)))
        written = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(written)) + written + data[end:])
    result = lens.load(file)
    assert str(result) is not None
    result.save(folder / "again.json")
    assert type(lens.load(folder / "again.json")) is type(result)
    return "harmless"


@cache
def reader() -> Any:
    return small()


DOCUMENTS = [
    Document(f"d{number}", f"the {word} of day {number} ", "a day", {"number": number})
    for number, word in enumerate(("river", "house", "tree", "cloud", "river", "stone") * 2)
]
KINDS: dict[str, dict[str, Any]] = {
    "bm25": {"kind": "bm25"},
    "dense": {"kind": "dense", "vectors": "float16"},
    "hybrid": {"kind": "hybrid"},
}


@cache
def index_of(name: str) -> tuple[Path, Any]:
    """An index in a folder, and what it finds."""
    path = home() / f"index-{name}"
    options = {"chunk_tokens": 24, "overlap": 4, "progress": False, **KINDS[name]}
    Index.create(path, None if name == "bm25" else reader(), DOCUMENTS[:8], **options)
    index = Index.open(path, reader())
    # A second version, with something that is deleted in it.
    index.add(DOCUMENTS[8:], progress=False)
    index.delete("d3")
    return path, hits(index)


def hits(index: Index) -> Any:
    # The second search reads from memory.
    lists = [index.search(query, top_k=4) for query in ("river of day", "cloud", "river of day")]
    lists.append(index.like("d1", top_k=3, where={"number": [1, 2, 5, 6]}))
    return [[(hit.id, round(hit.score, 3), hit.text) for hit in ranking] for ranking in lists]


def indexes(random: Random, folder: Path) -> str:
    """A mutated manifest is refused, or the index is searched and changed as the intact one."""
    name = random.choice(sorted(KINDS))
    path, expected = index_of(name)
    copy = Path(shutil.copytree(path, folder / "index"))
    manifest, whole = copy / "manifest.json", True
    if random.random() < 0.7:
        manifest.write_text(mutated_json(random, json.loads(manifest.read_text())))
    else:
        files = sorted(file for file in copy.rglob("*") if file.is_file() and file.name != "lock")
        file = random.choice([manifest, *files])
        whole = file == manifest
        damage(random, file)
    index = Index.open(copy, reader())
    result = hits(index)
    # A flipped bit of a vector or a letter is not noticed, and changes the scores.
    assert result == expected or not whole, "the index finds something else"
    before = set(index.ids)
    index.add([Document("new", "a new river")], progress=False)
    assert set(index.ids) == before | {"new"}
    assert index.search("new river")
    assert len(index) == len(index.ids)
    return "equal" if whole else "harmless"


@cache
def adapter() -> tuple[Any, Path, torch.Tensor]:
    """A model, a saved adapter of it with patterns, and the logits of both together."""
    model = build(
        "llama-1b-shape", layers=2, width=16, heads=2, kv_heads=1, hidden=24, vocabulary=40, seed=0
    )
    adapted = deepcopy(model.eval())
    adapt(adapted, LoraConfig(rank=2, targets=("query", "output", "contract")))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.arange(parameter.numel()).sin().view_as(parameter))
    place = save_adapter(adapted, home() / "adapter")
    file = place / "adapter_config.json"
    described = json.loads(file.read_text())
    described["alpha_pattern"] = {"q_proj": 3.0, r"^model\.layers\.1\.mlp\.down_proj": 5}
    file.write_text(json.dumps(described))
    return model, place, logits_with(model, place)


def logits_with(model: Any, folder: Path) -> torch.Tensor:
    adapted = deepcopy(model)
    load_adapter(adapted, folder)
    with torch.no_grad():
        result: torch.Tensor = adapted(Ragged.from_list([torch.tensor([3, 14, 15])])).logits.values
    save_adapter(adapted, folder / "again")
    return result


# What decides the logits, besides the weights.
DECIDES = ("lora_alpha", "alpha_pattern", "use_rslora")


def adapters(random: Random, folder: Path) -> str:
    """A mutated adapter is refused, or gives finite logits; the same if nothing of it matters."""
    model, place, expected = adapter()
    copy = Path(shutil.copytree(place, folder / "adapter"))
    file = copy / random.choice(("adapter_config.json",) * 3 + ("adapter_model.safetensors",))
    described = json.loads((copy / "adapter_config.json").read_text())
    chance = random.random()
    if chance < 0.25 and file.suffix == ".json":
        key = random.choice(("alpha_pattern", "alpha_pattern", "rank_pattern", "target_modules"))
        pattern = random.choice(PATTERNS)
        value: Any = random.choice((2.0, "2", None, float("inf"), True, [], 10**400))
        described[key] = pattern if key == "target_modules" else {pattern: value}
        file.write_text(json.dumps(described))
    elif chance < 0.7 and file.suffix == ".json":
        file.write_text(mutated_json(random, described))
    else:
        damage(random, file)
    result = logits_with(model, copy)
    assert result.shape == expected.shape
    after = json.loads((copy / "adapter_config.json").read_bytes())
    same = all(after.get(key) == described.get(key) for key in DECIDES)
    if file.suffix == ".json" and same and chance >= 0.25:
        torch.testing.assert_close(result, expected)
        return "equal"
    return "harmless"


def run_files(random: Random, folder: Path) -> str:
    """Run files that are links, folders, huge, deeply nested, or have odd bytes."""
    file = folder / "run.toml"
    file.write_text(training.RUN_FILE)
    deep, section = random.choice(DEEP), random.choice(("run", "model", "data", "objective"))
    match random.randrange(9):
        case 0:
            damage(random, file)
        case 1:
            os.truncate(file, random.choice((2**25, 2**33)))
        case 2:
            file.write_text(training.RUN_FILE + "deep = " + "[" * deep + "]" * deep)
        case 3:
            file.write_text(training.RUN_FILE + "[a" + ".a" * deep + "]\nx = 1\n")
        case 4:
            digits = random.choice(("9" * 5_000, "1e999", "-inf", "0x" + "f" * 5_000, "9" * 30))
            file.write_text(training.RUN_FILE + f"seed = {digits}\n")
        case 5:
            data = bytearray(file.read_bytes())
            data[random.randrange(len(data))] = random.randrange(256)
            file.write_bytes(data)
        case 6:
            value = "{a = " * deep + "1" + "}" * deep
            file.write_text(training.RUN_FILE.replace(f"[{section}]", f"[{section}]\nx = {value}"))
        case _:
            lines = training.RUN_FILE.splitlines()
            number = random.randrange(len(lines))
            name, equals, _ = lines[number].partition(" = ")
            value = random.choice((*training.VALUES, "1979-05-27", "'''", '"\\u0000"', "[[[[1]]]]"))
            lines[number] = f"{name} = {value}" if equals else f"[{name.strip('[]')}x]"
            file.write_text("\n".join(lines))
    run = read_run(file)
    assert run.phases.step_count >= 0
    shutil.copytree(plain_model(), folder / "model")
    (folder / "model/run.toml").write_bytes(file.read_bytes())
    load(folder / "model")
    return "harmless"


@cache
def plain_model() -> Path:
    from manyheads import save

    save(build("gpt2", layers=1, width=8, heads=2, vocabulary=30, seed=0), home() / "plain")
    return home() / "plain"


WORDS = ("the", "cat", "sat", "on", "a", "mat", "by", "sun")
RULE = "score >= 0.2 and number != 3"


@cache
def filtered() -> tuple[Any, Path, int]:
    """A classifier, a folder with a corpus, and how many states of a run were photographed."""
    model, place = with_classes(small(), ("bad", "good")), home() / "filter"
    place.mkdir()
    rows = ({"number": n, "text": " ".join(WORDS[: 1 + n % 8])} for n in range(60))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "corpus.jsonl").write_text(lines)
    moments = 0
    save = corpus_filter._Writer._save

    def photograph(writer: Any) -> None:
        nonlocal moments
        save(writer)
        shutil.copytree(writer.folder, place / f"moment-{moments}")
        moments += 1

    with patch.object(corpus_filter._Writer, "_save", photograph):
        filter_into(place / "whole")
    return model, place, moments


def filter_into(out: Path) -> Any:
    model = with_classes(small(), ("bad", "good"))
    options: dict[str, Any] = {"block_rows": 8, "shard_rows": 14, "progress": False}
    with chdir(home() / "filter"):
        return filter_corpus("corpus.jsonl", model, out, keep=RULE, **options)


def filter_states(random: Random, folder: Path) -> str:
    """A run whose state or rows are damaged is refused, or ends with the same rows and counts."""
    _, place, moments = filtered()
    moment = place / f"moment-{random.randrange(moments)}"
    out = Path(shutil.copytree(moment, folder / "out"))
    state = out / "_filter.json"
    files = [file for file in sorted(out.rglob("*")) if file.is_file() and file.name != ".lock"]
    chance = random.random()
    if chance < 0.5:
        content = json.loads(state.read_text())
        if chance < 0.2:
            content.pop("crc32", None)
        part = random.choice(("state", "state", "settings", "whole"))
        if part == "whole":
            state.write_text(mutated_json(random, content))
        else:
            text = mutated_json(random, content[part])
            content[part] = "@"
            state.write_text(json.dumps(content).replace('"@"', text))
    else:
        for file in random.sample(files, min(len(files), random.choice((1, 1, 2)))):
            damage(random, file)
    result, expected = filter_into(out), filter_into(place / "whole")
    rows = [pq.read_table([*run.shards]).to_pylist() for run in (result, expected)]
    assert rows[0] == rows[1], "the rows differ"
    assert result.counts == expected.counts, "the counts differ"
    return "equal"


ATTACKS: list[Callable[[Random, Path], str]] = [
    lens_results,
    indexes,
    adapters,
    run_files,
    filter_states,
]
SLOW: list[Callable[[Random, Path], str]] = []
