"""The influence of positions on each other against whole Jacobians."""

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL, WIDTH, small_model

TEXT = [5, 6, 7, 8, 5, 6]


def jacobian(model: torch.nn.Module) -> torch.Tensor:
    """Of the final vectors by the embeddings: t c s c."""
    start, end = Site(-1, Tap.EMBEDDINGS), Site(-1, Tap.FINAL)

    def run(x: torch.Tensor) -> torch.Tensor:
        class Through:
            def wants(self, site: Site) -> bool:
                return site in (start, end)

            def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
                assert isinstance(value, Ragged)
                result[site] = value.values
                return value.with_values(x) if site == start else None

        result: dict[Site, torch.Tensor] = {}
        model(torch.tensor([TEXT]), watch=Through())
        return result[end]

    values: torch.Tensor = torch.autograd.functional.jacobian(run, entering(model))
    return values


def entering(model: torch.nn.Module) -> torch.Tensor:
    return model.embedding.tokens.weight.detach()[TEXT]


@pytest.mark.parametrize("config", [BOTH_WAYS["fourier"], CAUSAL["mamba"]], ids=str)
def test_influence_is_the_norm_of_the_jacobian(config: object) -> None:
    model = small_model(config, config)
    expected = jacobian(model).square().sum((1, 3)).sqrt()
    [result] = lens.influence(model, [TEXT], directions=WIDTH, progress=False)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    estimates = [
        lens.influence(model, [TEXT], directions=8, seed=seed, progress=False)[0].square()
        for seed in range(8)
    ]
    mean = torch.stack(estimates).mean(0).sqrt()
    torch.testing.assert_close(mean, expected, atol=0.1, rtol=0.25)


def test_one_layer_is_seen_without_the_residual_stream() -> None:
    model = small_model(BOTH_WAYS["fourier"], BOTH_WAYS["fourier"])
    [result] = lens.influence(model, [TEXT], layer=1, directions=WIDTH, progress=False)
    # A Fourier transform mixes all positions alike, but for the phases.
    assert (result > 0).all()
    assert result.shape == (6, 6)
    with pytest.raises(InputError, match="layer 2"):
        lens.influence(model, [TEXT], layer=2)
    with pytest.raises(InputError, match="at most 512"):
        lens.influence(model, [[5] * 513], progress=False)
