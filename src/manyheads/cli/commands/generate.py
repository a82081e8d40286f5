"""manyheads generate: continue prompts, or chat."""

import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from manyheads.cli import arguments, inputs
from manyheads.cli.options import ComputeOptions
from manyheads.errors import InputError
from manyheads.formatting import percent, pluralise

if TYPE_CHECKING:
    from manyheads.decoding.generation_config import Generation, GenerationConfig
    from manyheads.decoding.guard import Guard, GuardReport
    from manyheads.decoding.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue one prompt token by token, or many prompts in one batch, or chat.

    For example: manyheads generate gpt2/ --text "Once upon a time" --temperature 0.8 --seed 1
    """

    PYTHON_NAMES: ClassVar[dict[str, str]] = {
        "stop_strings": "--stop-string",
        "eos_token_ids": "--eos-token-id",
        "action": "--guard-action",
        "threshold": "--guard-threshold",
    }

    model: arguments.OptionalModel = arguments.DEFAULT_MODEL
    """The folder of a model that generates, a bundled model, or a model of the hub: org/name."""

    text: Annotated[arguments.Strings, arguments.repeatable("TEXT", aliases=["--prompt"])] = ()
    """The prompt to continue."""

    ids: arguments.ManyIds = ()
    """The token ids of a prompt; a model without a tokenizer needs them, and ids are printed."""

    file: arguments.TextFile = None
    """A file of prompts separated by blank lines, or one per line without any."""

    max_new_tokens: int = 128
    """Generate at most this many tokens per prompt."""

    temperature: arguments.OptionalFloat = None
    """Sample at this temperature; without sampling options the most likely token is chosen."""

    top_k: arguments.OptionalInt = None
    """Sample from this many of the most likely tokens."""

    top_p: arguments.OptionalFloat = None
    """Sample from the smallest set of tokens whose probability reaches this."""

    min_p: arguments.OptionalFloat = None
    """Sample from tokens at least this many times as likely as the most likely one."""

    num_beams: int = 1
    """Beam search with this many beams."""

    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the new text become less likely."""

    stop_string: arguments.ManyTexts = ()
    """End the text before this string."""

    eos_token_id: Annotated[arguments.Integers, arguments.repeatable("ID")] = ()
    """End the text at this token instead of the model's own end-of-text token."""

    seed: arguments.OptionalInt = None
    """The seed of sampling; without it every run samples other tokens."""

    logprobs: arguments.Flag = False
    """Also print the log-probability of every token."""

    guard: Annotated[str | None, arguments.metavar("MODEL")] = None
    """A classifier that reads every new sentence, and stops or marks what it refuses."""

    refuse: Annotated[str | None, arguments.metavar("RULE")] = None
    """With --guard: the class that is refused, or a rule such as 'score >= 3'."""

    guard_action: Literal["stop", "mark"] = "stop"
    """With --guard: end the text before a refused sentence, or only name it."""

    guard_threshold: arguments.OptionalFloat = None
    """With --guard: the probability from which a class is refused; by default 0.5."""

    json: arguments.JsonFile = None
    """A JSON file for prompts, texts, ids, finish_reason, logprobs and guard; - prints it."""

    chat: arguments.Flag = False
    """Use the model's chat template; without a prompt, chat until an empty line."""

    system: arguments.OptionalText = None
    """With --chat: the system message."""

    compute: ComputeOptions = ComputeOptions()

    def run(self) -> None:
        """Print the texts to the standard output."""
        from manyheads.decoding.generation import stream

        prompts = self._prompts()
        # Wrong options are reported before a model is loaded.
        self._config()
        model = self.compute.open(self.model)
        config = self._config(self._guard())
        if self.chat and not prompts:
            turns: list[tuple[str, str]] = []
            while line := inputs.read_question().rstrip("\r\n"):
                turns.append(("user", line))
                answer = _print_pieces(stream(model, self._conversation(model, turns), config))
                turns.append(("assistant", answer))
        elif len(prompts) == 1 and not self._needs_whole_texts() and model.tokenizer is not None:
            _print_pieces(stream(model, self._input(model, prompts[0]), config))
        else:
            self._generate_all(model, prompts, config)

    def _prompts(self) -> "list[str] | list[list[int]]":
        arguments.check_json(self.json)
        if self.ids:
            if self.text or self.file is not None or self.chat:
                raise InputError("--ids excludes --text, --file and --chat", "give one of them")
            return inputs.read_ids(self.ids)
        prompts = list(self.text)
        if self.file is not None:
            prompts += inputs.read_texts(self.file)
        if not prompts and not self.chat:
            remedy = "give --text, --file, --ids or --chat"
            raise InputError("manyheads generate needs a prompt", remedy)
        if self.system is not None and not self.chat:
            raise InputError("--system needs --chat", "give --chat too")
        if self.chat and not prompts and self._needs_whole_texts():
            raise InputError(
                "an interactive chat cannot use --json, --logprobs or --num-beams",
                "leave them out, or give a --text",
            )
        return prompts

    def _needs_whole_texts(self) -> bool:
        """Whether the output can be printed only once the texts are complete."""
        return self.json is not None or self.logprobs or self.num_beams > 1

    def _sampling(self) -> "Sampling":
        from manyheads.decoding.sampling import BeamSearch, Greedy, Sample

        names = ("temperature", "top_k", "top_p", "min_p")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in options.items() if value is not None}
        if self.num_beams != 1 and options:
            raise InputError(
                "--num-beams cannot be combined with sampling",
                "leave out --num-beams, or --temperature, --top-k, --top-p and --min-p",
            )
        if self.num_beams != 1:
            return BeamSearch(num_beams=self.num_beams)
        arguments.check_temperature(self.temperature)
        return Sample(**options) if options else Greedy()

    def _guard(self) -> "Guard | None":
        if self.guard is None:
            return None
        from manyheads.decoding.guard import Guard

        return Guard(
            self.compute.open(self.guard),
            refuse=self.refuse,
            action=self.guard_action,
            threshold=self.guard_threshold,
        )

    def _config(self, guard: "Guard | None" = None) -> "GenerationConfig":
        from manyheads.decoding.generation_config import GenerationConfig

        if self.guard is None and (self.refuse or self.guard_threshold is not None):
            raise InputError("--refuse and --guard-threshold need --guard", "add --guard MODEL")
        if self.num_beams > 1 and self.stop_string:
            raise InputError("--stop-string cannot be combined with --num-beams", "leave one out")
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            sampling=self._sampling(),
            repetition_penalty=self.repetition_penalty,
            stop_strings=self.stop_string,
            eos_token_ids=self.eos_token_id or "model",
            seed=self.seed,
            logprobs=self.logprobs,
            guard=guard,
        )

    def _input(self, model: Any, prompt: str | list[int]) -> str | list[int]:
        """The prompt itself, or with --chat the ids of the conversation that it begins."""
        if not self.chat or isinstance(prompt, list):
            return prompt
        return self._conversation(model, [("user", prompt)])

    def _conversation(self, model: Any, turns: Sequence[tuple[str, str]]) -> list[int]:
        from manyheads.decoding.chat import chat_prompt

        system = [] if self.system is None else [("system", self.system)]
        messages = [{"role": role, "content": text} for role, text in [*system, *turns]]
        return chat_prompt(model, messages)

    def _generate_all(
        self, model: Any, prompts: "list[str] | list[list[int]]", config: "GenerationConfig"
    ) -> None:
        from manyheads.decoding.generation import generate

        inputs: Any = [self._input(model, prompt) for prompt in prompts]
        generations = generate(model, inputs, config)
        pairs: list[tuple[Any, Generation]] = list(zip(prompts, generations, strict=True))
        for prompt, generation in pairs:
            _print_plain(prompt, generation, model.tokenizer, with_prompt=len(prompts) > 1)
            _print_guard(generation.guard)
        if self.json is not None:
            rows: list[dict[str, Any]] = [
                {"prompt": prompt, **asdict(generation)} for prompt, generation in pairs
            ]
            for row in rows:
                for name in ("logprobs", "guard"):
                    if row[name] is None:
                        del row[name]
            arguments.write_json(self.json, rows)
            if not arguments.prints_json(self.json):
                print(f"saved everything to {self.json}", file=sys.stderr)


