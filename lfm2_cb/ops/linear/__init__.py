"""Matrix products: dense and low-bit layers, and the table of the kernels that compute them."""

from .dense import PackedLinear
from .int4 import Int4Weights
from .int8 import Int8Weights
from .quantized import QuantizedEmbedding, QuantizedLinear, quantized_linear, reference_linear
from .table import products

__all__ = [
    "Int4Weights",
    "Int8Weights",
    "PackedLinear",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "products",
    "quantized_linear",
    "reference_linear",
]
