"""A small model and the data of its report, made once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

from manyheads import lens
from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.lens.causal.head_importance import HeadImportance
from manyheads.lens.circuit_discovery.circuit import Circuit
from manyheads.lens.corpus.atlas import Atlas
from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import build
from manyheads.report.data import ReportData, collect_report
from tests.pictures.examples import circuit_edges

WORDS = "The cat sat on the mat and the dog sat on the log while it rained in Paris and Rome. "
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)> {{script}} & "so" on. '


def decoder(*, layers: int = 2, heads: int = 2) -> Any:
    model = build("gpt2", layers=layers, width=32, heads=heads, vocabulary=320, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.tokenizer = train_tokenizer(
        InMemoryTexts((WORDS * 4, "Привет, мир! 你好", EVIL * 4)), size=320, progress=False
    )
    return model


# The start token of the decoder below.
START = 0


def seq2seq() -> Any:
    model: Any = build("transformer-base", layers=1, width=32, heads=2, vocabulary=320, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.tokenizer = decoder().tokenizer
    model.generation = {"decoder_start_token_id": START}
    return model


@cache
def circuit() -> Circuit:
    """A circuit of three layers with a curve, as the command saves it."""
    edges = circuit_edges()
    writers = tuple(dict.fromkeys(writer for writer, _, _ in edges))
    readers = tuple(dict.fromkeys(reader for _, reader, _ in edges))
    scores = np.full((len(readers), len(writers)), np.nan)
    for writer, reader, score in edges:
        scores[readers.index(reader), writers.index(writer)] = score
    curve = {"counts": [2, 20, 190], "faithfulness": [0.1, 0.8, 1.0], "errors": [0.1, 0.05, 0.0]}
    return Circuit(
        writers=writers,
        readers=readers,
        scores=scores,
        errors=np.abs(scores) / 10,
        method="eap-ig",
        level="edge",
        metric="logit difference",
        clean=2.5,
        corrupted=-1.5,
        metadata={
            "texts": 32,
            "effect": 4.0,
            "effect_error": 0.1,
            "agreement": 0.9,
            "task": "ioi",
            "curve": curve | {"cpr": 0.9, "cmd": 0.1},
        },
    )


@cache
def pairs_report() -> ReportData:
    """Three maps: of the encoder, of the decoder, and between them."""
    with quick_kinds():
        return collect_report(
            seq2seq(), [(EVIL, WORDS), (WORDS, "The dog sat.")], name="pairs", progress=False
        )


@cache
def report() -> ReportData:
    return collect_report(
        decoder(),
        [EVIL + WORDS, *[WORDS] * 5],
        name="a <b>model</b>",
        pattern_tokens=64,
        progress=False,
    )


def _kinds(*_: Any, measured: Statistics, **__: Any) -> Kinds:
    """Each first head is an induction head, each second one nearly a sink."""
    induction = Label(
        kind="induction",
        score=0.8,
        threshold=0.4,
        evidence="looks after <b>copies</b>",
        interval=(0.7, 0.9),
        samples=64,
        unit="sequences",
        draws=(5, 5),
    )
    sink = Label(kind="sink", score=0.2, threshold=0.3, evidence="puts 20% on the first token")
    heads = measured.addresses
    scores = {"induction": np.full(len(heads), 0.8)}
    return Kinds(
        labels={head: () if head.head.head else (induction,) for head in heads},
        scores=ByHead(kind="kinds", blocks=measured.blocks, means=scores),
        nearest={head: sink for head in heads if head.head.head},
    )


@contextmanager
def quick_kinds() -> Iterator[None]:
    """Atlases and reports whose kinds are made up: to measure them takes most of the time."""
    with (
        patch("manyheads.lens.corpus.atlas.find_kinds", _kinds),
        patch("manyheads.lens.inspection.kinds", _kinds),
    ):
        yield


@cache
def atlas() -> Atlas:
    texts = [EVIL + WORDS, *(WORDS * count for count in range(1, 8))]
    with quick_kinds():
        result = lens.atlas(decoder(), texts, max_length=48, by="none", progress=False)
    worth = HeadImportance(
        change=np.array([0.3, -0.1, 0.02, 0.5]),
        errors=np.full(4, 0.01),
        metric="loss",
        by="gradient",
        baseline=2.0,
        texts=8,
    )
    return replace(result, inspection=replace(result.inspection, importance=worth))


def with_importance(**changes: Any) -> ReportData:
    """The same report with another importance of its heads."""
    known = report().importance
    assert known is not None
    return replace(
        report(), inspection=replace(report().inspection, importance=replace(known, **changes))
    )


def english_words(page: Any, *names: str) -> list[str]:
    """Texts and titles of a page that are in English, but for tokens, commands and `names`."""
    texts: list[str] = page.evaluate(
        """() => {
          const code = "code, pre, script, style, noscript, [lang=en]";
          // The nodes of a circuit have names.
          const own = `#circuit, bdi, strong, em:not(.flag), .token, ${code}`;
          const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          const texts = [];
          while (nodes.nextNode()) {
            const { data, parentElement } = nodes.currentNode;
            if (!parentElement.closest(own)) texts.push(data);
          }
          for (const name of ["title", "aria-label", "placeholder", "alt"]) {
            for (const element of document.querySelectorAll(`[${name}]:not([lang=en])`)) {
              if (!element.closest("#circuit")) texts.push(element.getAttribute(name));
            }
          }
          return texts;
        }"""
    )
    word, russian = re.compile(r"\b[A-Za-z]?[a-z]{2,}\b"), re.compile("[а-яё]")
    phrase = re.compile(r"\b(?!\w+ et al)[A-Za-z]+ [a-z]+ [a-z]+\b")
    head = re.compile(r"(encoder|decoder) L\d+H\d+( cross)?")
    return sorted(
        text
        for text in {text.strip() for text in texts} - set(names)
        if (phrase if russian.search(text) else word).search(text) and not head.fullmatch(text)
    )
