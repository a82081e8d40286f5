"""Ablation: exact, whatever is reused, against plain loops and `transformers` with a hook."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from manyheads import lens
from manyheads.errors import InputError, TruncationWarning
from manyheads.lens.causal.ablation import (
    Ablation,
    ablate,
    ablate_greedily,
    ablate_in_order,
    ablate_together,
)
from manyheads.lens.inputs.cached_run import CachedRun
from manyheads.lens.inputs.metrics import CustomMetric, LogitDifference
from manyheads.lens.results.addresses import Address
from manyheads.models.build import build
from manyheads.models.recipes import gpt2
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.data import tiny
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    SEQ2SEQS,
    VISIONS,
    ids,
    images,
    small,
    values,
)
from tests.parity import copying
from tests.parity.comparing import texts

LENGTHS = (5, 1, 12, 7)


class Take:
    """A plain watcher that puts one value in the place of a head's output."""

    def __init__(self, sites: dict[Site, list[int]], instead: Any = None) -> None:
        self.sites, self.instead = sites, instead or {}

    def wants(self, site: Site) -> bool:
        return site in self.sites

    def see(self, site: Site, value: Any) -> Any:
        result = value.values.clone()
        for head in self.sites[site]:
            result[:, head] = self.instead[site][:, head] if self.instead else 0.0
        return value.with_values(result)


