"""From prompts to texts: `generate` all at once, `stream` one piece by piece."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, overload

from manyheads.cache import Fixed, Growing
from manyheads.decoding.beams import Search
from manyheads.decoding.choosing import Beams, Choosing, Greedy
from manyheads.decoding.prompts import Prompts, encoder_of
from manyheads.decoding.task import Task, Wishes
from manyheads.decoding.writing import Writing
from manyheads.decoding.written import Written
from manyheads.errors import ConfigError

__all__ = ["generate", "stream"]

Ids = Literal["model"] | Sequence[int]
LIKELIEST = Greedy()


@overload
def generate(
    model: Any,
    prompts: str,
    *,
    new_tokens: int = ...,
    choose: Choosing = ...,
    repetition_penalty: float = ...,
    stop: str | Sequence[str] = ...,
    stop_ids: Ids = ...,
    never: Ids = ...,
    start_id: Literal["model"] | int = ...,
    seed: int | None = ...,
    logprobs: bool = ...,
    cache: Growing | Fixed = ...,
    compiled: bool = ...,
    progress: Callable[[int, int], None] | None = ...,
) -> Written: ...
@overload
def generate(
    model: Any,
    prompts: Prompts,
    *,
    new_tokens: int = ...,
    choose: Choosing = ...,
    repetition_penalty: float = ...,
    stop: str | Sequence[str] = ...,
    stop_ids: Ids = ...,
    never: Ids = ...,
    start_id: Literal["model"] | int = ...,
    seed: int | None = ...,
    logprobs: bool = ...,
    cache: Growing | Fixed = ...,
    compiled: bool = ...,
    progress: Callable[[int, int], None] | None = ...,
) -> list[Written]: ...


def generate(
    model: Any,
    prompts: str | Prompts,
    *,
    new_tokens: int = 128,
    choose: Choosing = LIKELIEST,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    stop_ids: Ids = "model",
    never: Ids = "model",
    start_id: Literal["model"] | int = "model",
    seed: int | None = None,
    logprobs: bool = False,
    cache: Growing | Fixed = Growing(),
    compiled: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written | list[Written]:
    """Go on from prompts, or answer them where the model is a `Seq2Seq`.

    One text gives one `Written`; a list of texts, a list of lists or tensors of ids, a (batch,
    length) tensor or a `Ragged` gives a list, in order. Prompts of all lengths run together without
    padding, and a text that stops leaves the batch.

    `choose` is `Greedy()`, `Sample(...)` or `Beams(...)`, whatever the model's folder recommends.
    With a `seed` a prompt gives the same tokens at the same place of any batch. `stop` are strings
    that end a text, wherever tokens begin, and `stop_ids` tokens that do. "model" means what its
    folder says: `stop_ids` its end of text, `never` the tokens that must not come, `start_id` what
    a `Seq2Seq` starts from. `repetition_penalty` lowers what was read or written before.
    `logprobs` are those of the model itself, before penalties and temperature. `progress` is told
    how many tokens of how many were chosen. On CUDA a step is recorded once and replayed;
    `compiled` has it compiled first, which takes half a minute and pays for many texts at once.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> [written] = generate(model, [[5, 6, 7]], new_tokens=4)
    >>> len(written.ids), written.stopped_by
    (4, 'length')
    """
    wishes = Wishes(
        new_tokens=new_tokens,
        choose=choose,
        repetition_penalty=repetition_penalty,
        stop=_strings(stop),
        stop_ids=stop_ids,
        never=never,
        start_id=start_id,
        seed=seed,
        logprobs=logprobs,
        cache=cache,
        compiled=compiled,
    )
    task = Task(model, [prompts] if isinstance(prompts, str) else prompts, wishes)
    work = _work(task)
    for _ in work.run():
        if progress is not None:
            progress(work.chosen, len(task.prompts) * new_tokens)
    written = work.written()
    return written[0] if isinstance(prompts, str) else written


def stream(
    model: Any,
    prompt: str | Sequence[int],
    *,
    new_tokens: int = 128,
    choose: Choosing = LIKELIEST,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    stop_ids: Ids = "model",
    never: Ids = "model",
    start_id: Literal["model"] | int = "model",
    seed: int | None = None,
    logprobs: bool = False,
    cache: Growing | Fixed = Growing(),
    compiled: bool = False,
) -> Generator[str, None, Written]:
    """The text that `generate` would write, in pieces as it comes.

    A piece holds whole letters and no part of a stop string; joined they are the text. What the
    generator returns, as `written = yield from stream(...)`, is the whole `Written`.
    """
    wishes = Wishes(
        new_tokens=new_tokens,
        choose=choose,
        repetition_penalty=repetition_penalty,
        stop=_strings(stop),
        stop_ids=stop_ids,
        never=never,
        start_id=start_id,
        seed=seed,
        logprobs=logprobs,
        cache=cache,
        compiled=compiled,
    )
    if wishes.searches:
        raise ConfigError(
            "beams change their mind about a text until it ends", "use generate, or Greedy()"
        )
    task = Task(model, [prompt], wishes)
    encoder_of(model, "a stream of text")
    return _pieces(Writing(task, piecewise=True))


def _pieces(writing: Writing) -> Generator[str, None, Written]:
    [draft] = writing.drafts
    given = 0
    for _ in writing.run():
        yield from filter(None, draft.pieces[given:])
        given = len(draft.pieces)
    yield from filter(None, draft.pieces[given:])
    return writing.written()[0]


def _work(task: Task) -> Search | Writing:
    choose = task.wishes.choose
    # With nothing to write there is nothing to search.
    if isinstance(choose, Beams) and choose.width > 1 and task.wishes.new_tokens:
        return Search(task, choose)
    return Writing(task, piecewise=bool(task.stop_strings))


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
