"""How far the heads that approximate softmax attention are from it: Performer and LSH attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.inputs.texts import Inputs, for_each_batch, read_inputs
from manyheads.lens.results.addresses import Block, mixer_at
from manyheads.lens.results.tables import ByHead
from manyheads.mixers.lsh_attention import LshAttentionLayer, missed_mass
from manyheads.mixers.mixer import Mixer
from manyheads.mixers.performer import PerformerLayer, softmax_error
from manyheads.models import build, model_interface
from manyheads.taps import Record, Site, Tap

# Of a mixer, and the queries and keys of one text: the value of every head and query.
Measure = Callable[[Any, Float[Tensor, "n h d"], Float[Tensor, "n h d"]], Float[Tensor, "h n"]]


@wrapping_models
def performer_error(
    model: build.Model, texts: Inputs, *, batch_tokens: int | None = None, progress: bool = True
) -> ByHead:
    """The share of the softmax weights that each Performer head moves, mean over queries.

    It is half the sum of the absolute differences between the estimated weights and the softmax
    of the same queries and keys: 0 where they are equal, 1 where they have nothing in common. The
    patterns are formed, so that memory grows with the square of a text.
    """

    def measure(mixer: PerformerLayer, query: Tensor, key: Tensor) -> Float[Tensor, "h n"]:
        return softmax_error(query, key, mixer.features, causal=mixer.config.causal)

    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    return _measured(model, texts, PerformerLayer, "performer_error", measure, **shared)


@wrapping_models
def lsh_missed_mass(
    model: build.Model, texts: Inputs, *, batch_tokens: int | None = None, progress: bool = True
) -> ByHead:
    """The share of the softmax weights on keys that an LSH head never sees, mean over queries.

    The softmax is that of the same queries and keys over all tokens but itself. The patterns are
    formed, so that memory grows with the square of a text.
    """

    def measure(mixer: LshAttentionLayer, query: Tensor, key: Tensor) -> Float[Tensor, "h n"]:
        assert key is query, "they are shared"
        seed = mixer.config.seed
        return missed_mass(query, mixer.config, 0 if seed == "random" else seed)

    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    return _measured(model, texts, LshAttentionLayer, "lsh_missed_mass", measure, **shared)


def _measured(
    model: build.Model, texts: Inputs, kind: type[Mixer], name: str, measure: Measure, **shared: Any
) -> ByHead:
    mixers = {
        Block(index, mixer.config.heads, stack.name): mixer
        for stack in model.stacks().values()
        for index in range(len(stack.layers))
        if isinstance(mixer := mixer_at(stack, index), kind)
    }
    if not mixers:
        mixer_name = kind.__name__.removesuffix("Layer")
        raise InputError(f"the model has no {mixer_name} layers", f"pass a model with {mixer_name}")
    # The keys of LSH attention are its queries.
    taps = (Tap.QUERY,) if kind is LshAttentionLayer else (Tap.QUERY, Tap.KEY)
    sites = {block: [Site(block.layer, tap, stack=block.stack) for tap in taps] for block in mixers}
    sums = {block: torch.zeros(block.heads, dtype=torch.float64) for block in mixers}

    def visit(batch: model_interface.ModelInputs, _: list[int]) -> None:
        record = Record([site for block_sites in sites.values() for site in block_sites])
        with torch.inference_mode():
            model.run_hidden(batch, record)
            for block, mixer in mixers.items():
                recorded = [record[site] for site in sites[block]]
                for text in range(len(recorded[0])):
                    parts = [value.of(text) for value in recorded]
                    sums[block] += measure(mixer, parts[0], parts[-1]).double().sum(1).cpu()

    inputs = read_inputs(model, texts)
    passed = for_each_batch(model, inputs, visit, label="comparing with softmax", **shared)
    means = np.concatenate([(sums[block] / passed.tokens).numpy() for block in mixers])
    return ByHead(kind=name, blocks=tuple(mixers), means={name: means}, metadata=passed.metadata)
