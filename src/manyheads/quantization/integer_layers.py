"""Linear layers and embeddings with integer weights, which are computed on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.quantization.integer_codes import GROUP, IntegerCodes, Layout, WeightName
from manyheads.quantization.products import Product, choose_product

REMEDY = "take the model before it was rounded, or call quantization.dequantize_weights"


class IntegerWeight(nn.Module):
    """What both layers share: codes and scales, packed as the fastest operation reads them.

    `weight` is unpacked at every access, in float32, for those who read weights rather than
    multiply by them.
    """

    codes: Shaped[Tensor, "rows bytes"]
    scales: Float[Tensor, "rows groups"]
    offsets: Float[Tensor, "rows groups"] | None

    def store(self, codes: IntegerCodes) -> None:
        """Take these codes for the weight."""
        self.columns = codes.columns
        self.register_buffer("codes", codes.codes)
        self.register_buffer("scales", codes.scales)
        self.register_buffer("offsets", codes.offsets)
        self._packed: dict[type[Product], Product] = {}
        self.training = False

    @property
    def integer_codes(self) -> IntegerCodes:
        return IntegerCodes(self.codes, self.scales, self.columns, self.offsets)

    @property
    def weight(self) -> Float[Tensor, "rows columns"]:
        return self.integer_codes.values()

    @property
    def weight_name(self) -> WeightName:
        return self.integer_codes.name

    def product(self, tokens: int) -> Product:
        """The operation that multiplies so many tokens by the weight."""
        choice = choose_product(self.integer_codes, tokens)
        if choice not in self._packed:
            self._packed[choice] = choice(self.integer_codes)
        return self._packed[choice]

    def multiply(
        self, x: Float[Tensor, "*n columns"], bias: Float[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "*n rows"]:
        """x W^T, and a bias; exact and with a gradient for x if it needs one."""
        if x.requires_grad and torch.is_grad_enabled():
            return F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        flat = x.reshape(-1, self.columns).float().contiguous()
        if not len(flat):
            return x.new_empty(*x.shape[:-1], len(self.codes))
        multiply = self.product(len(flat))
        if bias is None:
            product = multiply(flat)
        elif bias.requires_grad and torch.is_grad_enabled():
            product = multiply(flat) + bias
        else:
            product = multiply.plus(flat, bias)
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise ConfigError(f"{self.weight_name} weights cannot be trained", REMEDY)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        probe = fn(torch.zeros(1))
        if probe.device.type not in ("cpu", "meta"):
            problem = f"{self.weight_name} weights are computed on the CPU, not on {probe.device}"
            raise ConfigError(problem, REMEDY)
        if probe.dtype != torch.float32:
            problem = f"{self.weight_name} weights are computed in float32, not in {probe.dtype}"
            raise ConfigError(problem, REMEDY)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any) -> None:
        self._packed.clear()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        # What is packed belongs to this process and is packed again where it is needed.
        return {**self.__dict__, "_packed": {}}


class IntegerLinear(IntegerWeight, nn.Linear):  # type: ignore[override]
    """A linear layer with integer weights; its bias stays in float32."""

    def __init__(self, codes: IntegerCodes, bias: Float[Tensor, " rows"] | None = None) -> None:
        # Linear.__init__ would allocate a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = codes.columns, codes.rows
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))
        self.store(codes)

    def forward(self, x: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        return self.multiply(x, self.bias)


class IntegerEmbedding(IntegerWeight, nn.Embedding):  # type: ignore[override]
    """An embedding with integer weights; `multiply` scores tokens with it, as a tied readout."""

    def __init__(self, codes: IntegerCodes) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = codes.rows, codes.columns
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.store(codes)

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n columns"]:
        return self.integer_codes.select(ids.flatten()).values().view(*ids.shape, -1)


def empty_codes(rows: int, columns: int, layout: Layout) -> IntegerCodes:
    """Codes without values, for a model on the meta device."""
    with torch.device("meta"):
        if layout == "int8":
            codes = torch.empty(rows, columns, dtype=torch.int8)
            return IntegerCodes(codes, torch.empty(rows, 1), columns)
        codes = torch.empty(rows, -(-columns // 2), dtype=torch.uint8)
        dtype = torch.bfloat16 if layout == "int4" else torch.float16
        scales = torch.empty(rows, -(-columns // GROUP), dtype=dtype)
        offsets = torch.empty_like(scales) if layout == "q4_1" else None
        return IntegerCodes(codes, scales, columns, offsets)
