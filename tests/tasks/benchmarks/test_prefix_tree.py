"""Every token that texts share is read once, and every target is read where its text says."""

from hypothesis import given
from hypothesis import strategies as st

from manyheads.tasks.benchmarks.prefix_tree import (
    MIN_SHARED,
    Continuation,
    Pass,
    common_length,
    plan_passes,
    segment_tree,
)

# Few tokens, so that texts share beginnings.
TOKENS = st.integers(0, 1)
TEXTS = st.lists(TOKENS, min_size=1, max_size=24).map(tuple)
CONTINUATIONS = st.lists(st.builds(Continuation, TEXTS, TEXTS), max_size=12)
PREFIX = tuple(range(20))


def all_passes(blocks: list[list[Pass]]) -> list[Pass]:
    return [group for block in blocks for root in block for group in root.walk()]


def texts_of(passes: list[Pass], before: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The texts that the passes spell, each segment after that of its parent."""
    texts = []
    for group in passes:
        own = [
            before[parent] + segment.ids
            for parent, segment in zip(group.parents, group.segments, strict=True)
        ]
        texts += own + texts_of(group.children, own)
    return texts


@given(TEXTS, TEXTS)
def test_common_length_is_that_of_the_common_prefix(first: tuple, second: tuple) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert first[length : length + 1] != second[length : length + 1] or length == len(first)


@given(CONTINUATIONS, st.integers(1, 40), st.booleans())
def test_every_target_is_read_once_after_its_own_text(
    continuations: list[Continuation], batch_tokens: int, shared: bool
) -> None:
    targets: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for block in plan_passes(continuations, batch_tokens, shared=shared):
        pending = [(group, [()] * 99) for group in block]
        for group, before in pending:
            own = [
                before[parent] + segment.ids
                for parent, segment in zip(group.parents, group.segments, strict=True)
            ]
            pending += [(child, own) for child in group.children]
            for text, segment in zip(own, group.segments, strict=True):
                assert len(text) == segment.end
                for read in segment.reads:
                    seen = text[: segment.start + read.row + 1]
                    targets.setdefault(read.request, []).append((seen, read.target))
    assert set(targets) == set(range(len(continuations)))
    for request, reads in targets.items():
        item = continuations[request]
        whole, first = item.context + item.tokens, len(item.context)
        expected = [(whole[:at], whole[at]) for at in range(first, len(whole))]
        assert sorted(reads) == sorted(expected)


def test_a_context_with_many_continuations_is_read_once() -> None:
    items = [Continuation(PREFIX, (50 + index, 3)) for index in range(4)]
    passes = all_passes(list(plan_passes(items, 1024)))
    assert sum(group.tokens for group in passes) == len(PREFIX) + 4
    unshared = all_passes(list(plan_passes(items, 1024, shared=False)))
    assert sum(group.tokens for group in unshared) == 4 * (len(PREFIX) + 1)


def test_answers_of_one_token_need_the_context_alone() -> None:
    items = [Continuation(PREFIX, (index,)) for index in range(4)]
    [block] = plan_passes(items, 1024)
    assert [group.tokens for group in all_passes([block])] == [len(PREFIX)]
    assert {read.row for read in block[0].reads()} == {len(PREFIX) - 1}


def test_examples_before_all_questions_are_read_once_for_every_block() -> None:
    questions = [(*PREFIX, *range(100 * n, 100 * n + 10)) for n in range(1, 9)]
    items = [Continuation(question, (1,)) for question in questions]
    together = all_passes(list(plan_passes(items, 1024)))
    assert sum(group.tokens for group in together) == len(PREFIX) + 8 * 10
    # Blocks of at most 8 times 5 tokens: two questions each.
    apart = list(plan_passes(items, 5))
    assert len(apart) == 4
    assert sum(group.tokens for group in all_passes(apart)) == 4 * len(PREFIX) + 8 * 10


def test_short_beginnings_are_not_split_off() -> None:
    short = tuple(range(MIN_SHARED - 1))
    assert len(segment_tree([(*short, 50), (*short, 60)])) == 2
    [tree] = segment_tree([(*short, 7, 50), (*short, 7, 60)])
    assert len(tree.children) == 2


def test_passes_have_at_most_a_batch_of_tokens() -> None:
    items = [Continuation((index, *range(9)), (1,)) for index in range(50, 80)]
    passes = all_passes(list(plan_passes(items, 25)))
    assert all(group.tokens <= 25 for group in passes)
    assert sum(group.tokens for group in passes) == 300
