"""Modules that an adapter saves as its own copy, such as the head of its task."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast

from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.models.readout import ReadoutLayer

ModuleName = Literal["readout", "embedding"]

# The owner of the original parameters.
OWN = "the model's own"


class SavedModules(nn.Module):
    """Copies of parameters that are not in use now, by adapter and address."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = nn.ModuleDict()
        # The owner of the parameter in use at each address: an adapter, or the model itself.
        self.in_use: dict[str, str] = {}

    def put(self, name: str, address: str, parameter: nn.Parameter) -> None:
        if name not in self.stored:
            self.stored[name] = nn.ParameterDict()
        # Names in a module have no dots.
        cast(nn.ParameterDict, self.stored[name])[address.replace(".", "/")] = parameter

    def take(self, name: str, address: str) -> nn.Parameter:
        parameter = cast(nn.ParameterDict, self.stored[name]).pop(address.replace(".", "/"))
        return cast(nn.Parameter, parameter)

    def stored_by(self, name: str) -> dict[str, nn.Parameter]:
        if name not in self.stored:
            return {}
        parameters = cast(nn.ParameterDict, self.stored[name])
        return {
            key.replace("/", "."): cast(nn.Parameter, parameter)
            for key, parameter in parameters.items()
        }


def addresses_of(model: nn.Module, modules: Iterable[ModuleName]) -> tuple[str, ...]:
    """The addresses of all parameters of these parts.

    Tied readout and embedding cannot be saved separately.
    """
    addresses: list[str] = []
    for module in modules:
        part = getattr(model, module, None)
        if part is None or (module == "embedding" and not hasattr(part, "tokens")):
            raise ConfigError(
                f"modules_to_save has {module!r}, which this model does not have", "leave it out"
            )
        readout = getattr(model, "readout", None)
        if isinstance(readout, ReadoutLayer) and readout.weight is None:
            raise ConfigError(
                f"modules_to_save has {module!r}, and readout and embedding are tied to each other",
                "leave it out",
            )
        addresses += [f"{module}.{name}" for name, _ in part.named_parameters()]
    return tuple(addresses)


def add_modules(model: nn.Module, name: str, weights: Mapping[str, Tensor | None]) -> None:
    """Give an adapter its own parameters at these addresses; None copies those of the model.

    They are not in use yet.
    """
    if not weights:
        return
    if not hasattr(model, "modules_to_save"):
        model.modules_to_save = SavedModules()
    store = cast(SavedModules, model.modules_to_save)
    own = store.stored_by(OWN)
    for address, weight in weights.items():
        now = own.get(address, model.get_parameter(address))
        copied = now.detach() if weight is None else weight.to(now)
        store.put(name, address, nn.Parameter(copied.clone(), requires_grad=False))
        store.in_use.setdefault(address, OWN)


def modules_of(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's own parameters by address, in use or not."""
    store = _store(model)
    if store is None:
        return {}
    used = [address for address, owner in store.in_use.items() if owner == name]
    return {address: model.get_parameter(address) for address in used} | store.stored_by(name)


def activate_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Use the parameters of these adapters, and the original ones everywhere else."""
    store = _store(model)
    if store is None:
        return
    choice = dict.fromkeys(store.in_use, OWN)
    for name in names:
        for address in modules_of(model, name):
            if choice[address] != OWN:
                raise ConfigError(
                    f"{choice[address]!r} and {name!r} both have their own {address}",
                    "use one of them at a time",
                )
            choice[address] = name
    for address, owner in choice.items():
        before = store.in_use[address]
        if owner != before:
            store.put(before, address, model.get_parameter(address))
            _set(model, address, store.take(owner, address))
            store.in_use[address] = owner


def drop_modules(model: nn.Module, name: str, *, stays: bool) -> None:
    """Drop an adapter's parameters; with `stays`, those in use replace the original ones."""
    store = _store(model)
    if store is None:
        return
    for address, owner in list(store.in_use.items()):
        if owner == name:
            own = store.take(OWN, address)
            if not stays:
                _set(model, address, own)
            store.in_use[address] = OWN
    if name in store.stored:
        del store.stored[name]
    stored = {
        address
        for adapter in store.stored
        if adapter != OWN
        for address in store.stored_by(adapter)
    }
    in_use = {address for address, owner in store.in_use.items() if owner != OWN}
    store.in_use = {
        address: owner for address, owner in store.in_use.items() if address in stored | in_use
    }
    if not store.in_use:
        del model.modules_to_save


def _store(model: nn.Module) -> SavedModules | None:
    return cast(SavedModules | None, model._modules.get("modules_to_save"))


def _set(model: nn.Module, address: str, parameter: nn.Parameter) -> None:
    path, _, name = address.rpartition(".")
    model.get_submodule(path).register_parameter(name, parameter)
