"""manyheads ablate: what a model loses without each of its heads."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from manyheads.cli import arguments, inputs
from manyheads.cli.options import CorpusEngineOptions, TextOrImageOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, pluralise, without_nan

if TYPE_CHECKING:
    from manyheads.console import TerminalPage
    from manyheads.lens.causal.ablation import Ablation, CumulativeAblation
    from manyheads.lens.causal.gradient_importance import Importance
    from manyheads.lens.inputs.cached_run import HeadScope
    from manyheads.taps import Head

# Heads that the order by gradients names.
MAX_ORDER = 10
REPLACEMENTS = {"zero": "zero", "mean": "their mean", "resample": "their output in another text"}


@dataclass(frozen=True, slots=True)
class Ablate:
    """Ablate every head in turn and measure how the loss changes, with standard errors.

    For example: manyheads ablate gpt2/ --file book.txt --replace-with mean --json ablation.json

    A decoder is measured by the loss of each next token, an encoder by that of masked tokens, an
    embedding model by how similar its vectors stay, and a classifier by the labels of a file of
    rows or of a folder of images. The order that gradients give comes first. Ctrl-C ends the
    measurement and keeps what was measured.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    heads: Annotated[str, arguments.metavar("L2H7,...", "(all)")] = ""
    """The heads to ablate."""

    replace_with: Literal["zero", "mean", "resample"] = "zero"
    """What replaces a head: zero, its mean, or its output in another text."""

    until: Annotated[str, arguments.metavar("TOP")] = ""
    """Measure each head only until it is certain whether it is at the top: "top 10 at 95 %"."""

    greedy: Annotated[int, arguments.metavar("N")] = 0
    """Also ablate N heads one after another, each time the one that matters least."""

    of: arguments.AttentionName = "attention"

    json: arguments.ResultFile = None

    seed: int = 0
    """The seed of masked tokens and of resampling."""

    input: TextOrImageOptions = TextOrImageOptions(tokens=2_000)
    compute: CorpusEngineOptions = CorpusEngineOptions()

    def run(self) -> int:
        """Print the heads by importance; 1 if the measurement was interrupted."""
        from manyheads.console import TerminalPage
        from manyheads.lens import ablate, ablate_greedily, importance
        from manyheads.lens.causal.racing import as_target
        from manyheads.lens.inputs.evaluation_inputs import prepare_inputs
        from manyheads.lens.results.addresses import head_names
        from manyheads.tasks.filtering.ray_lens import ablate_with_ray

        arguments.check_json(self.json)
        self.compute.check()
        if self.compute.ray and self.until:
            raise InputError("--until does not run on --engine ray", "leave out one of them")
        model = self.compute.open_for_engine(self.model)
        heads, scope = self.heads or "all", self._scope(model)
        names, until = head_names(heads), as_target(self.until or None)
        texts, targets = self._inputs(model)
        prepared = prepare_inputs(model, texts, targets=targets, seed=self.seed)
        site: dict[str, Any] = {"stack": scope.stack_name, "sublayer": scope.sublayer}
        site["targets"] = prepared.targets
        options = site | {"metric": prepared.metric, "seed": self.seed}
        options |= {
            "replace_with": self.replace_with,
            "batch_tokens": self.compute.batch_tokens,
        }
        page = TerminalPage()
        page.title(self.model)
        estimate = order = None
        if prepared.metric == "loss":
            estimate = importance(model, prepared.model_inputs, **site)
            page.paragraph(_order(estimate, scope.find(names)))
        if self.compute.ray:
            on_ray = self.compute.ray_options
            ablation = ablate_with_ray(model, prepared.model_inputs, heads, **on_ray, **options)
        else:
            ablation = ablate(model, prepared.model_inputs, heads, until=until, **options)
        if ablation.complete and self.greedy:
            order = ablate_greedily(model, prepared.model_inputs, self.greedy, heads, **options)
        ablation = _merge(ablation, estimate, order)
        _print(page, ablation, order, "text" if self.input.image is None else "image")
        arguments.save_result(self.json, ablation)
        if not ablation.complete:
            print("interrupted before everything was measured", file=sys.stderr)
        return 0 if ablation.complete and (order is None or order.complete) else 1

    def _inputs(self, model: Any) -> inputs.ClassInputs:
        """What to measure on, and its classes if it has any."""
        if self.input.image is not None or not inputs.is_text_classifier(model):
            return self.input.load(model, self.seed)
        if self.input.text or self.input.ids:
            remedy = "give --file with rows of text and label"
            raise InputError("--text and --ids have no label", remedy)
        return inputs.split_labeled(model, self.input.file, self.input.tokens)[0]

    def _scope(self, model: Any) -> "HeadScope":
        """The heads that --heads or --of mean; wrong ones are refused before any measurement."""
        from manyheads.lens.inputs.cached_run import head_scope
        from manyheads.lens.results.addresses import head_names

        names = head_names(self.heads or "all")
        site = {} if self.of == "attention" else arguments.attention_site(self.of)
        scope = head_scope(model, heads=names, **site)
        count = len(scope.find(names))
        if not 0 <= self.greedy <= count:
            raise InputError(f"--greedy must be in 0 to {count}, got {self.greedy}")
        return scope


def _merge(
    ablation: "Ablation", estimate: "Importance | None", order: "CumulativeAblation | None"
) -> "Ablation":
    """Everything as one result by head, which can be saved as such."""
    metadata = ablation.metadata | {"harmful": [str(head) for head, _ in ablation.harmful()]}
    means, errors = dict(ablation.means), dict(ablation.errors)
    if estimate is not None:
        metadata["rank_correlation"] = without_nan(estimate.agreement(ablation))
        for name in ("importance", "predicted"):
            means[name], errors[name] = estimate.means[name], estimate.errors[name]
    if order is not None:
        metadata["greedy"] = {
            "baseline": order.baseline,
            "complete": order.complete,
            "steps": without_nan(order.rows()),
        }
    return replace(ablation, means=means, errors=errors, metadata=metadata)


def _order(estimate: "Importance", heads: Sequence["Head"]) -> str:
    """The heads by the size of their estimated effect."""
    ranked = (address for address, _ in estimate["importance"].ranked())
    names = [str(address) for address in ranked if address.head in heads]
    return f"By gradients, an estimate from one backward pass: {listed(names, MAX_ORDER)}."


def _print(
    page: "TerminalPage", ablation: "Ablation", order: "CumulativeAblation | None", unit: str
) -> None:
    from manyheads.lens.causal.racing import verdict

    metadata = ablation.metadata
    error = metadata["baseline_error"]
    error = "" if error is None else f" ±{error:.2g}"
    page.paragraph(
        f"The {metadata['metric']} of the full model is {ablation.baseline:.4f}{error} over "
        f"{pluralise(metadata['texts'], unit)}. "
        f"Heads are replaced by {REPLACEMENTS[metadata['replace_with']]}, one at a time."
    )
    if "race" in metadata:
        page.paragraph(f"{verdict(metadata['race'], metadata['texts'])}.")
    page.heading("Heads")
    page.show(ablation.ranking())
    if metadata.get("rank_correlation") is not None:
        page.paragraph(
            "Rank correlation (Spearman) with the importance from one backward pass (Michel et "
            f"al.): {metadata['rank_correlation']:.2f}."
        )
    names = ", ".join(f"{head} ({change:+.4f})" for head, change in ablation.harmful())
    page.paragraph(f"Better without, by more than a standard error: {names or 'none'}.")
    if order is not None:
        page.heading("Greedy ablation")
        page.show(order.table())
