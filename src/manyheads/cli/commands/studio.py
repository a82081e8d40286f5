"""manyheads studio: a page in the browser where one types a text and sees the heads."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from manyheads.cli.arguments import DeviceName, Flag, open_model
from manyheads.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Studio:
    """Open a page where one types a text and sees what every head does with it.

    For example: manyheads studio house-gpt
    """

    models: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[MODEL ...]", help_behavior_hint="(default: house-gpt)"),
    ] = ()
    """Folders of models or names on the hub; two or more can be compared."""

    port: int = 8765
    """Where the page is found; 0 takes any port that is free."""

    host: str = "127.0.0.1"
    """The address to listen at. Elsewhere than on this machine, the printed address has a token."""

    no_browser: Flag = False
    """Print the address and open nothing."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Answer the page until Ctrl-C."""
        try:
            from manyheads.studio.server import open_door, serve
        except ImportError as error:
            if error.name not in ("starlette", "uvicorn", "anyio"):
                raise
            raise MissingExtraError(
                f"the studio needs the package {error.name}", "pip install 'manyheads[studio]'"
            ) from None
        from manyheads.studio.models import name_of

        door, listening = open_door(self.host, self.port)
        with listening:
            names = self.models or ("house-gpt",)
            models = [(name_of(name), open_model(name, self.device)) for name in names]
            serve(models, door, listening, browse=not self.no_browser)
        return 0
