"""The four tests of Wiegreffe and Pinter, arXiv 1908.04626, of one model and what it is beside."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.lens.faithful.adversarial import total_variation
from studies.explanation.classifiers import (
    Kind,
    LabeledWords,
    WordClassifier,
    accuracy,
    batches,
    outputs_of,
    uniform,
)
from studies.explanation.weight_tests import agree, divergence, find_adversaries, permute
from studies.study import Settings, Values
from studies.training import Batch, Loss, Recipe, Trainer

# A trained adversary keeps the answers if they move by at most this on the mean.
KEEPS = 0.1
# Other models have seeds of their own, far from those of the arms.
OTHER_SEED = 1000


@dataclass(frozen=True, slots=True)
class Tests:
    """All tests of one kind of model; the seed is that of every model but the second one."""

    kind: Kind
    texts: LabeledWords
    settings: Settings
    device: str
    seed: int

    def run(self) -> Values:
        ids, labels = self.texts.held_out
        tested = ids[: self.settings["tested"]]
        model = self.train(self.kind, answer_loss, *self.texts.train)
        other = self.train(self.kind, answer_loss, *self.texts.train, seed=self.seed + OTHER_SEED)
        flat = self.train(self.kind, uniform_loss, *self.texts.train)
        probabilities, weights = outputs_of(model, ids)
        guides = {"uniform": None, "its own": None, "model": model}
        values: dict[str, Any] = {
            "accuracy": accuracy(probabilities, labels),
            "uniform": accuracy(outputs_of(flat, ids, uniform(ids))[0], labels),
            "seeds": float(divergence(outputs_of(other, ids)[1], weights).mean()),
            "tau": agree(model, tested),
            "permuted": permute(model, tested, self.settings["draws"], self.seed),
            "searched": find_adversaries(model, tested, self.settings, self.seed),
        }
        values["drop"] = values["accuracy"] - values["uniform"]
        adversaries = {
            cost: self.adversary(model, cost) for cost in self.settings["adversary_costs"]
        }
        trained = {}
        for cost, adversary in adversaries.items():
            answers, own = outputs_of(adversary, ids)
            trained[str(cost)] = {
                "moved": float(total_variation(answers, probabilities).mean()),
                "divergence": float(divergence(own, weights).mean()),
                "accuracy": accuracy(answers, labels),
            }
        chosen = choose_adversary(trained)
        values |= {"trained": trained, "adversary": trained[chosen]}
        guides |= {"adversary": adversaries[float(chosen)]}
        values["guides"] = {name: self.guide(name, source) for name, source in guides.items()}
        values["lead"] = {
            name: values["guides"]["model"] - result for name, result in values["guides"].items()
        }
        return values

    def train(
        self, kind: Kind, loss: Loss, *columns: Tensor, seed: int | None = None
    ) -> WordClassifier:
        """A model of a kind, trained on rows of the columns."""
        settings, seed = self.settings, self.seed if seed is None else seed
        torch.manual_seed(seed)
        model = WordClassifier(
            kind,
            self.texts.size,
            width=settings["width"],
            heads=settings["heads"],
            length=settings["length"],
            dropout=settings["dropout"],
        ).to(self.device)
        recipe = Recipe(
            steps=settings["steps"], lr=settings["lr"], warm_up=max(1, settings["steps"] // 10)
        )
        rows: Iterator[Batch] = batches(settings["batch"], seed, *columns)
        Trainer(model, recipe, loss).run(rows, kind)
        return model

    def adversary(self, model: WordClassifier, cost: float) -> WordClassifier:
        """A model trained to give the answers of another with weights far from its own.

        The loss is the distance of answers minus `cost` times the divergence of weights.
        """
        ids, _ = self.texts.train
        probabilities, weights = outputs_of(model, ids)

        def loss(adversary: nn.Module, batch: Batch) -> Tensor:
            rows, answers, own = batch
            logits, other = adversary(rows)
            ratio = other.clamp(min=1e-9).log() - own.clamp(min=1e-9).log()
            apart = (other * ratio).sum(-1).mean()
            return total_variation(logits.softmax(-1), answers).mean() - cost * apart

        return self.train(self.kind, loss, ids, probabilities, weights, seed=self.seed + 1)

    def guide(self, name: str, source: WordClassifier | None) -> float:
        """The accuracy of a model without context whose weights are those of a source."""
        (ids, labels), (held_out, answers) = self.texts.train, self.texts.held_out
        if name == "its own":
            model = self.train("words", answer_loss, ids, labels)
            return accuracy(outputs_of(model, held_out)[0], answers)
        weights = [
            uniform(rows) if source is None else mean_weights(source, rows)
            for rows in (ids, held_out)
        ]
        model = self.train("words", guided_loss, ids, labels, weights[0])
        return accuracy(outputs_of(model, held_out, weights[1])[0], answers)


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids)[0], labels)


def uniform_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids, uniform(ids))[0], labels)


def guided_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels, weights = batch
    return F.cross_entropy(model(ids, weights)[0], labels)


def mean_weights(model: WordClassifier, ids: Tensor) -> Tensor:
    """One weight for every word [b 1 t]."""
    return outputs_of(model, ids)[1].mean(1, keepdim=True)


def choose_adversary(trained: dict[str, Values]) -> str:
    """The farthest of those that keep the answers, or the one that keeps them best.

    >>> near, far = {"moved": 0.01, "divergence": 0.1}, {"moved": 0.05, "divergence": 0.4}
    >>> choose_adversary({"0.1": near, "1": far, "9": {"moved": 0.4, "divergence": 0.6}})
    '1'
    """
    keeps = [cost for cost, values in trained.items() if values["moved"] <= KEEPS]
    if keeps:
        return max(keeps, key=lambda cost: trained[cost]["divergence"])
    return min(trained, key=lambda cost: trained[cost]["moved"])
