"""A device by its name, or what is wrong with it."""

import pytest
import torch

from manyheads.devices import resolve_device
from manyheads.errors import InputError
from tests.messages import refuses


def test_auto_is_what_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    for result, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda result=result: result)
        assert resolve_device("auto").type == expected


def test_missing_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(InputError, "--device is 'cuda:1', and torch finds no CUDA device: use cpu."):
        resolve_device("cuda:1", "--device")
    with refuses(InputError, "--device must be auto, cpu or cuda, got 'abacus'"):
        resolve_device("abacus", "--device")
