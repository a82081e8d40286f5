"""Where a logit comes from: parts that add up to it, and what each layer would say."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import attribute_logits, logit_lens
from manyheads.models.build import build
from manyheads.models.readout import LanguageHead, ReadoutTransform
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm, PreNorm
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    EVERY_GATE,
    SEQ2SEQS,
    VISIONS,
    decoder,
    encoder,
    ids,
    images,
    layer,
    own,
    small,
)
from tests.parity.copying import scramble

LENGTHS = (5, 1, 12, 7)
WRITERS = DECODERS | {
    "post": decoder(*[layer(own(mask=Causal(), bias="all"), norm=PostNorm(LayerNorm()))] * 2),
    "gate times": decoder(
        *[
            layer(
                own(
                    mask=Causal(), bias="all", gates=(replace(EVERY_GATE[4], operation="multiply"),)
                )
            )
        ]
        * 2
    ),
}


def scrambled(config: Any) -> Any:
    """Biases and norms that are neither zeros nor ones."""
    model = build(config, seed=0)
    scramble(model)
    return model


@pytest.mark.parametrize("name", WRITERS)
def test_the_parts_add_up_to_the_logit(name: str) -> None:
    model, batch = scrambled(WRITERS[name]), ids(LENGTHS)
    right, wrong = (3, 4, 5, 6), (9, 8, 7, 0)
    result = attribute_logits(model, batch, right, wrong)
    with torch.no_grad():
        hidden, readout = model(batch).hidden, model.readout
        # Capped logits are no sums: what adds up is what is capped.
        logits = readout(hidden, model.table).values
        if readout.softcap is not None:
            logits = F.linear(hidden.values, readout.vectors(model.table))
        rows = [each[-1] for each in hidden.with_values(logits).to_list()]
    expected = torch.stack(
        [row[a] - row[b] for row, a, b in zip(rows, right, wrong, strict=True)]
    ).double()
    torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.total, expected, atol=1e-4, rtol=1e-4)
    assert result.completeness < 1e-4
    assert result.by_head.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["tags", "classes", "shaw", "modernbert"])
def test_encoders_add_up_too(name: str) -> None:
    result = attribute_logits(scrambled(ENCODERS[name]), ids(LENGTHS), [1, 2, 0, 1])
    assert result.completeness < 1e-4


@pytest.mark.parametrize("name", VISIONS)
def test_classes_of_images_add_up(name: str) -> None:
    model = scrambled(VISIONS[name])
    result = attribute_logits(model, images(), [0, 4, 2, 2])
    with torch.no_grad():
        logits = model(images()).logits
    expected = logits[torch.arange(4), torch.tensor([0, 4, 2, 2])].double()
    torch.testing.assert_close(result.total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SEQ2SEQS)
def test_the_writing_side_of_a_pair_adds_up(name: str) -> None:
    model = scrambled(SEQ2SEQS[name])
    result = attribute_logits(model, (ids((5, 3)), ids((4, 6), seed=1)), [1, 2])
    assert result.completeness < 1e-4
    assert {block.sublayer for block in result.heads.blocks} == {
        Sublayer.ATTENTION,
        Sublayer.CROSS,
    }


def test_a_layer_adds_what_its_heads_and_bias_add() -> None:
    model = small(DECODERS["llama"])
    result = attribute_logits(model, ids(LENGTHS), [1, 2, 3, 4])
    for index in range(2):
        mine = result.by_head[:, 4 * index : 4 * index + 4].sum(1)
        # The sums are double, of products that are single.
        torch.testing.assert_close(
            mine, result.layers[Sublayer.ATTENTION, index], atol=1e-6, rtol=1e-5
        )


def test_without_norms_a_head_of_the_last_layer_adds_what_its_loss_takes() -> None:
    bare = layer(own(mask=Causal(), position=Rotary()), None, norm=PreNorm(NoNorm()))
    config = decoder(bare, bare)
    model = build(replace(config, stack=replace(config.stack, final_norm=NoNorm())), seed=0)
    batch = ids((6, 4))
    result = attribute_logits(model, batch, [3, 4], at=[2, 3])

    class Silence:
        def wants(self, site: Site) -> bool:
            return site == Site(1, Tap.HEAD_OUTPUT)

        def see(self, _: Site, value: Any) -> Any:
            values = value.values.clone()
            values[:, 2] = 0
            return value.with_values(values)

    with torch.no_grad():
        before, after = (model(batch, watch=watch).logits for watch in (None, Silence()))
    lost = torch.stack([before.of(0)[2, 3] - after.of(0)[2, 3], before.of(1)[3, 4]])
    lost[1] -= after.of(1)[3, 4]
    torch.testing.assert_close(result.by_head[:, 6].float(), lost, atol=1e-5, rtol=1e-5)
    assert result.heads["logit"].of(Head(1, 2)) == pytest.approx(float(lost.mean()), abs=1e-5)


def test_the_likeliest_answer_is_attributed_where_none_is_named() -> None:
    model, batch = small(DECODERS["gpt2"]), ids(LENGTHS)
    result = attribute_logits(model, batch)
    with torch.no_grad():
        best = torch.stack([each[-1].max() for each in model(batch).logits.to_list()])
    torch.testing.assert_close(result.logits.float(), best, atol=1e-5, rtol=1e-5)
    assert "off by" in str(result)


def test_a_readout_that_bends_is_refused() -> None:
    bent = encoder(layer(), readout=LanguageHead(transform=ReadoutTransform()))
    with refuses(
        InputError,
        "not linear",
        "use ablation, patching",
    ):
        attribute_logits(small(bent), ids((5,)))
    with refuses(InputError, "2 answers for 1 texts", "one per text"):
        attribute_logits(small(DECODERS["gpt2"]), ids((5,)), [1, 2])
    with refuses(InputError, "text 0 has no position 5: use 0 to 4."):
        attribute_logits(small(DECODERS["gpt2"]), ids((5,)), [1], at=[5])


def after_layers(model: Any, batch: Ragged) -> list[Tensor]:
    """The residual stream of the last tokens before the first layer and after each."""
    sites = [Site(-1, Tap.EMBEDDINGS)]
    sites += [Site(index, Tap.AFTER, Sublayer.FEEDFORWARD) for index in range(2)]
    record = Record(sites)
    with torch.no_grad():
        model(batch, watch=record)
    return [torch.stack([each[-1] for each in record[site].to_list()]) for site in sites]


def test_the_logit_lens_reads_every_layer_as_if_it_were_the_last() -> None:
    model, batch = scrambled(DECODERS["gpt2"]), ids(LENGTHS)
    result = logit_lens(model, batch, answer=[1, 2, 3, 4], top_k=4)
    with torch.no_grad():
        for step, rows in enumerate(after_layers(model, batch)):
            logits = model.stack.final_norm(rows) @ model.embedding.tokens.weight.T
            expected = logits.log_softmax(-1)
            best = expected.topk(4, -1)
            torch.testing.assert_close(result.log_probabilities[step], best.values)
            assert torch.equal(result.answers[step], best.indices)
            own_score = expected[torch.arange(4), [1, 2, 3, 4]]
            torch.testing.assert_close(result.answer_log_probabilities[step], own_score)
            assert torch.equal(result.answer_ranks[step], (expected > own_score[:, None]).sum(-1))
        last = torch.stack([each[-1].log_softmax(-1) for each in model(batch).logits.to_list()])
    torch.testing.assert_close(result.log_probabilities[-1], last.topk(4, -1).values)


def test_an_answer_is_settled_where_it_no_longer_changes() -> None:
    result = logit_lens(small(DECODERS["gpt2"]), ids(LENGTHS))
    answers = torch.tensor([[5, 1], [3, 1], [5, 1], [5, 1]]).unsqueeze(-1)
    message = replace(result, answers=answers, log_probabilities=torch.zeros(4, 2, 1))
    assert message.settled().tolist() == [2, 0]
    with refuses(InputError, "Vision", "language head"):
        logit_lens(small(VISIONS["vit"]), images())
