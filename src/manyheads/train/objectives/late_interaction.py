"""Late interaction in training (arXiv 2004.12832): a trained projection of tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.encoding.token_vectors import late_of
from manyheads.models.provenance import DenseProjection, LateInteractionConfig

PROJECTION = "late_projection"


class LateProjection(nn.Module):
    """The projections of a model's late interaction as parameters, while it is trained."""

    def __init__(self, late: LateInteractionConfig) -> None:
        super().__init__()
        self.late = late
        self.weights = nn.ParameterList(dense.weight.float().clone() for dense in late.projection)
        self.biases = nn.ParameterDict(
            {
                str(index): nn.Parameter(dense.bias.float().clone())
                for index, dense in enumerate(late.projection)
                if dense.bias is not None
            }
        )

    def forward(self, states: Float[Tensor, "n c"]) -> Float[Tensor, "n o"]:
        return self.config_with(dict(self.named_parameters())).project(states)

    def config_with(self, weights: Mapping[str, Tensor], prefix: str = "") -> LateInteractionConfig:
        """The config with trained weights, by their names behind a prefix."""
        layers = enumerate(self.late.projection)
        projection = tuple(
            DenseProjection(
                weights[f"{prefix}weights.{index}"],
                weights.get(f"{prefix}biases.{index}"),
                dense.activation,
            )
            for index, dense in layers
        )
        return replace(self.late, projection=projection)


def attach_projection(model: Any, width: int) -> None:
    """Make a model's projections of tokens trainable; a model without late interaction gets one.

    The new one is random and projects to `width` numbers, or there is none with 0.
    """
    if hasattr(model, PROJECTION):
        return
    if model.late is None:
        weight = torch.empty(width, model.config.stack.output_width)
        nn.init.orthogonal_(weight, generator=torch.Generator().manual_seed(0))
        projection = (DenseProjection(weight, None, "none"),) if width else ()
        model.late = LateInteractionConfig(projection=projection)
    if model.late.projection:
        model.add_module(PROJECTION, LateProjection(model.late).to(model.table.device))


def project_tokens(model: Any, states: Float[Tensor, "n c"]) -> Float[Tensor, "n o"]:
    """The vectors of tokens, by the trained projection if there is one."""
    trained = getattr(model, PROJECTION, None)
    vectors: Tensor = late_of(model).project(states) if trained is None else trained(states)
    return vectors


def fold_projection(
    model: Any, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], LateInteractionConfig | None]:
    """The weights without the trained projection, and the late interaction that has it."""
    trained, prefix = getattr(model, PROJECTION, None), f"{PROJECTION}."
    if not isinstance(trained, LateProjection):
        return dict(weights), model.late
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    return rest, trained.config_with(weights, prefix)
