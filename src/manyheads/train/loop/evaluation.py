"""Evaluation during training: loss on held-out data, and telemetry of attention heads.

Telemetry is one forward pass of a few short sequences; only that pass forms patterns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.batch import Batch
from manyheads.data.stream import Stream
from manyheads.errors import ConfigError
from manyheads.models import build, decoder, seq2seq, vision
from manyheads.parts.gates import GATE_TAPS
from manyheads.parts.positions import Axial, Learned
from manyheads.progress import interrupt_requested
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap
from manyheads.train import distributed
from manyheads.train.context_parallel import own_part
from manyheads.train.loop.train_step import micro_batch_generator
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Validation:
    """One epoch over held-out batches, with the same masks each time.

    If interrupted, it ends with the batches seen so far and reports the `fraction` of all batches.
    `bytes_per_token` is for bits per byte, where every token is predicted; 0 leaves them out.
    `name` is that of the data, "" where there are no others.
    """

    name: str = ""
    stream: Stream
    objective: Objective
    processes: distributed.ProcessGroup
    seed: int
    half: bool
    bytes_per_token: float = 0.0

    def run(self, wrapper: distributed.ModelWrapper) -> dict[str, float]:
        """Loss per target in nats, perplexity and bits per byte, or the accuracy of classes."""
        model = wrapper.model
        training = model.training
        model.eval()
        epoch = list(self.stream.epoch(0))
        sums = torch.zeros(3, dtype=torch.float64, device=self.processes.device)
        has_accuracy = False
        # Sharded weights are gathered by all processes at once, so all take equally many turns.
        done = 0
        for turn in range(0, len(epoch), self.processes.data_size):
            if turn and self._interrupted():
                break
            done = min(turn + self.processes.data_size, len(epoch))
            index = turn + self.processes.data_rank
            last = min(index, len(epoch) - 1)
            loss = self._loss(wrapper, epoch[last], last)
            has_accuracy = loss.correct is not None
            if index < len(epoch):
                right = sums.new_zeros(()) if loss.correct is None else loss.correct.double()
                targets = sums.new_tensor(float(loss.targets))
                sums += torch.stack((loss.total.double(), targets, right))
        model.train(training)
        total, count, correct = self.processes.all_reduce(sums).tolist()
        loss_per_target = total / max(count, 1.0)
        result = {"loss": loss_per_target}
        if has_accuracy:
            result["accuracy"] = correct / max(count, 1.0)
        else:
            result["perplexity"] = math.exp(loss_per_target) if loss_per_target < 700 else math.inf
        if self.bytes_per_token:
            result["bits_per_byte"] = loss_per_target / math.log(2) / self.bytes_per_token
        if done < len(epoch):
            result["fraction"] = done / len(epoch)
        return result

    def _interrupted(self) -> bool:
        """Whether any process was interrupted: all of them end at the same turn."""
        requested = interrupt_requested()
        if self.processes.is_single:
            return requested
        count = torch.tensor(float(requested), device=self.processes.device)
        return bool(self.processes.all_reduce(count))

    def _loss(self, wrapper: distributed.ModelWrapper, texts: Sequence[int], index: int) -> Loss:
        batch, device = self.stream.chunks.batch(texts), self.processes.device
        generator = micro_batch_generator(self.seed, 0, index)
        prepared = self.objective.prepare(wrapper.model, batch, generator)
        prepared = own_part(prepared, self.processes).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.half):
            return wrapper.evaluate(lambda model: self.objective.score(model, prepared))


GATES = {tap: position for position, tap in GATE_TAPS.items()}
SEQUENCES = 4
TOKENS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Sequences of the data, then sequences of a random block repeated twice.

    `natural` is the number of the former; `block` is the length of the block, 0 without one.
    """

    texts: Ragged | None
    images: tuple[Tensor, ...]
    natural: int
    block: int

    def run(self, model: build.Model, watcher: "HeadWatcher") -> None:
        """One forward pass in evaluation mode, without gradients."""
        training = model.training
        model.eval()
        # A compiled forward has no taps in it.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if isinstance(model, vision.Vision):
                model(self.images, watch=watcher)
            elif isinstance(model, seq2seq.Seq2Seq):
                assert self.texts is not None
                model(self.texts, self.texts, watch=watcher)
            else:
                assert self.texts is not None
                output = model(self.texts, watch=watcher)
                if isinstance(model, decoder.Decoder) and output.logits is not None:
                    watcher.copies = self._copies(output.logits)
        model.train(training)

    def _copies(self, logits: Ragged) -> Float[Tensor, " 2"]:
        """The loss of the next token within the first copy of the blocks and within the second."""
        assert self.texts is not None
        losses = []
        for index in range(self.natural, len(self.texts.lengths)):
            scores, ids = logits.of(index)[:-1].float(), self.texts.of(index)[1:]
            losses.append(torch.nn.functional.cross_entropy(scores, ids, reduction="none"))
        # The first token of the second copy cannot be predicted.
        by_token = torch.stack(losses)
        return torch.stack((by_token[:, : self.block - 1].mean(), by_token[:, self.block :].mean()))


