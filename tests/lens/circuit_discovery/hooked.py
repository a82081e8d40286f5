"""An independent judge: edges of a GPT-2 of transformers, changed by plain hooks."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTH, HEADS, LAYERS = 16, 2, 2
SIZE = WIDTH // HEADS
CLEAN, CORRUPTED = [3, 1, 4, 1, 5, 9], [3, 1, 7, 2, 5, 9]
ANSWER, DISTRACTOR = 6, 8


@cache
def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, n_positions=16, vocab_size=20)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.4 if parameter.dim() > 1 else 0.2)
    model.tie_weights()
    return model


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, ANSWER] - logits[0, -1, DISTRACTOR]


def run(
    ids: list[int], shifts: Mapping[str, Tensor] | None = None, embeds: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The metric, and what each writer wrote; what a reader reads is shifted by `shifts`."""
    model, shifts, written = gpt2(), shifts or {}, dict[str, Tensor]()
    with ExitStack() as stack:

        def hook(module: Any, function: Callable[..., Any], *, before: bool = False) -> None:
            add = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.callback(add(function).remove)

        def shifted(reader: str) -> Callable[..., Any]:
            return lambda _, args: (args[0] + shifts[reader],) if reader in shifts else None

        for layer, block in enumerate(model.transformer.h):
            streams: list[Tensor] = []
            hook(block.ln_1, lambda _, args, kept=streams: kept.append(args[0]), before=True)
            hook(block.attn.c_attn, _projected(block, layer, streams, shifts))
            hook(block.attn.c_proj, _by_head(layer, block.attn.c_proj.weight, written), before=True)
            hook(block.ln_2, shifted(f"L{layer} mlp"), before=True)
            hook(
                block.mlp,
                lambda _, __, output, name=f"L{layer} mlp": written.update({name: output[0]}),
            )
        hook(model.transformer.ln_f, shifted("logits"), before=True)
        hook(
            model.transformer.drop,
            lambda _, __, output: (
                written.update(embeddings=output[0]) if embeds is None else embeds
            ),
        )
        logits = model(torch.tensor([ids])).logits
    return metric(logits), written


def _projected(
    block: Any, layer: int, streams: list[Tensor], shifts: Mapping[str, Tensor]
) -> Callable[..., Any]:
    def change(module: Any, _: Any, output: Tensor) -> Tensor:
        output = output.clone()
        for part, name in enumerate(("query", "key", "value")):
            for head in range(HEADS):
                shift = shifts.get(f"L{layer}H{head} {name}")
                if shift is not None:
                    own = slice(part * WIDTH + head * SIZE, part * WIDTH + (head + 1) * SIZE)
                    # The module itself, without the hooks.
                    normed = block.ln_1.__class__.forward(block.ln_1, streams[0] + shift)
                    output[..., own] = module.__class__.forward(module, normed)[..., own]
        return output

    return change


def _by_head(layer: int, weight: Tensor, written: dict[str, Tensor]) -> Callable[..., None]:
    def keep(_: Any, args: tuple[Tensor, ...]) -> None:
        for head in range(HEADS):
            own = slice(head * SIZE, (head + 1) * SIZE)
            written[f"L{layer}H{head}"] = args[0][0, :, own] @ weight[own]

    return keep
