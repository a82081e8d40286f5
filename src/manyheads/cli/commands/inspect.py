"""manyheads inspect: what every head of a model does."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import arguments, inputs
from manyheads.cli.options import AnnotatedTextOptions, CorpusEngineOptions, TextOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, number, percent, pluralise

if TYPE_CHECKING:
    from manyheads.console import TerminalPage
    from manyheads.lens.inspection import Inspection
    from manyheads.lens.measure.watcher import Activation

# Tokens per batch on a CPU: the progress bar moves often and Ctrl-C loses little.
CPU_BATCH_TOKENS = 1024
MAX_SINKS = 10
TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Inspect:
    """Inspect every head: statistics, kinds, sinks, dead and duplicate heads.

    For example: manyheads inspect gpt2/ --file book.txt --json gpt2.json

    The default model is house-gpt, the default text a few short articles, or random tokens for a
    model without a tokenizer. Statistics come first, kinds and duplicates after them. Ctrl-C ends
    the measurement and keeps what was measured.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    json: arguments.ResultFile = None

    seed: int = 0
    """The seed of the random texts that head kinds are tested on."""

    remeasure: arguments.Flag = False
    """Measure the kinds again, even if the cache has them."""

    image: Annotated[tuple[Path, ...], arguments.metavar("IMAGE")] = ()
    """Images to read, or folders of them, for a vision model; by default random images."""

    audio: Annotated[arguments.Paths, arguments.repeatable("WAV")] = ()
    """Recordings to listen to, for Whisper."""

    stream: arguments.Flag = False
    """Read the layers one by one from disk, for a model larger than memory; measures statistics,
    sinks and dead heads."""

    context_parallel: arguments.Flag = False
    """Share the tokens of every text among the processes that torchrun started, for texts longer
    than one device can hold; measures statistics, sinks and dead heads."""

    input: TextOptions = TextOptions()
    annotated: AnnotatedTextOptions = AnnotatedTextOptions()
    compute: CorpusEngineOptions = CorpusEngineOptions()

    def run(self) -> int:
        """Print the page and save the file, if any; 1 if the measurement was interrupted."""
        from manyheads.console import TerminalPage
        from manyheads.lens import inspect
        from manyheads.lens.inputs.texts import large_batch_tokens

        arguments.check_json(self.json)
        arguments.check_minimum("--tokens", self.input.tokens, 1)
        self.compute.check()
        if self.context_parallel:
            return self._run_shared()
        if self.stream:
            return self._run_streamed()
        model = self.compute.open_for_engine(self.model)
        batch_tokens = self.compute.batch_tokens
        if batch_tokens is None and next(model.parameters()).device.type == "cpu":
            batch_tokens = min(CPU_BATCH_TOKENS, large_batch_tokens(model))
        texts = self._inputs(model)
        measured = (
            self._measure_on_workers(model, texts, batch_tokens) if self.compute.ray else None
        )
        page = TerminalPage(table_width=TABLE_WIDTH)
        page.title(self.model)
        inspection = inspect(
            model,
            texts,
            measured=measured,
            syntax=self.annotated.syntax,
            coreference=self.annotated.coreference or None,
            seed=self.seed,
            remeasure=self.remeasure,
            batch_tokens=batch_tokens,
            on_statistics=partial(_print_statistics, page, tokenizer=model.tokenizer),
        )
        _print_rest(page, inspection)
        arguments.save_result(self.json, inspection)
        return 0 if inspection.complete else 1

    def _measure_on_workers(self, model: Any, texts: Any, batch_tokens: int | None) -> Any:
        """The statistics by Ray; kinds, which need no corpus, and duplicates stay here."""
        from manyheads.lens.head_kinds.head_tests import OFFSETS
        from manyheads.lens.inputs.synthetic import default_texts
        from manyheads.tasks.filtering.ray_lens import statistics_with_ray

        return statistics_with_ray(
            model,
            default_texts(model, self.seed) if texts is None else texts,
            offsets=() if model.reads_images else OFFSETS,
            batch_tokens=batch_tokens,
            **self.compute.ray_options,
        )

    def _run_shared(self) -> int:
        from manyheads.console import TerminalPage
        from manyheads.devices import resolve_device
        from manyheads.lens import inspect
        from manyheads.train.distributed import join_processes

        self._check_measures_statistics("--context-parallel")
        if self.stream:
            raise InputError("--stream reads in one process", "leave --context-parallel out")
        device = str(resolve_device(self.compute.device, "--device"))
        with join_processes("ddp", device) as processes:
            if processes.is_single:
                raise InputError(
                    "--context-parallel needs several processes, and there is one",
                    "start it with torchrun --nproc-per-node 2 -m manyheads inspect ...",
                )
            compute = replace(self.compute, device=str(processes.device))
            model = compute.open(self.model)
            inspection = inspect(
                model,
                self._inputs(model),
                seed=self.seed,
                batch_tokens=compute.batch_tokens,
                context_parallel=True,
            )
            if not processes.is_main:
                return 0
            page = TerminalPage(table_width=TABLE_WIDTH)
            page.title(self.model)
            _print_statistics(page, inspection, tokenizer=model.tokenizer)
            _print_rest(page, inspection)
            arguments.save_result(self.json, inspection)
        return 0 if inspection.complete else 1

    def _check_measures_statistics(self, option: str) -> None:
        """Refuse options of kinds, which only a whole model in one process can measure."""
        if self.annotated.syntax or self.annotated.coreference:
            raise InputError(
                f"--syntax and --coreference find kinds of heads, which {option} does not measure",
                f"leave them out, or inspect without {option}",
            )
        if self.compute.ray:
            raise InputError(
                f"{option} and --engine ray are two ways to divide the work",
                "leave one of them out",
            )

    def _run_streamed(self) -> int:
        import torch

        from manyheads.checkpoints.deferred.layer_stream import LayerStream
        from manyheads.console import TerminalPage
        from manyheads.devices import resolve_device
        from manyheads.lens import inspect_from_folder

        self._check_measures_statistics("--stream")
        device = resolve_device(self.compute.device, "--device")
        # Without instructions for it, a CPU computes hundreds of times as long in half precision.
        dtype = torch.float32 if device.type == "cpu" else None
        stream = LayerStream(self.model, dtype=dtype, device=device)
        inspection = inspect_from_folder(stream, self._inputs(stream.model), seed=self.seed)
        page = TerminalPage(table_width=TABLE_WIDTH)
        page.title(self.model)
        _print_statistics(page, inspection, tokenizer=stream.model.tokenizer)
        _print_rest(page, inspection)
        arguments.save_result(self.json, inspection)
        return 0 if inspection.complete else 1

    def _inputs(self, model: Any) -> Any:
        """What to read; None for the defaults."""
        if self.image and (self.input.has_texts or self.audio):
            raise InputError("--image excludes --audio, --text, --file and --ids", "give one")
        if self.audio and self.input.has_texts:
            raise InputError("--audio excludes --text, --file and --ids", "give one of them")
        if self.audio:
            from manyheads.bridge.speech import speech_inputs

            return speech_inputs(model, self.audio)
        if self.image:
            return inputs.load_images(model, self.image, self.input.tokens)
        return self.input.load_texts(model) if self.input.has_texts else None


