"""manyheads studio: see the heads at work in the browser."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from manyheads.cli import arguments, inputs
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError, ManyheadsError, MissingPackageError

if TYPE_CHECKING:
    from manyheads.models.build import Model
    from manyheads.tasks.search.index import Index


@dataclass(frozen=True, slots=True)
class Studio:
    """Open a page in the browser to type a text and see what every head does with it.

    For example: manyheads studio house-gpt
    """

    models: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arguments.metavar("[MODEL ...]", "(default: house-gpt)"),
    ] = ()
    """Folders of models or models of the hub: org/name; two or more can be compared."""

    index: Annotated[arguments.Strings, arguments.repeatable("INDEX")] = ()
    """An index that manyheads index wrote: search it, and see why each document matched."""

    port: int = 8765
    """The port of the page; 0 chooses a free one."""

    host: str = "127.0.0.1"
    """The address to listen on; if other machines can reach it, the printed URL has a token."""

    no_browser: arguments.Flag = False
    """Print the address, but do not open a browser."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Serve the page until Ctrl-C."""
        names = self.models or (() if self.index else ("house-gpt",))
        opened = ", ".join((*names, *self.index))
        print(f"studio: opening {opened} …", file=sys.stderr, flush=True)
        if not all(map(find_spec, ("starlette", "uvicorn"))):
            raise MissingPackageError("the studio", "starlette", "uvicorn")
        for name in names:
            inputs.check_model(name)
        for name in self.index:
            if "://" not in name and not Path(name).exists():
                raise InputError(
                    f"there is no index {name}", "name the folder that manyheads index wrote"
                )
        # Torch is loaded here, which takes seconds.
        from manyheads.studio.models import last_part
        from manyheads.studio.server import bind_endpoint, serve

        endpoint, server_socket = bind_endpoint(self.host, self.port)
        with server_socket:
            indexes = [(last_part(name), self.compute.open_index(name)) for name in self.index]
            models = [(last_part(name), self.compute.open(name)) for name in names]
            models = models or _index_models(indexes)
            models = models or [("house-gpt", self.compute.open("house-gpt"))]
            browser = not self.no_browser
            serve(models, endpoint, server_socket, open_browser=browser, indexes=indexes)


def _index_models(indexes: "Sequence[tuple[str, Index]]") -> "list[tuple[str, Model]]":
    """The models of the indexes whose heads the studio can show, each once."""
    from manyheads.studio.models import check_model, last_part

    models: dict[int, tuple[str, Model]] = {}
    for name, index in indexes:
        model = index.model
        if model is None or id(model) in models:
            continue
        with suppress(ManyheadsError):
            check_model(name, model)
            models[id(model)] = (last_part(model.source) or name, model)
    return list(models.values())
