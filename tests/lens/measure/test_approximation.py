"""How much Performer and LSH heads miss of the softmax, by head."""

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.mixers.lsh_attention import LshAttention, missed_mass
from manyheads.mixers.performer import Performer, PerformerLayer, softmax_error
from manyheads.models.decoder import Decoder
from manyheads.taps import Head, Record, Site, Tap
from tests.mixers.mixer_configs import CAUSAL, WIDTH, small_model

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [9, 10, 11, 12]]


def test_heads_are_compared_with_the_softmax_of_their_own_queries_and_keys() -> None:
    lsh = LshAttention(width=WIDTH, heads=2, chunk=2, rounds=2)
    model = small_model(Performer(width=WIDTH, heads=2, features=12), lsh)
    assert isinstance(model, Decoder)
    sites = [Site(0, Tap.QUERY), Site(0, Tap.KEY), Site(1, Tap.QUERY)]
    record = Record(sites)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(30)
        model(torch.tensor([TEXTS[0]]), watch=record)
    queries, keys, shared = (record[site].of(0) for site in sites)
    performer = model.stack.layers[0].mixer
    assert isinstance(performer, PerformerLayer)
    error = softmax_error(queries, keys, performer.features).mean(1)
    missed = missed_mass(shared, lsh).mean(1)
    assert float(error.min()) > 0.0
    assert float(missed.max()) > 0.0
    alone = lens.performer_error(model, TEXTS[:1], progress=False)["performer_error"]
    hidden = lens.lsh_missed_mass(model, TEXTS[:1], progress=False)["lsh_missed_mass"]
    for head in range(2):
        assert alone.of(Head(0, head)) == pytest.approx(float(error[head]), abs=1e-5)
        assert hidden.of(Head(1, head)) == pytest.approx(float(missed[head]), abs=1e-5)
    # The second text has four tokens, the first nine.
    both, second = (
        lens.performer_error(model, texts, progress=False)["performer_error"].means
        for texts in (TEXTS, TEXTS[1:])
    )
    assert both == pytest.approx((9 * alone.means + 4 * second) / 13, abs=1e-6)


def test_a_model_without_such_heads_is_refused() -> None:
    model = small_model(CAUSAL["linear"])
    with pytest.raises(InputError, match="Performer"):
        lens.performer_error(model, TEXTS)
    with pytest.raises(InputError, match="LshAttention"):
        lens.lsh_missed_mass(model, TEXTS)