def _print_statistics(page: "TerminalPage", inspection: "Inspection", *, tokenizer: Any) -> None:
    """What is known before the kinds are."""
    metadata = inspection.statistics.metadata
    vision = inspection.model.type == "Vision"
    own = " that come with manyheads" if tokenizer is not None else " of random tokens"
    own = own if inspection.metadata["default_texts"] and not vision else ""
    noun = "image" if vision else "text"
    if vision and inspection.metadata["default_texts"]:
        noun = "random image"
    page.paragraph(
        f"{inspection.model} Measured on {pluralise(metadata['texts'], noun)}{own}, "
        f"{pluralise(metadata['tokens'], 'patch' if vision else 'token')}."
    )
    page.heading("Statistics")
    page.console.print(inspection.table(max_rows=None))
    page.heading("Sinks and largest activations")
    above, sinks = percent(metadata["sink_above"]), inspection.sinks
    heads = listed([f"{head} {percent(weight)}" for head, weight in sinks], MAX_SINKS)
    page.paragraph(
        f"Heads with more than {above} of the weight on the first token of some text, "
        f"with their mean over all texts: {heads}."
        if sinks
        else f"No head puts more than {above} of its weight on the first token of a text."
    )
    if inspection.activations:
        measured = inspection.statistics
        page.paragraph(
            f"Sink share: {percent(measured.sink_share)} of heads, mean over texts. Largest "
            f"activation: {number(measured.largest_activation)}, mean over layers "
            f"{number(measured.mean_activation)}."
        )
    for activation in inspection.activations:
        page.paragraph(_activation(activation, tokenizer))
    # The kinds take longer, and a reader of a pipe waits too.
    page.console.file.flush()


def _print_rest(page: "TerminalPage", inspection: "Inspection") -> None:
    """Kinds, dead and duplicate heads."""
    page.heading("Kinds")
    if inspection.kinds is None:
        page.paragraph("Not measured.")
    else:
        page.paragraph(str(inspection.kinds).splitlines()[0].capitalize() + ".")
        reason = inspection.kinds.missing.get("coreference", "")
        if "coreference" in inspection.kinds.scores and reason:
            page.paragraph(f"No coreference labels: {reason}.")
        page.console.print(inspection.kinds_table(max_rows=None))
    page.heading("Dead heads")
    for line in str(inspection.dead).splitlines():
        page.paragraph(line)
    page.paragraph(
        "Judged by entropy and norm; manyheads ablate measures the loss without each head.", "dim"
    )
    page.heading("Duplicate heads")
    if not inspection.redundancy:
        page.paragraph("Not measured.")
    for line in "\n".join(map(str, inspection.redundancy)).splitlines():
        page.paragraph(line)
    if not inspection.complete:
        page.paragraph("Interrupted: what is missing was not measured.", "bold red")


def _activation(activation: "Activation", tokenizer: Any) -> str:
    stack = "" if activation.stack == "main" else f"{activation.stack} "
    token = ""
    if activation.token is not None and tokenizer is not None:
        token = f" ({tokenizer.decode([activation.token], skip_special_tokens=False)!r})"
    massive = ", massive" if activation.massive else ""
    return (
        f"after {stack}layer {activation.layer}: {activation.largest:.1f} in channel "
        f"{activation.channel} at position {activation.position}{token} of text {activation.text}, "
        f"median {activation.median:.2g}{massive}"
    )
