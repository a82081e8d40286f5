"""manyheads generate: go on from prompts, or hold a conversation."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from manyheads.cli.asked import (
    DEFAULT,
    DeviceName,
    DtypeName,
    Flag,
    JsonFile,
    ModelName,
    TextFile,
    check_json,
    open_model,
    read_file,
    write_json,
)
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.decoding.choosing import Choosing
    from manyheads.decoding.written import Written

__all__ = ["Generate"]

Many = tyro.conf.UseAppendAction[tuple[str, ...]]
Number = tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")


@dataclass(frozen=True, slots=True)
class Generate:
    """Write on from one prompt as it comes, or from many at once; or converse.

    For example: manyheads generate gpt2/ --text "Once upon a time" --temperature 0.8 --seed 1
    """

    model: ModelName = DEFAULT
    """The folder of a model that writes, a house model, or a model of the hub: org/name."""

    text: Annotated[
        Many, tyro.conf.arg(aliases=["--prompt"], metavar="TEXT", help_behavior_hint="(repeatable)")
    ] = ()
    """What to go on from; given several times, all are written side by side."""

    file: TextFile = None
    """Texts to go on from, one a line."""

    new_tokens: int = 128
    """How many tokens to write at most."""

    temperature: Annotated[float | None, Number] = None
    """Draw by probability, bolder above 1 and more careful below; else the likeliest is taken."""

    top_k: Annotated[int | None, Number] = None
    """Draw among this many likeliest tokens."""

    top_p: Annotated[float | None, Number] = None
    """Draw among the fewest tokens that together have this probability."""

    min_p: Annotated[float | None, Number] = None
    """Draw among tokens at least this many times as likely as the likeliest."""

    beams: int = 1
    """Search this many texts side by side for the likeliest."""

    repetition_penalty: float = 1.0
    """Above 1, what was said before becomes less likely."""

    stop: Annotated[Many, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(repeatable)")] = ()
    """End a text before this string."""

    stop_id: Annotated[
        tyro.conf.UseAppendAction[tuple[int, ...]],
        tyro.conf.arg(metavar="ID", help_behavior_hint="(repeatable)"),
    ] = ()
    """End a text at this token, in place of the model's own end of text."""

    seed: Annotated[int | None, Number] = None
    """Draw the same tokens every time."""

    logprobs: Flag = False
    """Also show the log-probability of every token."""

    json: JsonFile = None
    """Where prompts, texts, ids, stopped_by and logprobs go as JSON, whole or not at all."""

    chat: Flag = False
    """Speak by the model's chat template; without a prompt, line by line until an empty one."""

    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """With --chat: what the model is told before the conversation."""

    dtype: DtypeName = "as it is"
    """The type to compute in."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Write to the standard output."""
        prompts = self._prompts()
        # What cannot be is said before a model is loaded in vain.
        self._wishes()
        model = open_model(self.model, self.device, self.dtype)
        if self.chat and not prompts:
            self._converse(model)
        elif len(prompts) == 1 and not self._at_the_end():
            self._say(self._stream(model, self._prepared(model, prompts[0])))
        else:
            self._write_all(model, prompts)
        return 0

    def _prompts(self) -> list[str]:
        check_json(self.json)
        prompts = list(self.text)
        if self.file is not None:
            prompts += [line for line in read_file(self.file).splitlines() if line.strip()]
        if not prompts and not self.chat:
            raise InputError("there is no text to go on from", "give --text, --file, or --chat")
        if self.system is not None and not self.chat:
            raise InputError("--system opens a conversation", "give --chat too")
        if self.chat and not prompts and self._at_the_end():
            raise InputError(
                "a conversation is written as it comes",
                "leave out --json, --logprobs and --beams, or give a --text",
            )
        return prompts

    def _at_the_end(self) -> bool:
        """Whether what is asked for is known only when all is written."""
        return self.json is not None or self.logprobs or self.beams > 1

    def _choosing(self) -> "Choosing":
        from manyheads.decoding.choosing import Beams, Greedy, Sample

        narrowed = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        draws = self.temperature is not None or any(map(_given, narrowed.values()))
        if self.beams != 1 and draws:
            raise InputError(
                "beams search for the likeliest text and draw nothing",
                "leave out --beams, or --temperature, --top-k, --top-p and --min-p",
            )
        if self.beams != 1:
            return Beams(width=self.beams)
        if not draws:
            return Greedy()
        if self.temperature is not None and self.temperature <= 0:
            raise InputError(
                f"--temperature {self.temperature:g} leaves nothing to draw",
                "leave it out, and the likeliest token is taken",
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sample(temperature=temperature, **narrowed)  # type: ignore[arg-type]

    def _wishes(self) -> dict[str, Any]:
        from manyheads.decoding.task import Wishes

        wishes: dict[str, Any] = {
            "new_tokens": self.new_tokens,
            "choose": self._choosing(),
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop,
            "stop_ids": self.stop_id or "model",
            "seed": self.seed,
        }
        Wishes(**wishes)
        return wishes

    def _prepared(self, model: Any, prompt: str) -> str | list[int]:
        """The prompt itself, or the ids of a conversation that it opens."""
        return self._turn(model, [("user", prompt)]) if self.chat else prompt

    def _turn(self, model: Any, said: Sequence[tuple[str, str]]) -> list[int]:
        from manyheads.decoding.chat import chat_prompt

        opening = [] if self.system is None else [("system", self.system)]
        messages = [{"role": role, "content": text} for role, text in [*opening, *said]]
        return chat_prompt(model, messages)

    def _stream(self, model: Any, prompt: str | list[int]) -> Iterator[str]:
        from manyheads.decoding.loop import stream

        return stream(model, prompt, **self._wishes())

    def _say(self, pieces: Iterator[str]) -> str:
        """Print what comes, and give it back whole."""
        said = []
        for piece in pieces:
            said.append(piece)
            print(_shown(piece), end="", flush=True)
        print()
        return "".join(said)

    def _converse(self, model: Any) -> None:
        said: list[tuple[str, str]] = []
        while line := _ask():
            said.append(("user", line))
            answer = self._say(self._stream(model, self._turn(model, said)))
            said.append(("assistant", answer))

    def _write_all(self, model: Any, prompts: Sequence[str]) -> None:
        from manyheads.decoding.loop import generate
        from manyheads.progress import Progress

        ready = [self._prepared(model, prompt) for prompt in prompts]
        with Progress("writing", unit="tokens") as bar:

            def tell(done: int, total: int) -> None:
                bar.expect(total)
                bar.advance(done - bar.done)

            all_written = generate(
                model, ready, logprobs=self.logprobs, progress=tell, **self._wishes()
            )
        pairs = list(zip(prompts, all_written, strict=True))
        for prompt, written in pairs:
            _print_plain(prompt, written, model.tokenizer, named=len(prompts) > 1)
        if self.json is not None:
            write_json(self.json, [_row(*pair) for pair in pairs])
            print(f"everything is in {self.json}", file=sys.stderr)


def _given(value: object) -> bool:
    return value is not None


def _ask() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().rstrip("\r\n")


def _row(prompt: str, written: "Written") -> dict[str, Any]:
    found = {"prompt": prompt, **asdict(written)}
    if written.logprobs is None:
        del found["logprobs"]
    return found


def _print_plain(prompt: str, written: "Written", tokenizer: Any, *, named: bool) -> None:
    if named:
        print(f"> {_shown(prompt)}")
    print(_shown(str(written)))
    for token, logprob in zip(written.ids, written.logprobs or (), strict=False):
        letters = tokenizer.decode([token], skip_special_tokens=False)
        print(f"{logprob:9.4f}  {token:>7}  {letters!r}")
    if named:
        print()


def _shown(text: str) -> str:
    """On a terminal, nothing that would move the cursor or change colours."""
    if not sys.stdout.isatty():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
