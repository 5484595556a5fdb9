"""Which kernel multiplies: by the format of the weights, the dtype of the inputs, the instruction set and the rows.

The one place where that is decided. A new kernel is a new entry here; it must agree with its neighbours on a row's
result, to the bit for low-bit weights (whose rows do not depend on how many there are) and to rounding for dense ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch

from ..native import NativeKernels
from .dense import few_rows_linear, has_bf16_units, many_rows_linear, tile_linear, tile_swiglu, torch_linear
from .int4 import native_linear_int4
from .int8 import Int8Weights, native_linear_int8, tile_linear_int8, tile_mlp_int8, tile_swiglu_int8

#: (native kernels, x `[rows, in]`, weights, bias or None) → `[rows, out]`; weights are a matrix, or a quantised one.
#: Behind the bias they take a residual `[rows, out]`, too, or None, which they add.
Product = Callable[..., torch.Tensor]
#: kernels by the largest number of rows that each is for, ascending; the last is for any number
ByRows = Sequence[tuple[float, Product]]

#: stands for every instruction set that has no entry of its own
ANY_ISA = "any"
DENSE, INT8, INT4 = "dense", "int8", "int4"

#: Few rows: the weights are read once, from where they lie, while `F.linear` falls to a fraction of the bandwidth and
#: kernels for many rows lay them out first (1.2 × slower at these rows by AVX2, on 2 cores of a Xeon without AMX).
#: bf16 where the processor multiplies it but our kernels that do are not used: torch's product does use those units.
_BF16: ByRows = ((12, few_rows_linear), (inf, torch_linear))
#: Inputs widened to fp32: 1.4 × torch's product by AVX512-BF16 (64 and 512 rows on a Xeon with its AMX switched off,
#: where `vdpbf16ps` makes half as many products as two FMA units).
_BF16_WIDENED: ByRows = ((24, few_rows_linear), (inf, many_rows_linear))
if not has_bf16_units():
    _BF16 = _BF16_WIDENED

#: Measured on one core of a Xeon with AMX, all linears of a step of a 350M model, ms of thread CPU time, minimum of 6:
#: 6 rows 48.2 and 50.6, 7 rows 50.2 and 50.7, 8 rows 56.4 and 51.0.
_BF16_AMX: ByRows = ((6, few_rows_linear), (inf, tile_linear))

#: Measured on two cores of an AMD EPYC (Zen 5), the linears of eight layers of a 350M model but the head, ms, for few
#: rows and by tiles in place: 8 rows 7.5 and 9.1, 12 rows 9.1 and 9.2, 16 rows 10.5 and 9.3. By tiles, by `F.linear`
#: and widened to fp32: 32 rows 13.3, 19.8 and 33.3, 64 rows 25.3, 30.9 and 53, 256 rows 97, 88 to 98 and 186.
#: The bound is a multiple of `engine.captured_steps.ROWS_TOGETHER`: captured steps, whose rows are rounded up to such,
#: then give the bits of the others.
_BF16_ZEN4: ByRows = ((8, few_rows_linear), (inf, tile_linear))

TABLE: dict[tuple[str, torch.dtype, str], ByRows] = {
    (DENSE, torch.float32, ANY_ISA): ((16, few_rows_linear), (inf, many_rows_linear)),
    (DENSE, torch.bfloat16, ANY_ISA): _BF16,
    (DENSE, torch.bfloat16, "avx512bf16"): _BF16_WIDENED,
    (DENSE, torch.bfloat16, "zen4"): _BF16_ZEN4,
    (DENSE, torch.bfloat16, "amx"): _BF16_AMX,
    # All linears of a step of a 350M model on two cores of a Xeon with AMX, ms, by vectors and by the matrix units:
    # 1 row 11.6 and 14.3, 5 rows 14.2 and 14.5, 8 rows 13.8 and 15.0, 16 rows 27.4 and 16.2.
    (INT8, torch.float32, "amx"): ((8, native_linear_int8), (inf, tile_linear_int8)),
    (INT8, torch.bfloat16, "amx"): ((8, native_linear_int8), (inf, tile_linear_int8)),
    (INT8, torch.float32, ANY_ISA): ((inf, native_linear_int8),),
    (INT8, torch.bfloat16, ANY_ISA): ((inf, native_linear_int8),),
    (INT4, torch.float32, ANY_ISA): ((inf, native_linear_int4),),
    (INT4, torch.bfloat16, ANY_ISA): ((inf, native_linear_int4),),
}

#: of weights of gates and values: kernels that give `swiglu` of the product, which is not stored; None: there is none
#: for so few rows
SWIGLU_TABLE: dict[tuple[str, torch.dtype, str], Sequence[tuple[float, Product | None]]] = {
    (DENSE, torch.bfloat16, "zen4"): ((8, None), (inf, tile_swiglu)),
    (DENSE, torch.bfloat16, "amx"): ((6, None), (inf, tile_swiglu)),
    (INT8, torch.float32, "amx"): ((8, None), (inf, tile_swiglu_int8)),
    (INT8, torch.bfloat16, "amx"): ((8, None), (inf, tile_swiglu_int8)),
}

#: (native kernels, x, weights of gates and values, weights of what takes `swiglu` of them, residual or None) →
#: `[rows, out]`
Mlp = Callable[[NativeKernels, torch.Tensor, Int8Weights, Int8Weights, torch.Tensor | None], torch.Tensor]
#: as `SWIGLU_TABLE`, of both products of 8-bit weights, by dtype and instruction set. (Threads share the second's
#: groups of inputs, which are too few to be shared evenly where there is but one group of 32 rows. Together they take
#: 4 to 15 % less than apart: 64 to 2,048 rows, 1,024 and 4,608 inputs, one core of a Xeon with AMX.)
MLP_TABLE: dict[tuple[torch.dtype, str], Sequence[tuple[float, Mlp | None]]] = {
    (torch.float32, "amx"): ((32, None), (inf, tile_mlp_int8)),
    (torch.bfloat16, "amx"): ((32, None), (inf, tile_mlp_int8)),
}


def products(weights_format: str, dtype: torch.dtype, isa: str) -> ByRows:
    """The kernels for these weights and inputs by an instruction set; none: no kernel takes the dtype."""
    return TABLE.get((weights_format, dtype, isa)) or TABLE.get((weights_format, dtype, ANY_ISA), ())


def product(weights_format: str, dtype: torch.dtype, isa: str, rows: int) -> Product:
    """The one for so many rows. Raises: KeyError: no kernel takes the dtype."""
    for most, kernel in products(weights_format, dtype, isa):
        if rows <= most:
            return kernel
    raise KeyError((weights_format, dtype))


def swiglu_product(weights_format: str, dtype: torch.dtype, isa: str, rows: int) -> Product | None:
    """The one of `SWIGLU_TABLE` for so many rows; None: there is none."""
    by_rows = SWIGLU_TABLE.get((weights_format, dtype, isa), ())
    return next((kernel for most, kernel in by_rows if rows <= most), None)


def mlp_product(dtype: torch.dtype, isa: str, rows: int) -> Mlp | None:
    """The one of `MLP_TABLE` for so many rows; None: there is none."""
    return next((kernel for most, kernel in MLP_TABLE.get((dtype, isa), ()) if rows <= most), None)
