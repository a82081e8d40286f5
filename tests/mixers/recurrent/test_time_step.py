"""The decay that a token chooses is the formula, for every channel by the rate of its head."""

import torch

from manyheads.mixers.recurrent.time_step import log_decay


def test_log_decay_is_the_formula() -> None:
    dt, bias, a_log = torch.randn(5, 6), torch.randn(6), torch.randn(2)
    decay = log_decay(dt.bfloat16(), bias, a_log)
    assert decay.dtype == torch.float32
    for head in range(2):
        for channel in range(3 * head, 3 * head + 3):
            dt_of_channel = dt.bfloat16().float()[:, channel] + bias[channel]
            expected = -a_log[head].exp() * torch.log1p(dt_of_channel.exp())
            torch.testing.assert_close(decay[:, channel], expected)
