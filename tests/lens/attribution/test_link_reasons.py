"""Why a head looks at a token: pairs of writers that sum to the score, on every kind of model."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from manyheads import lens, load, wrap
from manyheads.errors import InputError, WrappedModelWarning
from manyheads.lens.attribution.link_reasons import LinkReasons, why
from manyheads.lens.inputs.texts import read_inputs
from manyheads.lens.results.addresses import Address, Block, blocks_of
from manyheads.mixers import LinearAttention
from manyheads.models.build import build
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.convolution import Convolution
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, PostNorm, RMSNorm, ScaledPreNorm
from manyheads.parts.positions import Learned, Rotary
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.lens.measure.test_statistics import MORE
from tests.lens.planted import planted_model
from tests.messages import refuses
from tests.models.zoo import (
    MODELS,
    TWO_STEPS,
    VOCABULARY,
    WIDTH,
    decoder,
    ids,
    images,
    layer,
    own,
    small,
    writes,
)
from tests.parity.copying import scramble

LIMIT = 1e-4
ADDED = tuple(Gate(at=at, operation="add", per="channel") for at in ("query", "key", "final"))
WIDER = decoder(*[writes()] * 2, position=Learned(count=20))
CONFIGS = (
    {
        name: MODELS[name]
        for name in (
            *("encoder bert", "encoder modernbert", "encoder shaw", "decoder gpt2"),
            *("decoder sinusoidal", "decoder llama", "decoder alibi", "decoder t5"),
            *("decoder gates", "decoder control gates", "decoder normed heads", "decoder sinks"),
            *("decoder experts", "decoder both norms", "decoder parallel"),
            *("decoder normed outputs", "decoder capped", "decoder uneven", "seq2seq 2017"),
            *("seq2seq one layer looks back", "vision vit"),
        )
    }
    | {name: MORE[name] for name in ("deberta", "t5 of its own", "cross with gates and a sink")}
    | {
        "post-norm": decoder(
            *[layer(own(mask=Causal(), bias="all"), norm=PostNorm(LayerNorm()))] * 2
        ),
        "scaled branches": decoder(*[layer(own(mask=Causal()), norm=ScaledPreNorm())] * 2),
        "added gates": decoder(*[writes(gates=ADDED)] * 2),
        "heads normed together": decoder(
            *[writes(query_norm=RMSNorm(), key_norm=LayerNorm(), norm_span="heads", kv_heads=2)] * 2
        ),
        "narrow embeddings": replace(
            WIDER,
            embedding=Embedding(
                vocabulary=VOCABULARY,
                width=WIDTH,
                table_width=WIDTH,
                position=Learned(count=20),
                norm=LayerNorm(),
                projected=True,
            ),
        ),
        "mixer below": decoder(
            LayerConfig(
                attention=None,
                mixer=Branch(LinearAttention(width=WIDTH, heads=2)),
                feedforward=Branch(TWO_STEPS),
            ),
            writes(),
        ),
    }
)


def inputs_for(model: Any) -> ModelInputs:
    if isinstance(model, Vision):
        return ModelInputs(images=tuple(images()[:1]))
    source = ids((7,)) if isinstance(model, Seq2Seq) else None
    return ModelInputs(ids=ids((6,), seed=1), source=source)


def scores_of(model: Any, inputs: ModelInputs, block: Block) -> Tensor:
    """The scores of the last query of the last head of a block."""
    site = Site(block.layer, Tap.SCORES, block.sublayer, block.stack)
    record = Record([site])
    with torch.no_grad():
        model.run_inputs(inputs, record)
    scores: Any = record[site]
    return scores.of(0)[-1, -1]


def check_sums(model: Any, inputs: ModelInputs, block: Block) -> LinkReasons:
    """The parts of a link sum to its score, and to its difference from the mean of all keys."""
    row = scores_of(model, inputs, block)
    seen = row.isfinite()
    key = int(seen.nonzero()[len(seen.nonzero()) // 2])
    plain, relative = (
        why(model, inputs, block.addresses[-1], "last", key, against=against)
        for against in (None, "mean")
    )
    for result, subtracted in ((plain, 0.0), (relative, float(row[seen].mean()))):
        score = result.score if result.capped is None else result.capped
        assert score == pytest.approx(float(row[key]) - subtracted, abs=LIMIT)
        assert result.total == pytest.approx(result.score, abs=LIMIT)
        for side in (result.query_side, result.key_side):
            assert sum(side.values()) + result.position == pytest.approx(result.total, abs=1e-9)
    return plain


@pytest.mark.parametrize("name", CONFIGS)
def test_the_pairs_sum_to_the_score(name: str) -> None:
    model = build(CONFIGS[name], seed=0)
    scramble(model, 0.3)
    result = check_sums(model, inputs_for(model), blocks_of(model)[-1])
    assert result.pairs.abs().max() > 1e-3


def test_cross_attention_reads_the_output_of_the_encoder() -> None:
    model = small(MODELS["seq2seq 2017"])
    cross = [block for block in blocks_of(model) if block.sublayer is Sublayer.CROSS][-1]
    result = check_sums(model, inputs_for(model), cross)
    assert result.key_writers == ("encoder output",)
    assert "decoder L0H1 cross" in result.query_writers


def test_a_capped_score_is_divided_before_the_cap() -> None:
    model = small(MODELS["decoder capped"])
    cap = model.config.stack.layers[1].attention.inner.softcap
    result = why(model, ids((6,)), "L1H0", "last", 2)
    assert result.capped == pytest.approx(cap * float(torch.tanh(torch.tensor(result.score / cap))))
    assert "after the cap" in str(result)


def test_what_positions_add_is_a_part_of_its_own() -> None:
    model = small(MODELS["decoder alibi"])
    near, far = (why(model, ids((6,)), "L1H0", 5, key) for key in (5, 1))
    assert near.position == pytest.approx(0.0, abs=1e-6)
    assert far.position < -0.1
    assert far.rows()[-1]["query_writer"] == "position bias"


def test_the_key_of_an_induction_head_comes_from_the_previous_token_head() -> None:
    model, _ = planted_model()
    text = [[7, 3, 9, 4, 1, 7, 3]]
    # The last 3 looks for what follows the first: the key whose previous word is 3.
    result = why(model, text, "L1H0", "last", 2)
    assert result.ranked(1)[0][:2] == ("token embedding", "L0H0")
    assert result.of("token embedding", "L0H0") == pytest.approx(result.score, rel=0.05)
    against = why(model, text, "L1H0", "last", 2, against="mean")
    assert next(iter(against.key_side)) == "L0H0"


def test_induction_heads_of_a_trained_model_read_what_its_previous_token_head_wrote() -> None:
    model = load("house-gpt")
    half = torch.randint(50, 2000, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    # The tests of stored kinds name the induction heads; L1H0 is the previous-token head.
    for head in ("L2H6", "L2H7"):
        result = why(model, [half + half], head, 30, 11, against="mean")
        assert result.score > 3
        assert next(iter(result.key_side)) == "L1H0"
        assert result.completeness < LIMIT


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4}
BASE = BERT | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | SPECIAL
T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
WRAPPED: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2)),
    "llama": (LlamaForCausalLM, LlamaConfig(**BASE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**BASE)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**BASE, query_pre_attn_scalar=8)),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**BASE)),
    "t5": (T5ForConditionalGeneration, T5Config(**T5)),
    "bert": (BertForMaskedLM, BertConfig(**BERT)),
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)),
}
TEXT = [5, 6, 7, 8, 5, 6, 9]


@cache
def outside(name: str) -> Any:
    kind, config = WRAPPED[name]
    model = kind(config).eval()
    scramble(model, 0.3)
    return model


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "t5"])
def test_models_of_transformers_sum_too(name: str) -> None:
    model = wrap(outside(name))
    text = [(TEXT[:5], TEXT)] if model.reads_pairs else [TEXT]
    check_sums(model, read_inputs(model, text), blocks_of(model)[-1])


class Seen:
    """What some modules of a model received and returned."""

    def __init__(self, model: Any, *modules: Any) -> None:
        self.seen: dict[Any, tuple[Tensor, Tensor]] = {}
        hooks = [module.register_forward_hook(self._see) for module in modules]
        with torch.no_grad():
            self.output = model(torch.tensor([TEXT]), output_hidden_states=True)
        for hook in hooks:
            hook.remove()

    def _see(self, module: Any, args: Any, output: Any) -> None:
        self.seen[module] = args[0][0].double(), output[0].double()


def test_a_pair_of_gpt2_is_its_textbook_formula() -> None:
    model = outside("gpt2")
    lower, upper = model.transformer.h
    seen = Seen(model, lower.attn.c_proj, upper.ln_1, upper.attn.c_attn).seen
    query, key, head, writer = 6, 2, 1, 3
    # What L0H3 wrote, through the frozen norm and the projections of L1H1.
    weight = lower.attn.c_proj.weight[8 * writer : 8 * writer + 8].double()
    written = seen[lower.attn.c_proj][0][:, 8 * writer : 8 * writer + 8] @ weight
    stream = seen[upper.ln_1][0]
    deviation = (stream.var(-1, unbiased=False, keepdim=True) + upper.ln_1.eps).sqrt()
    centered = (written - written.mean(-1, keepdim=True)) / deviation
    normed = centered * upper.ln_1.weight.double()
    projected = normed @ upper.attn.c_attn.weight.double()
    start = 8 * head
    q, k = projected[query, start : start + 8], projected[key, 32 + start : 40 + start]
    joined = seen[upper.attn.c_attn][1]
    score = joined[query, start : start + 8] @ joined[key, 32 + start : 40 + start] / 8**0.5
    result = why(model, [TEXT], "L1H1", query, key)
    assert result.score == pytest.approx(float(score.detach()), abs=LIMIT)
    assert result.of("L0H3", "L0H3") == pytest.approx(float((q @ k / 8**0.5).detach()), abs=LIMIT)
    assert {"token embedding", "position embedding"} <= set(result.query_writers)


def test_a_pair_of_llama_is_the_gradient_of_its_score() -> None:
    model = outside("llama")
    upper = model.model.layers[1]
    norm, attention = upper.input_layernorm, upper.self_attn
    seen = Seen(model, norm, model.model.embed_tokens)
    stream, embedded = seen.seen[norm][0], seen.seen[model.model.embed_tokens][1]
    divisor = (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    query, key, head = 5, 1, 3
    turn = model.model.rotary_emb(stream[None].float(), torch.arange(len(TEXT))[None])

    def score(at_query: Tensor, at_key: Tensor) -> Tensor:
        """The score from two streams, with the divisors of the run."""
        q, k = (
            ((x / divisor * norm.weight.double()) @ linear.weight.double().T).unflatten(-1, (-1, 8))
            for x, linear in ((at_query, attention.q_proj), (at_key, attention.k_proj))
        )
        turned = apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), *turn)
        # Two query heads share a key head.
        return turned[0][0, head, query] @ turned[1][0, head // 2, key] / 8**0.5

    at_query, at_key = (stream.clone().requires_grad_() for _ in range(2))
    result = why(model, [TEXT], "L1H3", query, key)
    value = score(at_query, at_key)
    assert result.score == pytest.approx(float(value.detach()), abs=LIMIT)
    # The score is bilinear: gradient times what was written is what the writer adds.
    for_query, for_key = torch.autograd.grad(value, (at_query, at_key))
    sides = (result.query_side, for_query, query), (result.key_side, for_key, key)
    for side, gradient, row in sides:
        expected = float((gradient[row] * embedded[row]).sum().detach())
        assert side["embeddings"] == pytest.approx(expected, abs=LIMIT)
    pair = score(embedded, embedded)
    expected = float(pair.detach())
    assert result.of("embeddings", "embeddings") == pytest.approx(expected, abs=LIMIT)


def test_an_edited_head_writes_what_the_edit_left() -> None:
    model = small(MODELS["decoder llama"])

    def without(outputs: Tensor) -> Tensor:
        return outputs * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]

    result = why(model, ids((6,)), "L1H2", 5, 3, edits={Site(0, Tap.HEAD_OUTPUT): without})
    assert result.of("L0H1", "embeddings") == 0.0
    assert result.completeness < LIMIT
    positions = small(MODELS["decoder gpt2"])
    embedded = {Site(-1, Tap.EMBEDDINGS): lambda x: x + 1}
    assert why(positions, ids((6,)), "L1H2", 5, "strongest", edits=embedded).completeness < LIMIT
    cut = why(model, ids((6,)), "L1H2", 5, 3, links=[("L0H0", 5, 4)])
    assert cut.completeness < LIMIT
    assert cut.score != why(model, ids((6,)), "L1H2", 5, 3).score


@pytest.fixture(scope="module")
def result() -> LinkReasons:
    return why(small(MODELS["decoder gpt2"]), ids((6,)), "L1H2", 5, 3, against=1)


def test_a_difference_is_that_of_two_scores(result: LinkReasons) -> None:
    model = small(MODELS["decoder gpt2"])
    own, rival = (why(model, ids((6,)), "L1H2", 5, key) for key in (3, 1))
    torch.testing.assert_close(result.pairs, own.pairs - rival.pairs)
    assert result.score == pytest.approx(own.score - rival.score)


def test_a_head_has_many_names(result: LinkReasons) -> None:
    model = small(MODELS["decoder gpt2"])
    for name in (Head(1, 2), Address(Head(1, 2)), "l1h2", "main L1H2"):
        again = why(model, ids((6,)), name, "last", 3, against=1)
        assert torch.equal(again.pairs, result.pairs)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_reasons_are_saved_and_read(result: LinkReasons, suffix: str, tmp_path: Path) -> None:
    result.save(tmp_path / f"why{suffix}")
    again = lens.load(tmp_path / f"why{suffix}")
    assert torch.equal(again.pairs, result.pairs)
    assert str(again) == str(result)
    assert again.rows() == result.rows()


def test_reasons_are_a_ranked_table(result: LinkReasons) -> None:
    values = [abs(row["value"]) for row in result.rows()]
    assert values == sorted(values, reverse=True)
    assert len(values) == len(result.query_writers) * len(result.key_writers)
    assert result.table(max_rows=3).row_count == 3
    assert "L1H2, query 5 to key 3 against key 1: score" in str(result)
    assert "<table" in result._repr_html_()


def test_what_has_no_reasons_is_refused() -> None:
    model = small(MODELS["decoder gpt2"])
    text = ids((6,))
    with refuses(InputError, "query 2 of L1H0 does not see key 4", "such as 2"):
        why(model, text, "L1H0", 2, 4)
    with refuses(InputError, "does not see key 5"):
        why(model, text, "L1H0", 2, 1, against=5)
    with refuses(InputError, "has no token 9"):
        why(model, text, "L1H0", 9, 1)
    with refuses(InputError, "2 texts", "one text"):
        why(model, ids((6, 4)), "L1H0", 2, 1)
    with refuses(InputError, "L1", "4 heads"):
        why(model, text, "L1", 2, 1)
    with refuses(InputError, "no head L7H0"):
        why(model, text, "L7H0", 2, 1)
    with refuses(InputError, "there is no writer 'L9H9'"):
        why(model, text, "L1H0", 2, 1).of("L9H9", "L0H0")


def test_streams_that_are_no_sums_are_refused() -> None:
    twice = replace(writes(position=Rotary()), residual="reversible")
    reversible = decoder(twice, twice, readout=LanguageHead(tied=False))
    with refuses(InputError, "two residual streams"):
        why(small(reversible), ids((6,)), "L1H0", 2, 1)
    convolved = replace(writes(), convolution=Convolution(width=WIDTH))
    with refuses(InputError, "layer 0 has a convolution"):
        why(small(decoder(convolved, convolved)), ids((6,)), "L1H0", 2, 1)
    with refuses(InputError, "does not simply add to the residual stream"):
        why(outside("bert"), [TEXT], "L1H0", 2, 1)
    with (
        pytest.warns(WrappedModelWarning, match="BloomForCausalLM"),
        refuses(InputError, "links of L1H0 have no scores"),
    ):
        why(outside("bloom"), [TEXT], "L1H0", 2, 1)
