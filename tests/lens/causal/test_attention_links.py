"""Cut links: the same as a run with a masked pattern, on every kind of attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from manyheads import lens, load
from manyheads.checkpoints import pip_models
from manyheads.errors import InputError
from manyheads.kernels import reference
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.attention_links import Link, cut
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.results.addresses import Address
from manyheads.mixers import LinearAttention
from manyheads.models.layer import Branch, LayerConfig
from manyheads.parts.norms import RMSNorm
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Site, Sublayer, Tap
from tests.lens.measure.test_statistics import MORE, fresh
from tests.lens.planted import Look, offset_look, text_model
from tests.messages import refuses
from tests.models.zoo import DECODERS, SEQ2SEQS, WIDTH, decoder, ids, small, writes

TEXTS = ids((5, 8, 3))
METRIC = LogitDifference(answer=(1, 2, 3), distractor=(4, 5, 6))


class Masked:
    """A watcher that removes weights from whole patterns; links are (head, text, query, key)."""

    def __init__(self, links: dict[Site, list[tuple[int, ...]]], renormalize: bool) -> None:
        self.links, self.renormalize = links, renormalize

    def wants(self, site: Site) -> bool:
        return site in self.links

    def see(self, site: Site, value: Any) -> Patterns:
        scores = [each.clone() for each in value.each]
        for head, text, query, key in self.links[site]:
            masked = -torch.inf if self.renormalize else 0.0
            scores[text][head, query, key] = masked
        return Patterns(tuple(scores))


def masked_run(model: Any, batch: Any, links: list[Any], renormalize: bool, **at: Any) -> Any:
    tap = Tap.SCORES if renormalize else Tap.PATTERN
    by_site: dict[Site, list[Any]] = {}
    for layer, *link in links:
        by_site.setdefault(Site(layer, tap, **at), []).append(tuple(link))
    with torch.no_grad():
        return model(*batch, watch=Masked(by_site, renormalize)).logits


def last(logits: Ragged) -> torch.Tensor:
    return torch.stack([rows[-1] for rows in logits.to_list()])


MORE_DECODERS = {
    "uneven groups": decoder(*[writes(position=Rotary(), kv_heads=(3, 1))] * 2),
    "normed head outputs": decoder(*[writes(output_norm=RMSNorm())] * 2),
}
NAMES = ["gpt2", "llama", "gates", "sinks", "capped", *MORE_DECODERS]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_is_a_masked_pattern(
    name: str, renormalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small((DECODERS | MORE_DECODERS)[name])
    wide = [("L0H0", 2, 1), ("L0H1", "last", 0), ("L1H0", "last", "last"), ("L1H1", 6, 3, 1)]
    # Layer, head, text, query, key.
    plain = [
        *((0, 0, text, 2, 1) for text in range(3)),
        *((0, 1, text, length - 1, 0) for text, length in enumerate((5, 8, 3))),
        *((1, 0, text, length - 1, length - 1) for text, length in enumerate((5, 8, 3))),
        (1, 1, 1, 6, 3),
    ]
    with torch.no_grad():
        before = last(model(TEXTS).logits)
    expected = last(masked_run(model, (TEXTS,), plain, renormalize))
    monkeypatch.setattr(reference, "patterns", None)
    result = cut(
        model, TEXTS, wide, renormalize=renormalize, metric=METRIC, logits=True, progress=False
    )
    torch.testing.assert_close(result.before, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.after, expected, atol=1e-4, rtol=1e-4)
    assert (expected - before).abs().max() > 1e-3
    pairs = [(METRIC.answer[text], METRIC.distractor[text]) for text in range(3)]
    change = expected - before
    changes = torch.stack([row[a] - row[b] for row, (a, b) in zip(change, pairs, strict=True)])
    torch.testing.assert_close(result.changes.float(), changes, atol=1e-4, rtol=1e-3)
    assert result.change == pytest.approx(float(changes.mean()), abs=1e-4)
    assert result.value == pytest.approx(result.baseline + result.change)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", ["shaw in a window", "deberta", "sinks in windows"])
def test_biases_and_sinks_are_part_of_the_row(name: str, renormalize: bool) -> None:
    model = fresh(MORE[name])
    metric = lens.StateMetric(lambda states, _: torch.stack([x.sum() for x in states.to_list()]))
    result = cut(
        model, TEXTS, [("L1H1", 2, 1)], renormalize=renormalize, metric=metric, progress=False
    )
    tap = Tap.SCORES if renormalize else Tap.PATTERN
    links = {Site(1, tap): [(1, text, 2, 1) for text in range(3)]}
    with torch.no_grad():
        before, after = (
            model(TEXTS, watch=watch).hidden.to_list()
            for watch in (None, Masked(links, renormalize))
        )
    changes = torch.stack([new.sum() - old.sum() for old, new in zip(before, after, strict=True)])
    torch.testing.assert_close(result.changes.float(), changes, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_wrapped_model_is_cut_as_its_eager_attention(renormalize: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=61, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    peer = GPT2LMHeadModel(config).eval()
    for parameter in peer.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    text = [3, 1, 4, 1, 5, 9, 2]
    result = cut(
        peer, [text], [("L1H2", "last", 3), ("L0H1", 4, 2)], renormalize=renormalize, logits=True
    )
    original = torch.nn.functional.softmax
    calls: list[int] = []

    def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
        layer, (head, query, key) = len(calls), [(1, 4, 2), (2, 6, 3)][len(calls)]
        calls.append(layer)
        scores = scores.clone()
        if renormalize:
            scores[0, head, query, key] = torch.finfo(scores.dtype).min
        weights = original(scores, *args, **kwargs)
        if not renormalize:
            weights[0, head, query, key] = 0.0
        return weights

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        expected = peer(torch.tensor([text])).logits[0, -1]
    assert calls == [0, 1]
    torch.testing.assert_close(result.after[0], expected, atol=1e-4, rtol=1e-4)
    assert (result.after - result.before).abs().max() > 1e-2


def test_cross_attention_is_cut_at_the_source() -> None:
    model = small(SEQ2SEQS["t5"])
    source, target = ids((6, 4)), ids((3, 5), seed=1)
    links = [("decoder L1H0 cross", 1, 3), ("encoder L0H1", 2, 0)]
    result = cut(model, (source, target), links, logits=True, progress=False)
    cross = Site(1, Tap.SCORES, Sublayer.CROSS, stack="decoder")
    own = Site(0, Tap.SCORES, stack="encoder")
    both = {cross: [(0, text, 1, 3) for text in (0, 1)], own: [(1, text, 2, 0) for text in (0, 1)]}
    with torch.no_grad():
        expected = last(model(source, target, watch=Masked(both, True)).logits)
    torch.testing.assert_close(result.after, expected, atol=1e-4, rtol=1e-4)


def test_a_head_that_reads_one_key_reads_nothing_without_it() -> None:
    model = text_model([Look(places=offset_look(-1).places, writes=torch.eye(48))])
    metric = lens.StateMetric(
        lambda states, _: torch.stack([x[-1].sum() for x in states.to_list()])
    )
    texts = [[5, 6, 7, 8]]
    last_link = cut(model, texts, [("L0H0", "last", 2)], renormalize=False, metric=metric)
    other_link = cut(model, texts, [("L0H0", "last", 1)], renormalize=False, metric=metric)
    assert last_link.change == pytest.approx(-1, abs=1e-4)
    assert other_link.change == pytest.approx(0, abs=1e-4)
    alone = cut(model, [[5]], [("L0H0", 0, 0)], metric=metric)
    assert alone.change == pytest.approx(-1, abs=1e-4)


@pytest.mark.parametrize("renormalize", [True, False])
def test_all_links_of_a_head_cut_are_the_head_ablated(renormalize: bool) -> None:
    model, text = small(DECODERS["gpt2"]), [[3, 1, 4, 1, 5]]
    links = [("L1H1", query, key) for query in range(5) for key in range(query + 1)]
    result = cut(model, text, links, renormalize=renormalize, progress=False)
    ablated = ablate(model, text, "L1H1", "zero", progress=False)
    assert result.change == pytest.approx(ablated.of("L1H1")["change"], abs=1e-5)


def test_a_layer_and_batches_are_cut_as_single_links() -> None:
    model = small(DECODERS["llama"])
    whole = cut(model, TEXTS, [("L1", 2, 0)], progress=False)
    heads = [(Head(1, head), 2, 0) for head in range(4)]
    singly = cut(model, TEXTS, heads, batch_tokens=1, progress=False)
    assert len(whole.links) == 4
    assert whole.change == pytest.approx(singly.change, abs=1e-6)
    address = Address(Head(1, 0))
    same = cut(model, TEXTS, [Link(address, 2, 0), (address, 2, 0)], progress=False)
    assert same.links == (Link(address, 2, 0),)


def test_it_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = small(DECODERS["gpt2"])
    result = cut(model, TEXTS, [("L1H0", "last", 0), ("L0H1", 1, 1, 2)], logits=True)
    result.save(tmp_path / "cut.safetensors")
    loaded = lens.load(tmp_path / "cut.safetensors")
    assert loaded.links == result.links
    assert str(loaded) == str(result)
    torch.testing.assert_close(loaded.after, result.after)


def test_refusals() -> None:
    model = small(DECODERS["gpt2"])
    for links, parts in (
        ([("L9H0", 0, 0)], ["L9H0"]),
        ([("L0H0", 1, 2)], ["query 1", "key 2", "mask"]),
        ([("L0H0", 7, 0)], ["text 0", "token 7", "5"]),
        ([("L0H0", -1, 0)], ["-1", "last"]),
        ([("L0H0", 0, 0, 3)], ["text 3", "0 to 2"]),
        ([("L0H0", 0)], ["link", "query, key"]),
        ([], ["no links"]),
    ):
        with refuses(InputError, *parts):
            cut(model, TEXTS, links, progress=False)
    mixer = LayerConfig(
        attention=None, mixer=Branch(LinearAttention(width=WIDTH, heads=2)), feedforward=None
    )
    with refuses(InputError, "LinearAttention"):
        cut(small(decoder(mixer)), TEXTS, [("L0H0", 1, 0)], progress=False)


@pytest.mark.skipif(not pip_models.is_fetched("smollm2"), reason="needs manyheads get smollm2")
def test_the_link_of_the_guide_turns_a_wrong_pronoun_and_a_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MANYHEADS_CACHE")
    model = load("smollm2")
    himself, herself = (model.tokenizer.encode(word).ids[-1] for word in (" himself", " herself"))
    texts = ["The uncle of Mary introduced", "The uncle said Mary introduced"]
    metric = LogitDifference(answer=(himself,) * 2, distractor=(herself,) * 2)
    result = cut(model, texts, [("L25H2", "last", 3)], metric=metric, logits=True, progress=False)
    assert result.before is not None
    assert result.after is not None
    before, after = (rows[:, himself] - rows[:, herself] for rows in (result.before, result.after))
    # Only the first is meant to be "himself".
    torch.testing.assert_close(before, torch.tensor([-0.44, -2.11]), atol=0.02, rtol=0)
    torch.testing.assert_close(after, torch.tensor([0.87, 0.68]), atol=0.02, rtol=0)
