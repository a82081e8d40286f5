"""Models with integer weights on the CPU: eight or four bits, and what is lost by them."""

from manyheads.quantization.model_weights import dequantize_weights, quantize_weights
from manyheads.quantization.quality import WeightQuality, measure_quality

__all__ = ["WeightQuality", "dequantize_weights", "measure_quality", "quantize_weights"]
