"""manyheads studio: see the heads at work in the browser."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from manyheads.cli.arguments import DeviceName, Flag, open_model
from manyheads.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Studio:
    """Open a page in the browser to type a text and see what every head does with it.

    For example: manyheads studio house-gpt
    """

    models: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[MODEL ...]", help_behavior_hint="(default: house-gpt)"),
    ] = ()
    """Folders of models or models of the hub: org/name; two or more can be compared."""

    port: int = 8765
    """The port of the page; 0 chooses a free one."""

    host: str = "127.0.0.1"
    """The address to listen on; if other machines can reach it, the printed URL has a token."""

    no_browser: Flag = False
    """Print the address, but do not open a browser."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Serve the page until Ctrl-C."""
        try:
            from manyheads.studio.server import bind_endpoint, serve
        except ImportError as error:
            if error.name not in ("starlette", "uvicorn", "anyio"):
                raise
            raise MissingPackageError("the studio", "starlette", "uvicorn") from None
        from manyheads.studio.models import model_name

        endpoint, server_socket = bind_endpoint(self.host, self.port)
        with server_socket:
            names = self.models or ("house-gpt",)
            models = [(model_name(name), open_model(name, self.device)) for name in names]
            serve(models, endpoint, server_socket, open_browser=not self.no_browser)
        return 0
