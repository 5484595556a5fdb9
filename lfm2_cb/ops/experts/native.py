"""The experts of a layer by the native kernels (csrc/experts).

Rows are sorted by expert once a layer; each touched expert's matrices are then read once for all of its rows, from
where they lie in the stack. Which experts those are is data to the kernels, so that a decode step is captured whatever
it chooses.
"""

from __future__ import annotations

import torch

from ..linear.int4 import Int4Weights
from ..linear.int8 import Int8Weights
from ..linear.table import ANY_ISA, DENSE, INT4, INT8
from ..native import NativeKernels, empty

#: A matrix for each expert: `[experts, out, in]`, or such of low bits, each tensor with a first dimension for them.
Stack = torch.Tensor | Int8Weights | Int4Weights

_F32, _BF16 = torch.float32, torch.bfloat16
#: (format of the weights, dtype of x, instruction set) → the kernel; and up to how many rows of an expert each product
#: is for that it is made of, but for the last, which takes any number. Those are the dense linears': linear/table.py.
TABLE: dict[tuple[str, torch.dtype, str], tuple[str, tuple[int, ...]]] = {
    (DENSE, _F32, ANY_ISA): ("experts_f32", (16,)),
    (DENSE, _BF16, ANY_ISA): ("experts_bf16", (24,)),
    (DENSE, _BF16, "zen4"): ("tile_experts_bf16", (12, 160)),
    (DENSE, _BF16, "amx"): ("tile_experts_bf16", (6, 160)),
    (INT8, _F32, ANY_ISA): ("experts_int8", ()),
    (INT8, _BF16, ANY_ISA): ("experts_int8", ()),
    (INT8, _F32, "amx"): ("tile_experts_int8", (4,)),
    (INT8, _BF16, "amx"): ("tile_experts_int8", (4,)),
    (INT4, _F32, ANY_ISA): ("experts_int4", ()),
    (INT4, _BF16, ANY_ISA): ("experts_int4", ()),
}


def native_mix_experts(
    native: NativeKernels, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack
) -> torch.Tensor:
    """As `mix_experts`, but that a row's experts are summed in their order, in fp32.

    A row's result does not depend on the number of threads, nor on the rows beside it: of low-bit weights to the bit,
    else but for which product is for so many rows (linear/table.py).

    Args: x fp32 or bf16; gate_up, down: in x's dtype, contiguous, or of low bits.
    """
    out = empty(x.shape, x.dtype)
    if not len(x):
        return out
    weights_format, gate_up_tensors, num_experts, outputs = _describe(gate_up, x.dtype)
    down_tensors = _describe(down, x.dtype)[1]
    name, thresholds = TABLE.get((weights_format, x.dtype, native.isa)) or TABLE[weights_format, x.dtype, ANY_ISA]
    dtype = () if weights_format == DENSE else (int(x.dtype == _BF16),)
    rows, top_k = selected.shape
    scratch = empty((scratch_bytes(rows, top_k, num_experts, x.shape[1], outputs // 2),), torch.uint8)
    native.call(
        name,
        x.contiguous(),
        *dtype,
        selected.contiguous(),
        weights.to(x.dtype).contiguous(),
        *gate_up_tensors,
        *down_tensors,
        out,
        scratch,
        len(scratch),
        rows,
        top_k,
        num_experts,
        x.shape[1],
        outputs // 2,
        *thresholds,
    )
    return out


def scratch_bytes(rows: int, top_k: int, num_experts: int, hidden: int, width: int) -> int:
    """At least what a kernel here takes, whatever is chosen; what is never written to costs nothing."""
    choices = rows * top_k
    places = choices + 31 * min(num_experts, choices)  # matrix units take an expert's rows by 32
    inputs = 4 * (-(-max(hidden, width) // 1024) * 1024 + 32)  # of a row: fp32, or 4 bits' chunks of 1,024 inputs
    products = 4 * (5 * width + 272)  # of a row: units of 16 to 64 gates with the same values, cut at whole units
    numbers = 12 * choices + 24 * (num_experts + 1)
    alignment = 64 * (num_experts + 16)
    return places * inputs + choices * width * 4 + rows * (products + hidden * 4) + numbers + alignment


def _describe(stack: Stack, dtype: torch.dtype) -> tuple[str, tuple[torch.Tensor, ...], int, int]:
    """The format of a stack, its tensors as the kernels take them, and its numbers of matrices and of outputs."""
    if isinstance(stack, torch.Tensor):
        return DENSE, (stack,), stack.shape[0], stack.shape[1]
    if isinstance(stack, Int8Weights):
        return INT8, (stack.values, stack.sums, stack.scale.to(dtype)), stack.scale.shape[0], stack.scale.shape[1]
    return INT4, (stack.values, stack.scale.to(_BF16)), stack.values.shape[0], stack.values.shape[1]
