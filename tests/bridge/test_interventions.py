"""Ablation, patching, gradients and generation of wrapped models against plain torch hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyheads
from manyheads import lens
from manyheads.bridge.structure import linear_weight
from manyheads.bridge.wrapped_model import WrappedModel, wrap
from manyheads.bridge.wrapped_steps import WrappedSteps
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.ragged import Ragged
from manyheads.taps import Head, Site, Sublayer, Tap
from tests.bridge.test_wrapped_model import eager_weights
from tests.bridge.zoo import arguments_of, texts_of, tiny

DECODERS = ("llama", "gpt2", "gemma2", "gpt_oss", "gpt_neox", "deepseek_v3")
TARGETS = [{1: 7, 3: 9}, {2: 11}]


def projection_of(wrapped: WrappedModel, stack: str, layer: int, cross: bool = False) -> nn.Module:
    for facts, index in wrapped.structure.stacks[stack].attentions:
        if index == layer and facts.cross == cross:
            assert facts.projection is not None
            return facts.projection
    raise AssertionError("no such attention")


@contextmanager
def changed_heads(
    projection: nn.Module, heads: int, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Change what an output projection receives, as (..., heads, channels)."""

    def hook(_: nn.Module, args: Any) -> Any:
        split = args[0].unflatten(-1, (heads, -1))
        return (change(split).flatten(-2), *args[1:])

    handle = projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def without(head: int, value: Tensor | float = 0.0) -> Callable[[Tensor], Tensor]:
    def change(split: Tensor) -> Tensor:
        split = split.clone()
        split[..., head, :] = value
        return split

    return change