def make_probe(model: build.Model, batch: Batch, seed: int) -> Probe:
    """The first sequences of a batch, cut short, and repeated random tokens."""
    device = next(model.parameters()).device
    if isinstance(model, vision.Vision):
        images = tuple(image.to(device) for image in batch.images[:SEQUENCES])
        return Probe(None, images, len(images), 0)
    if batch.texts is None:
        raise ConfigError(
            "telemetry needs texts, and the data have none", "set run.telemetry_every to 0"
        )
    position = model.config.embedding.position
    length = min(TOKENS, position.longest if isinstance(position, Learned | Axial) else TOKENS)
    spans = [span for span in batch.texts.lengths.slices() if span.stop > span.start]
    natural = [batch.texts.values[span][:length] for span in spans[:SEQUENCES]]
    block = length // 2
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.embedding.vocabulary
    once = torch.randint(vocabulary, (SEQUENCES, block), generator=generator)
    repeated = [torch.cat((row, row)).to(natural[0].device) for row in once]
    return Probe(Ragged.from_list([*natural, *repeated]).to(device), (), len(natural), block)


@dataclass(slots=True)
class HeadWatcher:
    """Computes a few numbers per head during the probe pass; patterns are not kept.

    Definitions, each a mean over queries: entropy is -sum A ln A in nats; the first-token share is
    A[i, 0]; previous-token is A[i, i-1] from the second query on; induction (arXiv 2209.11895) is
    A[i, i-L+1] in the second copy of a random block of L tokens. Then the mean of each gate per
    head, and the largest |residual| after a layer. Induction is measured on the repeated block,
    everything else on the data. For a decoder also the loss on both copies of the block: once
    induction heads have formed, it is lower on the second.
    """

    probe: Probe
    copies: Float[Tensor, " 2"] | None = None
    measurements: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)

    def wants(self, site: Site) -> bool:
        heads = site.tap is Tap.PATTERN or site.tap in GATES
        return site.tap is Tap.AFTER or (heads and site.sublayer is Sublayer.ATTENTION)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        if isinstance(value, Patterns):
            shares = tuple(value.shares(sequence) for sequence in range(len(value)))
            for name, score in _SCORES.items():
                self._keep(site, name, _mean(score, shares[: self.probe.natural]))
            if self.probe.block:
                repeated = shares[self.probe.natural :]
                self._keep(site, "induction", _mean(_induction, repeated))
            return
        natural = value.values[: sum(value.lengths.each[: self.probe.natural])]
        if site.tap is Tap.AFTER:
            self._keep(site, "largest_activation", natural.abs().amax().float())
        else:
            by_head = natural.float().mean(dim=(0, 2))
            self._keep(site, f"gate_{GATES[site.tap]}", by_head)

    def lines(self) -> list[dict[str, Any]]:
        """One line per stack: each number as a list by layer, of lists by head."""
        stacks: dict[str, dict[str, Any]] = {}
        layers = {stack: 0 for stack, _, _ in self.measurements}
        for stack, _, layer in self.measurements:
            layers[stack] = max(layers[stack], layer + 1)
        for (stack, name, layer), value in self.measurements.items():
            line = stacks.setdefault(stack, {"stack": stack})
            line.setdefault(name, [[]] * layers[stack])[layer] = _rounded(value)
        if self.copies is not None:
            for line in stacks.values():
                first, second = _rounded(self.copies)
                line |= {"first_copy_loss": first, "second_copy_loss": second}
        return list(stacks.values())

    def _keep(self, site: Site, name: str, value: Tensor) -> None:
        # The larger of the residuals after attention and after the feed-forward.
        key = (site.stack, name, site.layer)
        if name == "largest_activation" and key in self.measurements:
            value = torch.maximum(value, self.measurements[key])
        self.measurements[key] = value


def _induction(pattern: Float[Tensor, "h t s"]) -> Float[Tensor, " h"]:
    """On a block that is repeated once."""
    block = pattern.shape[1] // 2
    return pattern.diagonal(1 - block, dim1=1, dim2=2)[:, 1:].mean(-1)


# From h t s to h; the first token of a text has no previous one.
_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda pattern: torch.special.entr(pattern).sum(-1).mean(-1),
    "first_token": lambda pattern: pattern[:, :, 0].mean(-1),
    "previous_token": lambda pattern: (
        pattern.diagonal(-1, dim1=1, dim2=2).sum(-1) / max(pattern.shape[1] - 1, 1)
    ),
}


def _mean(score: Callable[[Tensor], Tensor], patterns: tuple[Tensor, ...]) -> Tensor:
    """The mean over sequences, each with the same weight."""
    return torch.stack([score(pattern.float()) for pattern in patterns]).mean(0)


def _rounded(value: Tensor) -> Any:
    """Six significant digits."""
    numbers = value.tolist()
    if isinstance(numbers, list):
        return [float(f"{number:.6g}") for number in numbers]
    return float(f"{numbers:.6g}")
