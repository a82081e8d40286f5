"""A model in a sentence."""

from manyheads.lens.inspection import portray
from tests.studio import models


def test_every_head_and_parameter_is_counted() -> None:
    model = models.decoder(layers=3)
    found = portray(model)
    assert found.stacks == {"main": [4, 4, 4]}
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert "12 heads" in str(found)


def test_an_encoder_is_no_decoder() -> None:
    assert str(portray(models.encoder())).startswith("An Encoder of 2 layers")