def _print_pieces(pieces: "Generator[str, None, Generation]") -> str:
    """Print the pieces as they arrive, and return the whole text."""
    printed: list[str] = []
    while True:
        try:
            piece = next(pieces)
        except StopIteration as ended:
            print()
            _print_guard(ended.value.guard)
            return "".join(printed)
        printed.append(piece)
        print(_printable(piece), end="", flush=True)


def _print_guard(report: "GuardReport | None") -> None:
    """What the guard refused, and its cost, beside the text."""
    if report is None:
        return
    action = "stopped before" if report.action == "stop" else "marked"
    for refusal in report.refused:
        score = f"score {refusal.score:.3g}"
        if refusal.label is not None:
            score = f"{refusal.label} {refusal.probability:.2f}"
        sentence = f"sentence {refusal.sentence} ({score}): {refusal.text}"
        print(f"guard: {action} {sentence}", file=sys.stderr)
    cost = f"{percent(report.fraction)} of the time"
    print(f"guard: {pluralise(report.sentences, 'sentence')} read, {cost}", file=sys.stderr)


def _print_plain(
    prompt: str | list[int], generation: "Generation", tokenizer: Any, *, with_prompt: bool
) -> None:
    if with_prompt:
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        print(f"> {_printable(text)}")
    print(_printable(str(generation)))
    for token, logprob in zip(generation.ids, generation.logprobs or (), strict=False):
        text = ""
        if tokenizer is not None:
            text = repr(tokenizer.decode([token], skip_special_tokens=False))
        print(f"{logprob:9.4f}  {token:>7}  {text}".rstrip())
    if with_prompt:
        print()


def _printable(text: str) -> str:
    """On a terminal, the text without characters that move the cursor or change colors."""
    if not sys.stdout.isatty():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text
    )