def next_losses(logits: Ragged, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Sum and number of the next-token losses of each text."""
    sums, counts = [], []
    for one, row in zip(logits.to_list(), batch.to_list(), strict=True):
        sums.append(F.cross_entropy(one[:-1], row[1:], reduction="sum").double())
        counts.append(len(row) - 1)
    return torch.stack(sums), torch.tensor(counts)


def mean_loss(logits: Ragged, batch: Ragged) -> float:
    sums, counts = next_losses(logits, batch)
    return float(sums.sum() / counts.sum())


def heads_of(model: Any) -> list[Head]:
    layers = model.config.stack.layers
    return [
        Head(index, head)
        for index, layer in enumerate(layers)
        if layer.attention is not None
        for head in range(layer.attention.inner.heads)
    ]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    peer = GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=32,
            vocab_size=61,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    ours = build(gpt2(width=48, heads=4, layers=3, vocabulary=61, positions=32))
    copying.gpt2(peer, ours)
    return peer, ours


def hooked_loss(peer: Any, rows: list[Tensor], layer: int, head: int, instead: Tensor) -> float:
    """Their loss over all next tokens, a head's slice replaced on its way into the projection."""

    def replace(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        slices = inputs[0].clone()
        slices[..., head * 12 : (head + 1) * 12] = instead
        return (slices, *inputs[1:])

    module = peer.transformer.h[layer].attn.c_proj
    handle = module.register_forward_pre_hook(replace)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = peer(row[None]).logits[0]
            total += float(F.cross_entropy(logits[:-1], row[1:], reduction="sum"))
            count += len(row) - 1
    handle.remove()
    return total / count


def slice_means(peer: Any, rows: list[Tensor]) -> list[Tensor]:
    """The mean of what enters each output projection, over all tokens."""
    seen: list[list[Tensor]] = [[] for _ in peer.transformer.h]
    handles = [
        block.attn.c_proj.register_forward_pre_hook(
            lambda _, inputs, place=place: seen[place].append(inputs[0][0])
        )
        for place, block in enumerate(peer.transformer.h)
    ]
    with torch.no_grad():
        for row in rows:
            peer(row[None])
    for handle in handles:
        handle.remove()
    return [torch.cat(each).mean(0) for each in seen]


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_losses_are_those_of_transformers_with_a_hook(pair: tuple[Any, Any], how: Any) -> None:
    peer, ours = pair
    rows = texts((9, 23, 12, 2))
    result = ablate(ours, rows, replace_with=how, batch_tokens=50, progress=False)
    means = slice_means(peer, rows)
    for layer in range(3):
        for head in range(4):
            mean = means[layer][head * 12 : (head + 1) * 12]
            instead = torch.zeros(12) if how == "zero" else mean
            expected = hooked_loss(peer, rows, layer, head, instead)
            assert result["metric"].of(Head(layer, head)) == pytest.approx(expected, abs=1e-5)
    assert np.abs(result["change"].means).max() > 0.01


@pytest.mark.parametrize("name", DECODERS)
def test_every_head_alone_equals_one_full_run_a_head(name: str) -> None:
    model, batch = small(DECODERS[name]), ids(LENGTHS)
    result = ablate(model, batch, batch_tokens=60, progress=False)
    with torch.no_grad():
        whole = mean_loss(model(batch).logits, batch)
        for head in heads_of(model):
            watch = Take({Site(head.layer, Tap.HEAD_OUTPUT): [head.head]})
            expected = mean_loss(model(batch, watch=watch).logits, batch)
            assert result["metric"].of(head) == pytest.approx(expected, abs=1e-5)
            assert result["change"].of(head) == pytest.approx(expected - whole, abs=1e-5)
    assert result.baseline == pytest.approx(whole, abs=1e-5)
    assert result.complete


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_how_much_runs_side_by_side_changes_nothing(how: Any) -> None:
    model, batch = small(DECODERS["gates"]), ids(LENGTHS)
    few, many = (
        ablate(model, batch, replace_with=how, batch_tokens=room, progress=False)
        for room in (1, 10_000)
    )
    for name in ("metric", "change"):
        np.testing.assert_allclose(few[name].means, many[name].means, atol=1e-5)
    np.testing.assert_allclose(few["change"].errors, many["change"].errors, atol=1e-5)


def test_texts_may_be_ids_a_ragged_or_strings() -> None:
    model = build(gpt2(width=32, heads=2, layers=1, vocabulary=300, positions=64), seed=0)
    model.tokenizer = tiny.tokenizer()
    strings = ["the cat sat on the mat", "document"]
    rows = [model.tokenizer.encode(each).ids for each in strings]
    result = [
        ablate(model, inputs, progress=False)["metric"].means
        for inputs in (strings, rows, Ragged.from_list([torch.tensor(row) for row in rows]))
    ]
    np.testing.assert_array_equal(result[0], result[1])
    np.testing.assert_array_equal(result[0], result[2])


def test_truncated_texts_are_reported() -> None:
    model = build(gpt2(width=32, heads=2, layers=1, vocabulary=300, positions=4), seed=0)
    model.tokenizer = tiny.tokenizer()
    with pytest.warns(
        TruncationWarning, match="1 of 2 texts were longer than 4 tokens, and were cut"
    ):
        ablate(model, ["the cat sat on the mat, and sat, and sat", "cat"], progress=False)


def test_errors_are_those_of_paired_differences_over_texts() -> None:
    model, batch = small(DECODERS["llama"]), ids((6, 6, 6, 6, 6))
    result = ablate(model, batch, ["L0H2"], progress=False)
    with torch.no_grad():
        before, counts = next_losses(model(batch).logits, batch)
        watch = Take({Site(0, Tap.HEAD_OUTPUT): [2]})
        after, _ = next_losses(model(batch, watch=watch).logits, batch)
    change = (after - before) / counts
    expected = float(change.std() / math.sqrt(5))
    assert result["change"].error_of(Head(0, 2)) == pytest.approx(expected, abs=1e-6)
    assert np.isnan(result["change"].of(Head(1, 0)))
    assert np.isnan(ablate(model, ids((6,)), ["L0H2"], progress=False)["change"].errors[2])


def test_taking_nothing_away_changes_nothing() -> None:
    result = ablate_together(small(DECODERS["gpt2"]), ids(LENGTHS), [], progress=False)
    assert (result.change, result.value) == (0.0, result.baseline)


def test_a_head_that_writes_nothing_is_not_missed() -> None:
    model = build(DECODERS["llama"], seed=0)
    with torch.no_grad():
        model.stack.layers[0].attention.output.weight[:, 8:16] = 0
    result = ablate(model, ids(LENGTHS), progress=False)
    assert result["change"].of(Head(0, 1)) == 0.0
    assert (np.delete(np.abs(result["change"].means), 1) > 0).all()


def test_a_set_together_equals_one_run_without_it() -> None:
    model, batch = small(DECODERS["windows and whole"]), ids(LENGTHS)
    gone = {0: [1], 1: [0, 3], 2: [2]}
    heads = [Head(layer, head) for layer, each in gone.items() for head in each]
    result = ablate_together(model, batch, heads, progress=False)
    watch = Take({Site(layer, Tap.HEAD_OUTPUT): each for layer, each in gone.items()})
    with torch.no_grad():
        expected = mean_loss(model(batch, watch=watch).logits, batch)
    assert result.value == pytest.approx(expected, abs=1e-5)
    assert str(result).startswith("without L0H1, L1H0, L1H3, L2H2: ")


def test_resampling_takes_the_same_position_of_another_text() -> None:
    model, batch = small(DECODERS["gpt2"]), ids((4, 7))
    record = Record([Site(1, Tap.HEAD_OUTPUT)])
    with torch.no_grad():
        model(batch, watch=record)
        one, other = record[Site(1, Tap.HEAD_OUTPUT)].to_list()
        instead = torch.cat((other[:4], one[[0, 1, 2, 3, 0, 1, 2]]))
        site = Site(1, Tap.HEAD_OUTPUT)
        watch = Take({site: [3]}, {site: instead})
        expected = mean_loss(model(batch, watch=watch).logits, batch)
    result = ablate(model, batch, ["L1H3"], "resample", progress=False)
    assert result["metric"].of(Head(1, 3)) == pytest.approx(expected, abs=1e-5)


def test_heads_in_order_are_taken_one_after_another() -> None:
    model, batch = small(DECODERS["llama"]), ids(LENGTHS)
    order = ["L1H3", "L0H0", "L1H0"]
    result = ablate_in_order(model, batch, order, progress=False)
    for count, step in enumerate(result.steps, start=1):
        expected = ablate_together(model, batch, order[:count], progress=False)
        assert step.value == pytest.approx(expected.value, abs=1e-6)
    assert [str(head) for head in result.order] == order
    assert [row["removed"] for row in result.rows()] == [1, 2, 3]


def test_greed_takes_the_least_missed_head_at_each_step() -> None:
    model, batch = small(DECODERS["gates"]), ids(LENGTHS)
    result = ablate_greedily(model, batch, 3, replace_with="mean", progress=False)
    taken: list[Head] = []
    for step in result.steps:
        left = [head for head in heads_of(model) if head not in taken]
        losses = {
            head: ablate_together(
                model, batch, [*taken, head], replace_with="mean", progress=False
            ).value
            for head in left
        }
        best = min(losses, key=losses.__getitem__)
        assert step.heads == (*taken, best)
        assert step.value == pytest.approx(losses[best], abs=1e-5)
        assert step.change == pytest.approx(losses[best] - result.baseline, abs=1e-5)
        taken.append(best)


def test_a_head_that_spoils_answers_is_harmful() -> None:
    model = build(DECODERS["gpt2"], seed=0)
    batch = Ragged.from_list([torch.full((9,), 3), torch.full((7,), 5), torch.full((8,), 4)])
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.attention.output.weight.zero_()
            layer.feedforward.contract.weight.zero_()
        # The text repeats its token; this head writes the opposite of what it reads.
        spoils, attention = slice(8, 16), model.stack.layers[1].attention
        attention.projections()["value"][spoils] = torch.eye(8, 32) * 9
        attention.output.weight[:8, spoils] = -torch.eye(8) * 9
    result = ablate(model, batch, progress=False)
    assert [address for address, _ in result.harmful()] == [Address(Head(1, 1))]
    assert not ablate(model, batch, ["L0H0"], progress=False).harmful()


def test_a_logit_difference_is_read_at_the_named_positions() -> None:
    model, batch = small(DECODERS["llama"]), ids((5, 3))
    metric = LogitDifference(answer=(1, 2), distractor=(3, 4), at=(2, 1))
    result = ablate(model, batch, ["L0H1"], metric=metric, progress=False)
    with torch.no_grad():
        one, other = model(batch).logits.to_list()
    expected = float((one[2, 1] - one[2, 3] + other[1, 2] - other[1, 4]) / 2)
    assert result.baseline == pytest.approx(expected, abs=1e-5)
    last = LogitDifference(answer=(1, 2), distractor=(3, 4), at=(4, 2))
    default = LogitDifference(answer=(1, 2), distractor=(3, 4))
    actual = [ablate(model, batch, metric=each, progress=False) for each in (last, default)]
    np.testing.assert_array_equal(actual[0]["metric"].means, actual[1]["metric"].means)


def test_a_metric_of_ones_own_sees_logits_and_numbers_of_texts() -> None:
    model, batch = small(DECODERS["llama"]), ids(LENGTHS)
    seen: list[int] = []

    def first_logit(logits: Any, numbers: Any) -> Tensor:
        seen.extend(numbers)
        return torch.stack([each[0, 7] for each in logits.to_list()])

    result = ablate(model, batch, ["L1H1"], metric=first_logit, batch_tokens=12, progress=False)
    with torch.no_grad():
        expected = torch.stack([each[0, 7] for each in model(batch).logits.to_list()]).mean()
    assert result.baseline == pytest.approx(float(expected), abs=1e-5)
    assert set(seen) == {0, 1, 2, 3}
    assert result.metadata["metric"] == "first_logit"
    assert result.metadata["better"] == "higher"
    with refuses(InputError, "(1,) for 4 texts", "one value per text"):
        ablate(model, batch, metric=CustomMetric(lambda *_: torch.zeros(1)), progress=False)


def test_masked_words_are_predicted_at_their_positions() -> None:
    model, batch = small(ENCODERS["bert"]), ids((5, 7))
    targets = [{1: 4, 3: 8}, {6: 2}]
    result = ablate(model, batch, targets=targets, progress=False)
    watch = Take({Site(0, Tap.HEAD_OUTPUT): [2]})
    with torch.no_grad():
        one, other = model(batch, watch=watch).logits.to_list()
    rows = torch.stack((one[1], one[3], other[6]))
    expected = float(F.cross_entropy(rows, torch.tensor([4, 8, 2])))
    assert result["metric"].of(Head(0, 2)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", VISIONS)
def test_images_are_scored_by_their_classes(name: str) -> None:
    model = small(VISIONS[name])
    result = ablate(model, images(), targets=[0, 4, 2, 2], batch_tokens=20, progress=False)
    watch = Take({Site(1, Tap.HEAD_OUTPUT): [1]})
    with torch.no_grad():
        logits = values(model(images(), watch=watch).logits)
    expected = float(F.cross_entropy(logits, torch.tensor([0, 4, 2, 2])))
    assert result["metric"].of(Head(1, 1)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", SEQ2SEQS)
@pytest.mark.parametrize("where", ["encoder", "decoder", "cross"])
def test_pairs_are_ablated_on_either_side(name: str, where: str) -> None:
    model: Seq2Seq = small(SEQ2SEQS[name])
    source, target = ids((5, 3, 6)), ids((4, 6, 2), seed=1)
    sublayer = Sublayer.CROSS if where == "cross" else Sublayer.ATTENTION
    stack: Any = "encoder" if where == "encoder" else "decoder"
    result = ablate(
        model, (source, target), stack=stack, sublayer=sublayer, replace_with="mean", progress=False
    )
    for address in result.addresses:
        site = Site(address.head.layer, Tap.HEAD_OUTPUT, sublayer, stack)
        record = Record([site])
        with torch.no_grad():
            model(source, target, watch=record)
            spoken = record[site].values
            watch = Take({site: [address.head.head]}, {site: spoken.mean(0, keepdim=True)})
            logits = model(source, target, watch=watch).logits
        assert isinstance(logits, Ragged)
        expected = mean_loss(logits, target)
        assert result["metric"].of(address) == pytest.approx(expected, abs=1e-5)


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small(DECODERS["llama"]), ids(LENGTHS)
    whole = ablate(model, batch, batch_tokens=1, progress=False)
    runs = 0
    resume = CachedRun.resume_after_heads

    def tired(self: Any, *inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs > 8 + 2:
            raise KeyboardInterrupt
        return resume(self, *inputs)

    monkeypatch.setattr(CachedRun, "resume_after_heads", tired)
    # One text after another, each head alone: the first text is finished, and a second of one token
    # brings no loss.
    result = ablate(model, batch, batch_tokens=1, progress=False)
    assert not result.complete
    assert not np.isnan(result["metric"].means).any()
    alone = ablate_one(model, batch)
    np.testing.assert_allclose(result["metric"].means, alone, atol=1e-6)
    assert not np.allclose(result["metric"].means, whole["metric"].means, atol=1e-4)
    runs = 100
    with pytest.raises(KeyboardInterrupt):
        ablate(model, batch, batch_tokens=1, progress=False)


def ablate_one(model: Any, batch: Ragged) -> Any:
    result = []
    first = batch.select([0])
    for head in heads_of(model):
        watch = Take({Site(head.layer, Tap.HEAD_OUTPUT): [head.head]})
        with torch.no_grad():
            result.append(mean_loss(model(first, watch=watch).logits, first))
    return np.array(result)


def test_a_model_in_training_is_measured_at_rest_and_put_back() -> None:
    config = gpt2(width=32, heads=2, layers=1, vocabulary=50, positions=16, dropout=0.5)
    model = build(config, seed=0)
    expected = ablate(model.eval(), [[1, 2, 3, 4]], progress=False)
    result = ablate(model.train(), [[1, 2, 3, 4]], progress=False)
    np.testing.assert_array_equal(result["metric"].means, expected["metric"].means)
    assert all(module.training for module in model.modules())


def test_a_result_is_saved_and_opened_again(tmp_path: Any) -> None:
    result = ablate(small(DECODERS["llama"]), ids(LENGTHS), progress=False)
    result.save(tmp_path / "ablation.json")
    again = lens.load(tmp_path / "ablation.json")
    assert isinstance(again, Ablation)
    assert again.baseline == result.baseline
    np.testing.assert_allclose(again["change"].means, result["change"].means)


def test_heads_of_a_result_are_taken_as_they_are() -> None:
    model, inputs = small(DECODERS["llama"]), ids(LENGTHS)
    ranked = [head for head, _ in ablate(model, inputs, progress=False)["change"].ranked()[:2]]
    assert all(isinstance(head, Address) for head in ranked)
    by_name = ablate_together(model, inputs, list(map(str, ranked)), progress=False)
    assert ablate_together(model, inputs, ranked, progress=False) == by_name
    assert len(ablate_in_order(model, inputs, ranked, progress=False).steps) == 2
    with refuses(InputError, "there is no head encoder L0H0", "use L0H0 to L1H3"):
        ablate(model, inputs, [Address(Head(0, 0), "encoder")], progress=False)


def test_what_cannot_be_measured_is_refused() -> None:
    decoder, encoder = small(DECODERS["llama"]), small(ENCODERS["bert"])
    with refuses(InputError, "L7H0", "L0H0 to L1H3"):
        ablate(decoder, ids((5,)), ["L7H0"])
    with refuses(
        InputError,
        "this Encoder does not predict the next token",
        "pass targets",
    ):
        ablate(encoder, ids((5,)), progress=False)
    with refuses(InputError, "text 1 has no position 9: use 0 to 2."):
        ablate(encoder, ids((5, 3)), targets=[{0: 1}, {9: 1}], progress=False)
    with refuses(InputError, "text 1 is empty"):
        ablate(decoder, ids((5, 0)), progress=False)
    with refuses(InputError, "second token", "longer texts"):
        ablate(decoder, ids((1, 1)), progress=False)
    with refuses(InputError, "target", "{position: token id}"):
        ablate(encoder, ids((5, 3)), targets=[{}, {}], progress=False)
    with refuses(InputError, "1 targets for 2 texts", "one per text"):
        ablate(encoder, ids((5, 3)), targets=[{0: 1}], progress=False)
    with refuses(InputError, "resampl", "1", "two or more"):
        ablate(decoder, ids((5,)), replace_with="resample", progress=False)
    with refuses(InputError, "needs targets", "one class per text"):
        ablate(small(VISIONS["vit"]), images(), progress=False)
    with refuses(InputError, "this Decoder has no stack 'encoder': use \"main\"."):
        ablate(decoder, ids((5,)), stack="encoder")
    with refuses(InputError, "the main stack has no cross heads", "choose another"):
        ablate(decoder, ids((5,)), sublayer=Sublayer.CROSS)
