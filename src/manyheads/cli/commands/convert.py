"""manyheads convert: read a model, check it, and write it again, as a folder or an ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli import arguments
from manyheads.cli.inputs import open_model
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Convert:
    """Read a model and write it again, in the layout of its family or in that of manyheads.

    For example: manyheads convert gpt2/ gpt2-half/ --dtype bfloat16
    With smaller weights for the CPU: manyheads convert gpt2/ gpt2-int8/ --weights int8
    An encoder also becomes an ONNX file: manyheads convert minilm/ -o minilm.onnx --int8
    """

    model: arguments.RequiredModel
    """The folder of a model, or a model of the hub: org/name or org/name@revision."""

    folder: Annotated[Path | None, tyro.conf.Positional, arguments.metavar("FOLDER", "(or -o)")] = (
        None
    )
    """The folder to write, or a file that ends in .onnx."""

    out: arguments.OptionalOutFolder = None
    """The folder to write, as other commands name it."""

    dtype: arguments.DtypeName = "auto"
    """The dtype of the weights to write; by default unchanged, in ONNX files float32."""

    weights: arguments.WeightName = None
    """Round the weights to 8 or 4 bits for the CPU, and print what is lost."""

    int8: arguments.Flag = False
    """Store the weights of an ONNX file in 8 bits, for example for a browser."""

    def run(self) -> None:
        """Print where the model is and what can open it."""
        from manyheads.checkpoints.folder import save

        target = self.folder or self.out
        if target is None:
            remedy = f"add it: {self.model} FOLDER"
            raise InputError("manyheads convert needs a folder to write", remedy)
        if self.folder is not None and self.out is not None:
            both = f"{self.folder} and {self.out}"
            raise InputError(f"two folders are given, {both}", "leave out one of them")
        if target.suffix.lower() == ".onnx":
            if self.weights is not None:
                problem = f"--weights {self.weights} is not for ONNX files"
                raise InputError(problem, "use --int8, or write a folder")
            self._write_onnx(target)
            return
        if self.int8:
            remedy = f"use --weights int8, or write to {target}.onnx"
            raise InputError("--int8 is for ONNX files", remedy)
        # In its own dtype a model loses nothing by being overwritten.
        changes = self.dtype != "auto" or self.weights is not None
        arguments.check_out_folder(target, self.model if changes else "")
        model = open_model(self.model, "cpu", self.dtype, self.weights)
        print(save(model, target))
        if self.weights is not None and model.tokenizer is not None:
            from manyheads.quantization import measure_quality

            print(measure_quality(model, open_model(self.model, "cpu", "float32")))

    def _write_onnx(self, target: Path) -> None:
        from manyheads.checkpoints.onnx_file import WeightFormat, save_onnx

        if self.dtype == "bfloat16" or (self.int8 and self.dtype != "auto"):
            raise InputError(
                f"an ONNX file cannot have --dtype {self.dtype}{' and --int8' * self.int8}",
                "use --dtype float32, --dtype float16 or --int8",
            )
        plain: WeightFormat = "float16" if self.dtype == "float16" else "float32"
        weights: WeightFormat = "int8" if self.int8 else plain
        print(save_onnx(open_model(self.model, "cpu", "float32"), target, weights))
