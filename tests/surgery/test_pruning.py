"""A pruned model is the model with those heads ablated, and an ordinary model besides."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from manyheads import lens
from manyheads.cache import StaticCache
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.folder import load, save
from manyheads.decoding.generation import generate
from manyheads.decoding.sampling import Greedy
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, PostNorm, RMSNorm, SandwichNorm, ScaledPreNorm
from manyheads.parts.positions import Alibi, Disentangled, Rotary, T5Buckets
from manyheads.ragged import Ragged
from manyheads.surgery.addresses import find_separable_heads
from manyheads.surgery.pruning import origins, prune, prune_layers, prune_neurons
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from manyheads.train.objectives.objective import WatcherChain
from manyheads.train.optim.optimizers import AdamW
from tests.models import zoo

TOLERANCE = 1e-5
# Queries and keys of all heads are normed together.
TOGETHER = "decoder normed outputs"

# Eight queries over one, two and four heads of keys, and seven over one.
SHARED = {
    f"{heads} over {keys}": zoo.decoder(
        *[
            zoo.layer(
                zoo.own(heads=heads, head_size=8, kv_heads=keys, mask=Causal(), position=Rotary()),
                SwiGLU(width=zoo.WIDTH, hidden=40),
            )
        ]
        * 2
    )
    for heads, keys in ((6, 6), (6, 2), (7, 1), (8, 4))
}
ODD = {
    "post with bias": zoo.encoder(
        *[zoo.layer(zoo.own(bias="all"), norm=PostNorm(LayerNorm()))] * 3, position=zoo.LEARNED
    ),
    "qwen3 gated": zoo.decoder(
        *[
            zoo.layer(
                zoo.own(
                    heads=8,
                    kv_heads=2,
                    head_size=6,
                    mask=Causal(),
                    position=Rotary(),
                    query_norm=RMSNorm(),
                    key_norm=RMSNorm(),
                    gates=(Gate(at="output", per="channel"),),
                ),
                SwiGLU(width=zoo.WIDTH, hidden=40),
            )
        ]
        * 2
    ),
    "both with bias": zoo.decoder(
        *[zoo.layer(zoo.own(bias="all", mask=Causal()), norm=SandwichNorm(LayerNorm()))] * 2
    ),
    "all gates": zoo.decoder(
        *[zoo.writes(position=Rotary(), kv_heads=2, heads=8, head_size=4, gates=zoo.EVERY_GATE)] * 2
    ),
    "control gates": zoo.decoder(
        *[
            zoo.writes(
                kv_heads=2, heads=8, head_size=4, gates=zoo.CONTROL_GATES, output_norm=RMSNorm()
            )
        ]
        * 2
    ),
    "shared final gate": zoo.decoder(
        *[zoo.writes(gates=(Gate(at="final", per="channel", heads="shared"),))] * 2
    ),
    "alibi shared": zoo.decoder(*[zoo.writes(position=Alibi(), heads=8, kv_heads=2)] * 2),
    "buckets shared": zoo.decoder(
        *[
            zoo.writes(
                position=T5Buckets(buckets=8, bidirectional=False),
                heads=8,
                kv_heads=2,
                sink="learned",
                head_scale="learned",
                query_norm=RMSNorm(),
            )
        ]
        * 3
    ),
    "layer scale": zoo.encoder(
        *[zoo.layer(zoo.own(bias="all"), norm=ScaledPreNorm(LayerNorm(), 0.5))] * 2
    ),
    "deberta": zoo.encoder(
        *[zoo.layer(zoo.own(position=Disentangled(buckets=4, reach=9), bias="all"))] * 3
    ),
    "deberta, projections of its own": zoo.encoder(
        *[zoo.layer(zoo.own(position=Disentangled(buckets=4, reach=9, projections="own")))] * 3
    ),
}
MODELS: dict[str, Any] = zoo.MODELS | SHARED | ODD


class Silenced:
    """Puts zeros, or other values, where these heads speak."""

    def __init__(self, heads: Iterable[Address], means: dict[Site, Tensor] | None = None) -> None:
        self.heads: dict[Site, list[int]] = {}
        for address in heads:
            site = Site(address.head.layer, Tap.HEAD_OUTPUT, address.sublayer, address.stack)
            self.heads.setdefault(site, []).append(address.head.head)
        self.means = means or {}

    def wants(self, site: Site) -> bool:
        return site in self.heads

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        values, gone = value.values.clone(), self.heads[site]
        values[:, gone] = self.means[site][gone] if site in self.means else 0.0
        return value.with_values(values)


def every(model: Any) -> list[Address]:
    return [address for block in blocks_of(model) for address in block.addresses]


def some(model: Any, seed: int, share: float = 0.4) -> list[Address]:
    heads = every(model)
    return random.Random(seed).sample(heads, max(1, round(share * len(heads))))


def trembling(config: ModelConfig, seed: int = 0) -> Any:
    """A model in which nothing is zero or one by chance: biases, norms, sinks, scales."""
    model = build(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def said(model: Any, **more: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out = zoo.answer(model, **more)
    hidden = zoo.values(out.hidden)
    return hidden, hidden if out.logits is None else zoo.values(out.logits)


def close(one: Any, other: Any, **watched: Any) -> None:
    for mine, peer in zip(said(one), said(other, **watched), strict=True):
        scale = max(1.0, float(peer.abs().max()))
        torch.testing.assert_close(mine / scale, peer / scale, atol=TOLERANCE, rtol=0)


def test_heads_that_are_normed_together_stay_together() -> None:
    model = trembling(MODELS[TOGETHER])
    with pytest.raises(InputError, match=r"cannot prune 1 of 4 heads.*ablate"):
        prune(model, ["L0H1"])
    heads = [Address(Head(0, head)) for head in range(4)]
    close(prune(model, heads), model, watch=Silenced(heads))


@pytest.mark.parametrize("name", [name for name in MODELS if name != TOGETHER])
def test_pruned_is_ablated(name: str) -> None:
    model = trembling(MODELS[name])
    heads = some(model, len(name), 0.5)
    close(prune(model, heads), model, watch=Silenced(heads))


@pytest.mark.parametrize(
    "name",
    [
        "encoder bert",
        "decoder llama",
        "decoder both norms",
        "seq2seq t5",
        "seq2seq 2017",
        "vision vit",
        "post with bias",
        "both with bias",
    ],
)
def test_a_whole_layer_may_lose_its_heads(name: str) -> None:
    model = trembling(MODELS[name])
    for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS):
        layers = {(each.stack, each.head.layer) for each in every(model)}
        chosen = sorted(layers)[0]
        heads = [
            each
            for each in every(model)
            if (each.stack, each.head.layer) == chosen and each.sublayer is sublayer
        ]
        close(prune(model, heads), model, watch=Silenced(heads))
    close(prune(model, every(model)), model, watch=Silenced(every(model)))


def test_a_final_gate_over_a_bias_needs_a_head() -> None:
    model = trembling(zoo.decoder(*[zoo.writes(bias="all", gates=(Gate(at="final"),))] * 2))
    with pytest.raises(InputError, match="keep one of its heads"):
        prune(model, [f"L0H{head}" for head in range(zoo.HEADS)])


@pytest.mark.parametrize("name", ["encoder bert", "decoder llama", "seq2seq t5", "all gates"])
def test_a_mean_stays_behind(name: str) -> None:
    model = trembling(MODELS[name])
    heads = some(model, 3, 0.5)
    sites = [
        Site(each.layer, Tap.HEAD_OUTPUT, each.sublayer, each.stack) for each in blocks_of(model)
    ]
    full = (4, 1, 7, 3)
    batch = zoo.ids(full, seed=4)
    inputs: Any = (batch, zoo.ids(full, seed=5)) if "seq2seq" in name else batch

    def run(each: Any, **more: Any) -> Tensor:
        with torch.no_grad():
            out = each(*inputs, **more) if "seq2seq" in name else each(inputs, **more)
        return zoo.values(out.hidden)

    record = Record(sites)
    run(model, watch=record)
    means = {site: record[site].values.mean(0) for site in sites}
    pruned = prune(model, heads, "mean", inputs)
    expected = run(model, watch=Silenced(heads, means))
    torch.testing.assert_close(run(pruned), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["encoder bert", "decoder llama", "seq2seq t5", "decoder alibi"])
def test_pruning_nothing_changes_nothing_and_twice_is_the_union(name: str) -> None:
    model = trembling(MODELS[name])
    before = {key: each.clone() for key, each in model.state_dict().items()}
    same = prune(model, [])
    assert same.config == model.config
    for key, each in same.state_dict().items():
        assert torch.equal(each, before[key])
        assert each.data_ptr() != model.state_dict()[key].data_ptr()
    heads = some(model, 5, 0.6)
    half = heads[: len(heads) // 2]
    once = prune(model, half)
    counted = {old: new for new, old in origins(once).items()}
    twice = prune(once, [counted[head] for head in heads if head not in half])
    union = prune(model, heads)
    close(twice, union)
    assert origins(twice) == origins(union)
    assert set(origins(union).values()) == set(every(model)) - set(heads)
    assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())


@pytest.mark.parametrize("name", ["6 over 2", "all gates", "buckets shared", "seq2seq t5"])
def test_saved_and_loaded_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = trembling(MODELS[name])
    pruned = prune(model, some(model, 1, 0.5))
    saved = save(pruned, tmp_path / "pruned")
    again = load(saved.folder)
    assert saved.family == "manyheads"
    assert again.config == pruned.config
    assert origins(again) == origins(pruned)
    for key, each in pruned.state_dict().items():
        assert torch.equal(again.state_dict()[key], each)


def test_a_layer_without_heads_is_saved_too(tmp_path: Path) -> None:
    model = trembling(ODD["post with bias"])
    pruned = prune(model, [f"L1H{head}" for head in range(zoo.HEADS)])
    again = load(save(pruned, tmp_path / "pruned").folder)
    close(again, pruned)
    assert again.config == pruned.config


def llama() -> Any:
    return build(
        LLAMA.read_config(
            {
                "model_type": "llama",
                "hidden_size": 32,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_hidden_layers": 2,
                "intermediate_size": 40,
                "vocab_size": zoo.VOCABULARY,
                "rms_norm_eps": 1e-6,
            }
        ),
        seed=0,
    )


def test_what_is_still_uniform_stays_in_its_family(tmp_path: Path) -> None:
    even = prune(llama(), ["L0H0", "L0H5", "L1H1", "L1H7"])
    # Six heads do not divide the width of 32, which their Llama asks for.
    saved = save(even, tmp_path / "even")
    assert (saved.family, saved.opened_by) == ("mistral", "transformers")
    close(load(tmp_path / "even"), even)
    quarters = prune(llama(), [f"L{layer}H{head}" for layer in (0, 1) for head in range(0, 8, 2)])
    assert save(quarters, tmp_path / "quarters").family == "llama"
    for folder, ours in (("even", even), ("quarters", quarters)):
        peer = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        ids = torch.arange(20)[None]
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, peer(ids).logits, atol=1e-5, rtol=0)
    assert origins(load(tmp_path / "even")) == origins(even)
    odd = prune(llama(), ["L0H0", "L1H1", "L1H7"])
    assert save(odd, tmp_path / "odd").family == "manyheads"


def test_token_ids_of_a_family_outlive_it(tmp_path: Path) -> None:
    model = llama()
    model.source_config = {"model_type": "llama", "eos_token_id": 7, "hidden_size": 32}
    model.source_config |= {"num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 29}
    model.source_config |= {"intermediate_size": 40, "rms_norm_eps": 1e-6}
    again = load(save(prune(model, ["L0H0"]), tmp_path / "odd").folder)
    assert again.source_config["eos_token_id"] == 7
    odder = load(save(prune(again, ["L0H0"]), tmp_path / "odder").folder)
    assert odder.source_config["eos_token_id"] == 7
    shorter = save(prune_layers(model, [1]), tmp_path / "shorter")
    assert shorter.family == "llama"
    assert load(shorter.folder).source_config["eos_token_id"] == 7


@pytest.mark.parametrize("name", ["8 over 4", "7 over 1", "alibi shared", "buckets shared"])
def test_writing_with_a_cache_is_writing_without(name: str) -> None:
    model = trembling(MODELS[name])
    pruned = prune(model, ["L0H0", "L0H2", "L1H3", "L1H4", "L1H6"])
    batch = zoo.ids((6, 3), seed=2)
    with torch.no_grad():
        whole = pruned(batch).logits
        cache = pruned.new_cache()
        first = pruned(zoo.ids((6, 3), seed=2).map(lambda ids: ids), cache=cache).logits
        torch.testing.assert_close(first.values, whole.values)
        # Word after word, from the start.
        cache = pruned.new_cache(StaticCache(size=8))
        row = batch.of(0)
        steps = [pruned(row[None, place : place + 1], cache=cache).logits[0] for place in range(6)]
    torch.testing.assert_close(torch.cat(steps), whole.of(0), atol=1e-5, rtol=1e-4)
    assert cache.stores[1].k.shape[2] == pruned.config.stack.attention(1).key_heads
    written = generate(pruned, [[1, 2, 3], [4]], max_new_tokens=5, sampling=Greedy())
    alone = [
        generate(pruned, [ids], max_new_tokens=5, sampling=Greedy())[0] for ids in ([1, 2, 3], [4])
    ]
    assert [each.ids for each in written] == [each.ids for each in alone]


def test_uneven_groups_are_shared_by_every_kernel() -> None:
    model = prune(trembling(SHARED["8 over 4"]), ["L0H1", "L1H2", "L1H3", "L1H4"])
    assert model.config.stack.attention(0).kv_heads == (1, 2, 2, 2)
    assert model.config.stack.attention(1).kv_heads == (2, 1, 2)
    grads = []
    for kernel in ("reference", "fused"):
        config = with_kernel(model.config, kernel)
        one = build(config, seed=0)
        one.load_state_dict(model.state_dict())
        logits = one(zoo.ids()).logits.values
        logits.square().mean().backward()
        grads.append({name: each.grad for name, each in one.named_parameters()} | {"out": logits})
    for name, mine in grads[0].items():
        torch.testing.assert_close(mine, grads[1][name], atol=1e-5, rtol=1e-4)


def with_kernel(config: Any, kernel: str) -> Any:
    layers = tuple(
        replace(
            each,
            attention=replace(each.attention, inner=replace(each.attention.inner, kernel=kernel)),
        )
        for each in config.stack.layers
    )
    return replace(config, stack=replace(config.stack, layers=layers))


@pytest.mark.parametrize("name", ["8 over 4", "all gates", "post with bias", "seq2seq t5"])
def test_pruned_models_learn(name: str) -> None:
    model = prune(trembling(MODELS[name]), ["L0H0", "L1H1"]).train()
    optimizer = AdamW(lr=1e-3).build(model)
    losses = []
    for _ in range(3):
        loss = zoo.values(zoo.answer(model).logits).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["8 over 4", "all gates", "buckets shared", "both with bias"])
def test_the_lens_goes_through(name: str) -> None:
    model = trembling(MODELS[name])
    heads = ["L0H0", "L0H2", *(["L1H0", "L1H1"] if name == "8 over 4" else [])]
    if name == "both with bias":
        heads = [f"L0H{head}" for head in range(zoo.HEADS)]
    pruned = prune(model, heads)
    texts = [[1, 2, 3, 1, 2, 5], [7, 8, 9, 7]]
    count = len(every(pruned))
    silent = Silenced(find_separable_heads(model, heads))
    seen = Record([Site(1, Tap.PATTERN)])
    whole = Ragged.from_list([torch.tensor(each) for each in texts])
    with torch.no_grad():
        model(whole, watch=WatcherChain([silent, seen]))
    kept = [old.head.head for old in origins(pruned).values() if old.head.layer == 1]
    shown = lens.patterns(pruned, texts)
    first = shown.of(Head(1, 0), 0)
    torch.testing.assert_close(
        torch.as_tensor(first.weights), seen[Site(1, Tap.PATTERN)].of(0)[kept[0]], atol=1e-5, rtol=0
    )
    result = lens.statistics(pruned, texts)
    assert len(result.addresses) == count
    assert all(value == value for value in result["entropy"].means.tolist())
    assert len(lens.ablate(pruned, texts, progress=False).addresses) == count
    assert len(lens.importance(pruned, texts, progress=False).addresses) == count
    assert lens.attribute_logits(pruned, texts).completeness < 1e-4
    circuits = lens.circuits(pruned)
    for new, old in origins(pruned).items():
        for kind in ("ov", "qk"):
            mine = getattr(circuits, kind)(new.head).matrix
            peer = getattr(lens.circuits(model), kind)(old.head).matrix
            torch.testing.assert_close(mine, peer)
    lens.logit_lens(pruned, texts)
    lens.composition_scores(pruned, "value")
    lens.patch(pruned, texts, [[2, 2, 3, 1, 2, 5], [7, 8, 8, 7]], progress=False)


def test_neurons_go_for_good() -> None:
    for name in ("decoder llama", "decoder gpt2", "seq2seq t5", "vision vit"):
        model = trembling(MODELS[name])
        gone = {0: [0, 3, 7], 1: list(range(20))}
        pruned = prune_neurons(model, gone)
        stack = "decoder" if "seq2seq" in name else "main"
        changes = {
            Site(layer, Tap.INSIDE, Sublayer.FEEDFORWARD, stack): without(neurons)
            for layer, neurons in gone.items()
        }
        close(pruned, model, watch=ActivationEditor(changes))
        assert origins(pruned) == {head: head for head in every(model)}


def without(neurons: list[int]) -> Any:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[:, neurons] = 0.0
        return values

    return change


def test_layers_go_for_good() -> None:
    for name in ("encoder modernbert", "buckets shared", "alibi shared"):
        model = trembling(MODELS[name])
        pruned = prune_layers(model, [0])
        assert len(pruned.config.stack.layers) == len(model.config.stack.layers) - 1
        record = Record([Site(-1, Tap.EMBEDDINGS)])
        with torch.no_grad():
            model(zoo.ids(), watch=record)
            expected, _ = model.stack.resume(record[Site(-1, Tap.EMBEDDINGS)], 1)
            hidden = pruned(zoo.ids()).hidden
        torch.testing.assert_close(hidden.values, expected.values)
        assert origins(pruned)[Address(Head(0, 1))] == Address(Head(1, 1))


@pytest.mark.parametrize(
    ("name", "heads", "match"),
    [
        ("decoder gpt2", ["L0H4"], "no head L0H4: use L0H0 to L0H3"),
        ("decoder gpt2", ["L2H0"], "no head L2H0: use L0H0 to L1H3"),
        ("decoder gpt2", ["five"], "write L5H1"),
        ("decoder gpt2", ["L0H0 cross"], "no head L0H0 cross: use L0H0 to L1H3"),
        ("decoder gpt2", ["encoder L0H0"], "no head encoder L0H0: use L0H0 to L1H3"),
        ("seq2seq t5", ["decoder L0H7 cross"], "use decoder L0H0 cross to decoder L0H3 cross"),
    ],
)
def test_heads_that_do_not_exist(name: str, heads: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        prune(zoo.small(MODELS[name]), heads)


def test_other_bad_wishes() -> None:
    model = zoo.small(MODELS["decoder gpt2"])
    with pytest.raises(InputError, match="give texts="):
        prune(model, ["L0H0"], "mean")
    with pytest.raises(InputError, match="no neuron 40: use 0 to 39"):
        prune_neurons(model, {0: [40]})
    with pytest.raises(InputError, match="no layer 5: use 0 to 1"):
        prune_neurons(model, {5: [0]})
    with pytest.raises(InputError, match="keep at least one"):
        prune_neurons(model, {0: list(range(40))})
    with pytest.raises(InputError, match="layer 0 has no neurons"):
        prune_neurons(zoo.small(MODELS["decoder experts"]), {0: [1]})
    with pytest.raises(InputError, match="keep at least one"):
        prune_layers(model, [0, 1])
    with pytest.raises(InputError, match="no layer 2"):
        prune_layers(model, [2])
    changed = build(MODELS["decoder gpt2"], seed=0)
    changed.add_module("extra", torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="merge or delete"):
        prune(changed, ["L0H0"])


def test_one_head_needs_no_list() -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    for head in ("L0H1", Head(0, 1)):
        assert prune(model, head).config == prune(model, ["L0H1"]).config
    with pytest.raises(InputError, match="3 is not the address of a head: write L5H1"):
        prune(model, iter([3]))  # type: ignore[arg-type]
