"""Small models on disk, as the commands that look at heads open them."""

from pathlib import Path

from manyheads.checkpoints.folder import save
from tests.studio import models

TEXT = "The cat sat on the mat and the dog sat on the log while it rained in Paris."
OTHER = "The dog sat on the mat while the cat sat on the log and it rained in Rome."


def write_models(folder: Path) -> Path:
    """A decoder, one of a single layer, an encoder, a model without tokenizer; files of texts."""
    save(models.decoder(layers=2), folder / "decoder")
    save(models.encoder(), folder / "encoder")
    bare = models.decoder(layers=1)
    save(bare, folder / "small")
    bare.tokenizer = None
    save(bare, folder / "bare")
    (folder / "texts.txt").write_text(f"{TEXT}\n\n{OTHER}\n", "utf-8")
    (folder / "empty.txt").write_text("\n \n", "utf-8")
    return folder