def recorded(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def record(split: Tensor) -> Tensor:
        seen.append(split)
        return split

    return record


def mean_loss(model: Any, texts: Any, targets: Any = None) -> float:
    """The mean loss per text, as the lens weights it: by the number of answers."""
    losses = []
    for number, text in enumerate(texts):
        arguments = arguments_of(text)
        with torch.no_grad():
            logits = model(**arguments).logits[0].log_softmax(-1)
        if targets is None:
            ids = arguments.get("decoder_input_ids", arguments.get("input_ids"))
            assert ids is not None
            losses += (-logits[:-1].gather(1, ids[0, 1:, None])).flatten().tolist()
        elif isinstance(targets[number], int):
            losses.append(float(-logits[targets[number]]))
        else:
            losses += [float(-logits[at, token]) for at, token in targets[number].items()]
    return float(np.mean(losses))


@pytest.mark.parametrize("name", [*DECODERS, "bert", "albert", "t5", "bart"])
def test_zeroing_a_head_is_zeroing_its_columns(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    targets = TARGETS if "bert" in name else None
    wrapped = wrap(model)
    result = lens.ablate(wrapped, texts, targets=targets, progress=False)
    assert result.baseline == pytest.approx(mean_loss(model, texts, targets), abs=1e-5)
    for head in (Head(0, 1), Head(1, 3)):
        if name == "albert" and head.layer == 0:
            continue
        projection = projection_of(wrapped, wrapped.readout_stack, head.layer)
        # ALBERT has one projection, which a hook would change in both layers.
        expected = None
        if name != "albert":
            with changed_heads(projection, 4, without(head.head)):
                expected = mean_loss(model, texts, targets)
            address = next(each for each in result.addresses if each.head == head)
            assert result.of(address)["metric"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_heads_of_every_stack_can_be_ablated(name: str, stack: str) -> None:
    model, texts = tiny(name), texts_of(name)
    wrapped = wrap(model)
    for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS):
        if stack == "encoder" and sublayer is Sublayer.CROSS:
            continue
        result = lens.ablate(
            wrapped, texts, ["L1H2"], stack=stack, sublayer=sublayer, progress=False
        )
        projection = projection_of(wrapped, stack, 1, sublayer is Sublayer.CROSS)
        with changed_heads(projection, 4, without(2)):
            expected = mean_loss(model, texts)
        address = next(each for each in result.addresses if each.head == Head(1, 2))
        assert result.of(address)["metric"] == pytest.approx(expected, abs=1e-5)


def test_the_mean_of_a_head_replaces_it() -> None:
    model, texts = tiny("llama"), texts_of("llama")
    wrapped = wrap(model)
    projection = projection_of(wrapped, "main", 1)
    seen: list[Tensor] = []
    with changed_heads(projection, 4, recorded(seen)):
        mean_loss(model, texts)
    mean = torch.cat([each[0] for each in seen]).mean(0)[2]
    with changed_heads(projection, 4, without(2, mean)):
        expected = mean_loss(model, texts)
    result = lens.ablate(wrapped, texts, ["L1H2"], "mean", progress=False)
    address = next(each for each in result.addresses if each.head == Head(1, 2))
    assert result.of(address)["metric"] == pytest.approx(expected, abs=1e-5)


def test_a_class_is_lost_without_a_head() -> None:
    model, images = tiny("vit"), texts_of("vit")
    wrapped = wrap(model)
    result = lens.ablate(wrapped, images, ["L0H1"], targets=[0, 1], progress=False)
    with changed_heads(projection_of(wrapped, "main", 0), 4, without(1)):
        expected = mean_loss(model, images, [0, 1])
    address = next(each for each in result.addresses if each.head == Head(0, 1))
    assert result.of(address)["metric"] == pytest.approx(expected, abs=1e-5)


def test_heads_are_removed_one_after_another() -> None:
    model, texts = tiny("gpt2"), texts_of("gpt2")
    wrapped = wrap(model)
    order = ["L1H0", "L0H2", "L1H3"]
    result = lens.ablate_in_order(wrapped, texts, order, progress=False)
    first, second = (projection_of(wrapped, "main", layer) for layer in (0, 1))
    with (
        changed_heads(second, 4, without(0)),
        changed_heads(first, 4, without(2)),
        changed_heads(second, 4, without(3)),
    ):
        expected = mean_loss(model, texts)
    assert result.steps[-1].value == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5", "gemma2"])
def test_gradient_importance_is_that_of_a_hook(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    wrapped = wrap(model)
    result = lens.importance(wrapped, texts[:1], progress=False)
    projection = projection_of(wrapped, wrapped.readout_stack, 1)
    held: list[Tensor] = []

    def keep(split: Tensor) -> Tensor:
        held.append(split.detach().requires_grad_())
        return held[-1]

    arguments = arguments_of(texts[0])
    ids = arguments.get("decoder_input_ids", arguments["input_ids"])
    with changed_heads(projection, 4, keep):
        logits = model(**arguments).logits[0].log_softmax(-1)
    loss = -logits[:-1].gather(1, ids[0, 1:, None]).mean()
    [gradient] = torch.autograd.grad(loss, held)
    expected = (held[0].detach() * gradient).sum(-1).abs().sum((0, 1))
    values = [result.of(each)["importance"] for each in result.addresses if each.head.layer == 1]
    assert values == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert", "t5", "vit"])
def test_patterns_are_the_eager_weights(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    result = lens.patterns(wrap(model), texts)
    for number, text in enumerate(texts):
        weights = eager_weights(model, text)
        for each in result.each:
            if each.text == number:
                address = each.address
                layer = weights[address.stack, address.sublayer][address.head.layer]
                expected = layer[0, address.head.head]
                torch.testing.assert_close(each.weights, expected, rtol=0, atol=1e-5)


def test_patching_a_head_recovers_what_a_hook_recovers() -> None:
    model = tiny("llama")
    clean, corrupted = [[5, 6, 7, 8, 9, 6]], [[5, 6, 20, 8, 9, 6]]
    wrapped = wrap(model)
    metric = lens.LogitDifference(answer=(7,), distractor=(20,))
    result = lens.patch(wrapped, clean, corrupted, metric, progress=False)
    projection = projection_of(wrapped, "main", 1)
    seen: list[Tensor] = []

    def difference(ids: list[list[int]]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor(ids)).logits[0, -1]
        return float(logits[7] - logits[20])

    with changed_heads(projection, 4, recorded(seen)):
        good = difference(clean)
    bad = difference(corrupted)
    with changed_heads(projection, 4, without(3, seen[0][..., 3, :])):
        patched = difference(corrupted)
    expected = (patched - bad) / (good - bad)
    value = result.recovered[lens.Patch("head", 1, 3, None)]
    assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", [*DECODERS, "bart", "t5"])
def test_generation_is_that_of_transformers(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    wrapped = wrap(model)
    prompts = [text[0] if isinstance(text, tuple) else text for text in texts]
    result = manyheads.generate(
        wrapped, prompts, max_new_tokens=6, eos_token_ids=(), progress=False
    )
    for prompt, generation in zip(prompts, result, strict=True):
        ids = torch.tensor([prompt])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=59,
        )[0]
        start = 1 if model.config.is_encoder_decoder else len(prompt)
        assert generation.ids == tuple(written[start:].tolist())


def test_generation_without_a_head() -> None:
    model, prompt = tiny("llama"), torch.tensor([5, 6, 7])
    wrapped = wrap(model)
    site = Site(1, Tap.HEAD_OUTPUT)
    steps = WrappedSteps(wrapped, watch=ActivationEditor({site: without(2)}))
    logits = steps.start(Ragged.from_list([prompt]))
    ids = prompt.tolist()
    for _ in range(4):
        token = logits.argmax(-1)
        ids.append(int(token))
        logits = steps.next(token)
    with changed_heads(projection_of(wrapped, "main", 1), 4, without(2)):
        written = model.generate(
            prompt[None],
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=59,
        )[0]
    assert ids == written.tolist()


def test_kinds_of_a_wrapped_model() -> None:
    result = lens.kinds(wrap(tiny("gpt2")), sequences=4, progress=False)
    assert len(result.labels) == 8
    assert "copying" in result.missing


def test_the_output_norm_is_that_of_the_projection() -> None:
    model, texts = tiny("gpt2"), texts_of("gpt2")
    wrapped = wrap(model)
    projection = projection_of(wrapped, "main", 0)
    seen: list[Tensor] = []
    with changed_heads(projection, 4, recorded(seen)):
        mean_loss(model, texts)
    outputs = torch.cat([each[0] for each in seen])
    weight = linear_weight(projection).unflatten(1, (4, -1))
    norms = torch.einsum("nhd,chd->nhc", outputs, weight).norm(dim=-1).mean(0)
    result = lens.statistics(wrapped, texts, progress=False)
    values = [result.of(each)["output_norm"] for each in result.addresses if each.head.layer == 0]
    assert values == pytest.approx(norms.tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_logit_lens_ends_at_the_logits(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    result = lens.logit_lens(wrap(model), texts, top_k=3)
    for number, text in enumerate(texts):
        with torch.no_grad():
            output = model(**arguments_of(text), output_hidden_states=True)
        last = output.logits[0, -1].log_softmax(-1).topk(3)
        assert result.answers[-1, number].tolist() == last.indices.tolist()
        # The state before the last layer, normed and read by hand.
        norm = getattr(model, "model", getattr(model, "transformer", None))
        norm = norm.norm if hasattr(norm, "norm") else norm.ln_f
        logits = model.lm_head(norm(output.hidden_states[1][0, -1]))
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        expected = logits.log_softmax(-1).topk(3).values
        values = result.log_probabilities[1, number]
        torch.testing.assert_close(values, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_redundancy_and_the_inspection(name: str) -> None:
    wrapped = wrap(tiny(name))
    result = lens.redundancy(wrapped, texts_of(name), progress=False)
    assert set(result.similarity) == {"patterns", "outputs", "weights"}
    if name == "llama":
        inspected = lens.inspect(wrapped, texts_of(name), sequences=4, progress=False)
        assert "WrappedDecoder" in str(inspected.model)
