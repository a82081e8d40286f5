"""The indirect-object task: prompts that fit the tokenizer, and heads told by their scores."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import attribute_logits
from manyheads.lens.head_kinds.ioi import (
    NAMES,
    ROLES,
    IOIHeads,
    IOIPrompts,
    find_ioi_heads,
    ioi_prompts,
)
from manyheads.models.build import build
from manyheads.models.recipes import gpt2
from manyheads.parts.masks import Causal
from manyheads.taps import Head
from tests.data import tiny
from tests.lens.planted import SHARP, Look, Stream, attention_of, model_of_looks
from tests.messages import refuses

NO_ROLES: dict[str, list[Head]] = {role: [] for role in ROLES}


@pytest.fixture(scope="module")
def model() -> Any:
    words = " ".join(f"went {name} and {name} gave a {name} to the" for name in NAMES)
    tokenizer = train_tokenizer(InMemoryTexts((words,) * 3), 600, progress=False)
    built = build(
        gpt2(width=32, heads=4, layers=3, vocabulary=tokenizer.get_vocab_size(), positions=200),
        seed=0,
    )
    with torch.no_grad():
        for each in built.parameters():
            each.mul_(4.0)
    built.tokenizer = tokenizer
    return built


def test_every_name_is_one_token_and_the_subject_occurs_twice(model: Any) -> None:
    task = ioi_prompts(model, prompts=12, seed=5)
    for clean, corrupted, right, wrong in zip(
        task.clean, task.corrupted, task.objects, task.subjects, strict=True
    ):
        ids = model.tokenizer.encode(clean).ids
        assert ids.count(right) == 1
        assert ids.count(wrong) == 2
        others = model.tokenizer.encode(corrupted).ids
        assert len(others) == len(ids)
        assert right not in others
        assert wrong not in others
        changed = sum(one != other for one, other in zip(ids, others, strict=True))
        assert changed == 3
    assert task == ioi_prompts(model, prompts=12, seed=5)
    assert task != ioi_prompts(model, prompts=12, seed=6)
    # Whoever is named first is the giver as often as not.
    first = [clean.split()[1] == clean.split(", ")[-1].split()[0] for clean in task.clean[::3]]
    assert len(set(first)) == 2


def test_scores_are_those_of_attribution_and_attention(model: Any) -> None:
    task = ioi_prompts(model, prompts=6)
    result = find_ioi_heads(model, task, progress=False)
    direct = attribute_logits(model, task.clean, task.objects, task.subjects)
    np.testing.assert_allclose(result["direct"].means, direct.heads["logit"].means)
    assert result.metadata["logit_difference"] == pytest.approx(float(direct.logits.mean()))
    assert 0 <= result.metadata["accuracy"] <= 1
    assert tuple(result.roles) == ROLES
    # The gradient of a small change is the change.
    assert np.isfinite(result["estimate"].means).all()
    for name in ("to_object", "to_subject"):
        assert ((result[name].means >= 0) & (result[name].means <= 1)).all()


def test_a_tokenizer_that_cuts_names_up_is_refused() -> None:
    built = build(gpt2(width=32, heads=2, layers=1, vocabulary=300, positions=64), seed=0)
    with refuses(
        InputError,
        "this model has no tokenizer: load it from a folder with one, or set model.tokenizer.",
    ):
        ioi_prompts(built)
    built.tokenizer = tiny.tokenizer()
    with refuses(
        InputError,
        "only 0 of 40 names are single tokens of this tokenizer: use one with a larger vocabulary.",
    ):
        ioi_prompts(built)


def name_model(*, backup: bool = False, place: int = 1, sign: int = 1) -> Any:
    """L0H0 moves the name at a place to the end; L1H0 does so if that name is not there yet."""
    stream = Stream(12, 6)
    moves = torch.zeros(6, 6)
    moves[5, place] = SHARP
    look = Look(places=moves)
    built = model_of_looks(stream, [[look, Look()], [look if backup else Look()]], Causal())
    with torch.no_grad():
        built.readout.weight[:, stream.match_slice] = sign * torch.eye(12)
        for layer in (0, 1):
            for head in range(attention_of(built.stack, layer).config.heads):
                if (layer, head) != (0, 0) and not (backup and layer):
                    attention_of(built.stack, layer).output.weight[
                        :, head * 18 : (head + 1) * 18
                    ] = 0
        if backup:
            query = attention_of(built.stack, 1).projections()["query"]
            query[:12, stream.match_slice] = -2 * SHARP * torch.eye(12)
    return built


def name_prompts() -> IOIPrompts:
    names = list(permutations(range(2, 12), 5))[::1300]
    return IOIPrompts(
        clean=tuple((0, one, two, 1, two, 1) for one, two, *_ in names),
        corrupted=tuple((0, *others[:2], 1, others[2], 1) for _, _, *others in names),
        objects=tuple(each[0] for each in names),
        subjects=tuple(each[1] for each in names),
    )


def test_a_name_mover_is_confirmed_by_ablation() -> None:
    result = find_ioi_heads(name_model(), name_prompts(), progress=False)
    assert result.roles["name movers"] == [Head(0, 0)]
    assert result.roles["backup name movers"] == []
    assert result.unconfirmed == []
    assert result["ablation"].of(Head(0, 0)) == pytest.approx(1.0, abs=0.1)
    assert np.isnan(result["ablation"].of(Head(0, 1)))


def test_a_head_that_takes_over_is_a_backup_and_confirms_the_mover() -> None:
    result = find_ioi_heads(name_model(backup=True), name_prompts(), progress=False)
    assert result.roles["name movers"] == [Head(0, 0)]
    assert result.roles["backup name movers"] == [Head(1, 0)]
    # Nothing is lost without the mover, since the other takes over.
    assert result["ablation"].of(Head(0, 0)) < 0.1
    assert result["takeover"].of(Head(0, 0)) > 0.9
    assert result["backup"].of(Head(1, 0)) > 0.9


def test_a_head_that_looks_at_the_subject_suppresses_or_moves_it() -> None:
    for sign, role in ((-1, "subject suppressors"), (1, "subject movers")):
        result = find_ioi_heads(name_model(place=4, sign=sign), name_prompts(), progress=False)
        assert result.roles == {**NO_ROLES, role: [Head(0, 0)]}
        assert result.agreement == {Head(0, 0): 1.0}


def test_a_head_that_writes_nothing_has_no_role() -> None:
    built = name_model()
    with torch.no_grad():
        attention_of(built.stack, 0).output.weight[:] = 0
        built.readout.weight[:, 0] += 1.0
    result = find_ioi_heads(built, name_prompts(), progress=False)
    assert result.roles == NO_ROLES


def test_a_head_has_one_role_and_old_results_open(model: Any) -> None:
    result = find_ioi_heads(model, ioi_prompts(model, prompts=12), progress=False)
    named = [head for heads in result.roles.values() for head in heads]
    assert len(named) == len(set(named)) == len(result.agreement)
    assert all(share > 0.5 for share in result.agreement.values())
    del result.metadata["agreement"]
    assert isinstance(result, IOIHeads)
    assert result.agreement == {}
