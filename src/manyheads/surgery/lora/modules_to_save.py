"""Modules that an adapter saves as its own copy, such as the head of its task."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast

from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.models.readout import ReadoutLayer

ModuleName = Literal["readout", "embedding"]

# Whose parameters stand in the model while an adapter's do: the model's own.
OWN = "the model's own"


class SavedModules(nn.Module):
    """The copies that do not stand in the model now, by adapter and address."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ModuleDict()
        # For each address the adapter, or the model itself, whose parameter stands there.
        self.standing: dict[str, str] = {}

    def put(self, name: str, address: str, parameter: nn.Parameter) -> None:
        if name not in self.held:
            self.held[name] = nn.ParameterDict()
        # Names in a module have no dots.
        cast(nn.ParameterDict, self.held[name])[address.replace(".", "/")] = parameter

    def take(self, name: str, address: str) -> nn.Parameter:
        parameter = cast(nn.ParameterDict, self.held[name]).pop(address.replace(".", "/"))
        return cast(nn.Parameter, parameter)

    def held_by(self, name: str) -> dict[str, nn.Parameter]:
        if name not in self.held:
            return {}
        kept = cast(nn.ParameterDict, self.held[name])
        return {key.replace("/", "."): cast(nn.Parameter, each) for key, each in kept.items()}


def addresses_of(model: nn.Module, modules: Iterable[ModuleName]) -> tuple[str, ...]:
    """The addresses of all parameters of these parts.

    The readout and the embedding of a model where they are tied cannot part, and `peft` could not
    say that they did.
    """
    found: list[str] = []
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
        found += [f"{module}.{name}" for name, _ in part.named_parameters()]
    return tuple(found)


def add_modules(model: nn.Module, name: str, weights: Mapping[str, Tensor | None]) -> None:
    """Give an adapter parameters of its own at these addresses; None starts as the model's own.

    They do not stand in the model yet.
    """
    if not weights:
        return
    if not hasattr(model, "modules_to_save"):
        model.modules_to_save = SavedModules()
    store = cast(SavedModules, model.modules_to_save)
    own = store.held_by(OWN)
    for address, weight in weights.items():
        now = own.get(address, _at(model, address))
        copied = now.detach() if weight is None else weight.to(now)
        store.put(name, address, nn.Parameter(copied.clone(), requires_grad=False))
        store.standing.setdefault(address, OWN)


def modules_of(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's own parameters by address, wherever they are."""
    store = _store(model)
    if store is None:
        return {}
    there = {
        address: _at(model, address) for address, owner in store.standing.items() if owner == name
    }
    return {**there, **store.held_by(name)}


def activate_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Let the parameters of these adapters stand in the model, and its own everywhere else."""
    store = _store(model)
    if store is None:
        return
    wanted = dict.fromkeys(store.standing, OWN)
    for name in names:
        for address in modules_of(model, name):
            if wanted[address] != OWN:
                raise ConfigError(
                    f"{wanted[address]!r} and {name!r} both have their own {address}",
                    "use one of them at a time",
                )
            wanted[address] = name
    for address, owner in wanted.items():
        before = store.standing[address]
        if owner != before:
            store.put(before, address, _at(model, address))
            _set(model, address, store.take(owner, address))
            store.standing[address] = owner


def drop_modules(model: nn.Module, name: str, *, stays: bool) -> None:
    """Drop an adapter's parameters; those that stand in the model may stay there for good."""
    store = _store(model)
    if store is None:
        return
    for address, owner in list(store.standing.items()):
        if owner == name:
            own = store.take(OWN, address)
            if not stays:
                _set(model, address, own)
            store.standing[address] = OWN
    if name in store.held:
        del store.held[name]
    brought = {address for each in store.held if each != OWN for address in store.held_by(each)}
    standing = {address for address, owner in store.standing.items() if owner != OWN}
    store.standing = {
        address: owner for address, owner in store.standing.items() if address in brought | standing
    }
    if not store.standing:
        del model.modules_to_save


def _store(model: nn.Module) -> SavedModules | None:
    return cast(SavedModules | None, model._modules.get("modules_to_save"))


def _at(model: nn.Module, address: str) -> nn.Parameter:
    return model.get_parameter(address)


def _set(model: nn.Module, address: str, parameter: nn.Parameter) -> None:
    path, _, name = address.rpartition(".")
    model.get_submodule(path).register_parameter(name, parameter)
