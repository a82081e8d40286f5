"""How likely continuations are, with what contexts share read once, and without some heads.

A native decoder reads a tree of prefixes with a cache that branches where texts part. For versions
without some heads it resumes at the lowest layer that differs, in every pass of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyheads.bridge.automatic import wrapping_models
from manyheads.cache import Cache, DynamicCache
from manyheads.encoding.text_reader import check_continues
from manyheads.errors import ConfigError, InputError
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.causal.evaluate import HeadSet, default_batch_tokens, group_by
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.inputs import cached_run
from manyheads.models import build, decoder
from manyheads.models.model_interface import ModelInputs, repeat_batch
from manyheads.parts.linear_layout import column_major_weights
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Site, Tap
from manyheads.tasks.benchmarks.prefix_tree import Continuation, Pass, plan_passes

# Logits that are in memory at once; they are many times as large as the states that they are of.
LOGITS = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class ContinuationScores:
    """For each version the log-probability of each continuation, and if it is the most likely."""

    logprobs: Float[Tensor, "v b"]
    greedy: Bool[Tensor, "v b"]


@wrapping_models
def score_continuations(
    model: build.Model,
    continuations: Sequence[Continuation],
    versions: Sequence[HeadSet] = (),
    *,
    without: HeadSet = (),
    replace_with: Replacement = "zero",
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ContinuationScores:
    """The scores of all continuations: without the heads `without`, then for versions with fewer.

    Each version names the heads that it lacks besides. Equal contexts, and beginnings that contexts
    share, are read once.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> questions = [Continuation((1, 2, 3), (4,)), Continuation((1, 2, 3), (5, 6))]
    >>> score_continuations(model, questions, progress=False).logprobs.shape
    torch.Size([1, 2])
    """
    check_continues(model)
    limit = default_batch_tokens(model) if batch_tokens is None else batch_tokens
    shape = (1 + len(versions), len(continuations))
    scores = ContinuationScores(
        torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
    )
    blocks = list(plan_passes(continuations, limit, shared=branches_cache(model)))
    sizes = [group.tokens for block in blocks for root in block for group in root.walk()]
    run = _Run(model, tuple(versions), without, scores, limit)
    if versions or without:
        texts = [list(text) for text in sorted({item.text for item in continuations})]
        run.ablation = head_ablation(model, texts, replace_with)
    total = sum(sizes) * shape[0]
    assert model.readout is not None, "it predicts tokens"
    tables = [
        table for table in (model.readout.vectors(model.table),) if isinstance(table, nn.Parameter)
    ]
    bar = Progress("scoring", total=total, unit="tokens", enabled=progress)
    laid_out = column_major_weights(model, total, *tables)
    with bar, build.eval_mode(model), laid_out, torch.inference_mode():
        for block in blocks:
            run.score(block, bar)
    return scores


def head_ablation(
    model: build.Model, texts: Sequence[Sequence[int]], replace_with: Replacement
) -> HeadAblation:
    """What replaces heads in any text: zeros, or their mean over these."""
    if replace_with == "resample":
        raise InputError(
            'replace_with="resample" is not for benchmarks, whose texts share their beginnings',
            'use "zero" or "mean"',
        )
    return HeadAblation.of(model, list(texts), replace_with=replace_with, progress=False)


def branches_cache(model: build.Model) -> bool:
    """Whether texts that begin alike can continue from one cache."""
    if not isinstance(model, decoder.Decoder) or not model.native:
        return False
    if model.stack.rotation_switch is not None or model.config.stack.halting is not None:
        return False
    try:
        decoder.check_decodes(model.config.stack)
    except ConfigError:
        return False
    return True


@dataclass(slots=True, eq=False)
class _Run:
    """A model with some heads and without, and the table of scores that it fills."""

    model: build.Model
    versions: tuple[HeadSet, ...]
    without: HeadSet
    scores: ContinuationScores
    batch_tokens: int
    ablation: HeadAblation | None = None
    # The residual stream that enters a layer in a pass.
    entries: dict[tuple[int, int], Ragged] = field(default_factory=dict)

    def score(self, roots: Sequence[Pass], bar: Progress) -> None:
        """All versions of the passes of one block."""
        shared = branches_cache(self.model)
        first_layers = {
            index: min(head.layer for head in heads)
            for index, heads in enumerate(self.versions)
            if heads
        }
        layers = sorted(set(first_layers.values())) if shared else []
        for root in roots:
            self._read(root, None, layers, bar)
        for index in set(range(len(self.versions))) - set(first_layers):
            for group in chain(*(root.walk() for root in roots)):
                self._copy_first(group, 1 + index)
        order = sorted(first_layers, key=first_layers.__getitem__)
        largest = max(group.tokens for root in roots for group in root.walk())
        copies = max(1, self.batch_tokens // largest) if shared else 1
        for indices in group_by(first_layers.__getitem__, order, copies):
            start = first_layers[indices[0]]
            sets = [(*self.versions[index], *self.without) for index in indices]
            editor = self._editor(sets, start)
            for root in roots:
                if shared:
                    self._resume(root, 0, None, start, editor, indices, bar)
                else:
                    self._fill(root, self._run_texts(root, editor), [1 + indices[0]])
                    bar.advance(root.tokens)
        self.entries.clear()

    def _editor(
        self, sets: Sequence[HeadSet], start: int, record: Sequence[Site] = ()
    ) -> cached_run.ActivationEditor:
        """Replaces one set of heads in each copy of a batch, from a layer on."""
        if self.ablation is None:
            return cached_run.ActivationEditor({}, record)
        layers = sorted({head.layer for heads in sets for head in heads if head.layer >= start})
        replacements = self.ablation.replacement.of(range(0), layers)
        return cached_run.ActivationEditor(self.ablation.edits(sets, layers, replacements), record)

    def _ids(self, group: Pass) -> Ragged:
        device = next(self.model.parameters()).device
        return Ragged.from_list([torch.tensor(own.ids) for own in group.segments]).to(device)

    def _read(self, group: Pass, cache: Cache | None, layers: Sequence[int], bar: Progress) -> None:
        """The first version: from the tokens to the scores, and the same for what continues."""
        if not branches_cache(self.model):
            self._fill(group, self._run_texts(group, self._editor([self.without], 0)), [0])
            bar.advance(group.tokens)
            return
        model, ids = self.model, self._ids(group)
        assert isinstance(model, decoder.Decoder)
        own = self._new_cache(group) if cache is None else cache.branch(group.parents)
        sites = {layer: cached_run.entry_sites(model.stack, layer) for layer in layers}
        watch = None
        if sites or self.without:
            watch = self._editor([self.without], 0, list(chain(*sites.values())))
        plan = own.plan(ids.lengths)
        x = model.embedding(ids, plan.positions)
        hidden, _ = model.stack(x, positions=plan.positions, cache=own, plan=plan, watch=watch)
        own.finish(plan)
        for layer, entry in sites.items():
            assert watch is not None, "it records the entries"
            streams = [watch[site] for site in entry]
            self.entries[id(group), layer] = cached_run.join_streams(streams)
        self._fill(group, hidden, [0])
        bar.advance(group.tokens)
        for child in group.children:
            self._read(child, own, layers, bar)

    def _resume(
        self,
        group: Pass,
        before: int,
        cache: Cache | None,
        start: int,
        editor: cached_run.ActivationEditor,
        indices: Sequence[int],
        bar: Progress,
    ) -> None:
        """Versions side by side, from the lowest layer that differs; `before` sequences came."""
        model = self.model
        assert isinstance(model, decoder.Decoder)
        if cache is None:
            own = self._new_cache(group)
        else:
            copies = range(len(indices))
            own = cache.branch([copy * before + row for copy in copies for row in group.parents])
        x = repeat_batch(self.entries[id(group), start], len(indices))
        plan = own.plan(x.lengths)
        hidden, _ = model.stack.resume(x, start, cache=own, plan=plan, watch=editor)
        own.finish(plan)
        self._fill(group, hidden, [1 + index for index in indices])
        bar.advance(group.tokens * len(indices))
        for child in group.children:
            self._resume(child, len(group.segments), own, start, editor, indices, bar)

    def _new_cache(self, group: Pass) -> Cache:
        assert isinstance(self.model, decoder.Decoder)
        return self.model.new_cache(DynamicCache(initial_size=group.longest))

    def _run_texts(self, group: Pass, editor: cached_run.ActivationEditor) -> Ragged:
        """What the readout receives of whole texts, without a cache."""
        final = Site(-1, Tap.FINAL, stack=self.model.readout_stack)
        editor = cached_run.ActivationEditor(editor.edits, [final])
        self.model.run_hidden(ModelInputs(ids=self._ids(group)), editor)
        return editor[final]

    def _copy_first(self, group: Pass, version: int) -> None:
        """A version that lacks nothing more has the scores of the first."""
        requests = [read.request for read in group.reads()]
        self.scores.logprobs[version, requests] = self.scores.logprobs[0, requests]
        self.scores.greedy[version, requests] = self.scores.greedy[0, requests]

    def _fill(self, group: Pass, hidden: Ragged, versions: Sequence[int]) -> None:
        """Add the log-probabilities of the tokens that are read in a pass."""
        reads = sorted(group.reads(), key=lambda read: read.row)
        if not reads:
            return
        readout, table = self.model.readout, self.model.table
        assert readout is not None, "it predicts tokens"
        device, tokens = hidden.device, hidden.lengths.total // len(versions)
        packed = torch.tensor([(read.row, read.target, read.request) for read in reads])
        rows, place = packed[:, 0].unique(return_inverse=True)
        targets, requests = packed[:, 1], packed[:, 2]
        step = max(1, LOGITS // readout.vectors(table).shape[0])
        for copy, version in enumerate(versions):
            for first in range(0, len(rows), step):
                states = hidden.values[(rows[first : first + step] + copy * tokens).to(device)]
                logits = readout.logits(states, table).float()
                start, stop = torch.searchsorted(
                    place, torch.tensor([first, first + step])
                ).tolist()
                own, target = place[start:stop] - first, targets[start:stop]
                likely = logits.logsumexp(-1).cpu(), logits.argmax(-1).cpu()
                values = logits[own.to(device), target.to(device)].cpu() - likely[0][own]
                request = requests[start:stop]
                self.scores.logprobs[version].index_add_(0, request, values.double())
                self.scores.greedy[version, request[likely[1][own] != target]] = False
