"""Small cases, by which a library that gives wrong results on this processor is found before it is used."""

from __future__ import annotations

import torch

from .instruction_sets import TILE_ISAS
from .kernels import NativeKernels


def addition_is_right(kernels: NativeKernels) -> bool:
    """Whether small cases of odd shapes come out by what an instruction set adds as they do without it.

    Asked once a process: few processors have these, so the kernels have been run on fewer than the others.
    """
    if not (attention_is_right(kernels) and block_mass_is_right(kernels)):
        return False
    by_tiles = bf16_products_are_right, adapted_products_are_right, bf16_experts_are_right
    if kernels.isa in TILE_ISAS and not all(are_right(kernels) for are_right in by_tiles):
        return False
    adds_products_of_bytes = kernels.isa not in ("avx512bf16", "zen4")
    return not adds_products_of_bytes or (int8_products_are_right(kernels) and int8_experts_are_right(kernels))


class Product:
    """Inputs, weights and a bias in bf16, of odd sizes: more inputs than the packed product takes at once."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.inner, self.outputs = 37, 2100, 53
        shapes = (self.rows, self.inner), (self.outputs, self.inner), self.outputs
        self.x, self.weight, self.bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def bf16_products_are_right(kernels: NativeKernels) -> bool:
    """Whether products for few rows and by tiles, of a bias and of gates with their values, come out to rounding."""
    case = Product()
    rows, inner, outputs, width = case.rows, case.inner, case.outputs, case.outputs // 2
    x, weight = case.x.double(), case.weight.double()
    exact = x @ weight.T + case.bias.double()
    in_fp32 = 2**-20 * (x.abs() @ weight.abs().T)
    for name in ("few_rows_linear_bf16", "tile_in_place_linear_bf16", "tile_packed_linear_bf16"):
        out = case.x.new_full((rows, outputs), torch.nan)
        kernels.call(name, case.x, case.weight, case.bias, None, out, rows, inner, outputs)
        if not ((out - exact).abs() <= 2**-8 * exact.abs() + in_fp32).all():
            return False
    gate, up = (x @ weight[: 2 * width].T).split(width, 1)
    exact = torch.nn.functional.silu(gate) * up
    for name in ("tile_in_place_swiglu_bf16", "tile_packed_swiglu_bf16"):
        out = case.x.new_full((rows, width), torch.nan)
        kernels.call(name, case.x, case.weight, out, rows, inner, width)
        if not ((out - exact).abs() <= 2**-8 * (exact.abs() + gate.abs() + up.abs())).all():
            return False
    return True


def adapted_products_are_right(kernels: NativeKernels) -> bool:
    """Whether products with the deltas of two adapters, of which each has every second row, come out to rounding."""
    case, generator, panel, rank = Product(), torch.Generator().manual_seed(0), 32, 3
    rows, inner, outputs = case.rows, case.inner, case.outputs
    edges, order = torch.tensor([0, 20, outputs]), torch.tensor([*range(0, rows, 2), *range(1, rows, 2)])
    tasks = torch.tensor([[2, 0, 0], [0, 0, -(-rows // 2)], [1, -(-rows // 2), rows // 2]])
    table, kept = torch.zeros(2, 2, 5, dtype=torch.int64), []  # as in ops/adapters.py
    x = case.x.double()
    product = x @ case.weight.double().T + case.bias.double()
    deltas = torch.zeros_like(product)

    def described(size: int) -> tuple[torch.Tensor, int]:
        matrix = torch.randn(-(-size // panel), rank, panel, generator=generator).bfloat16()
        matrix[-1, :, size % panel or panel :] = 0
        kept.append(matrix)
        return matrix.double().transpose(0, 1).flatten(1)[:, :size], matrix.data_ptr()

    for place in range(2):
        for part in range(2):
            begin, end = int(edges[part]), int(edges[part + 1])
            (a, a_address), (b, b_address) = described(inner), described(end - begin)
            table[place, part] = torch.tensor([a_address, b_address, 0, 0, rank])
            deltas[place::2, begin:end] = x[place::2] @ a.T @ b
    out = case.x.new_full((rows, outputs), torch.nan)
    tensors = case.x, case.weight, case.bias, out, table, edges, order, tasks
    kernels.call("tile_adapted_linear_bf16", *tensors, rows, inner, outputs, 2, table.stride(0))
    return bool(((out - product - deltas).abs() <= 2**-7 * (product.abs() + deltas.abs()) + 2**-10).all())


def int8_products_are_right(kernels: NativeKernels) -> bool:
    """Whether products of 8-bit weights are those without the instruction set, and by tiles as well, to the bit."""
    case, generator = Product(), torch.Generator().manual_seed(0)
    x, rows, inner, outputs = case.x, case.rows, case.inner, case.outputs
    panels, padded, groups = -(-outputs // 16), -(-inner // 64) * 64, -(-inner // 512)  # as in linear/int8.py
    values = torch.randint(-32, 33, (panels, padded // 4, 16, 4), generator=generator, dtype=torch.int8)
    sums = torch.stack([group.sum((1, 3)) for group in values.split(128, 1)], dim=1).to(torch.int16)
    scale = torch.rand(outputs, generator=generator).to(x.dtype)

    def linear_int8(kernels: NativeKernels, name: str = "linear_int8") -> torch.Tensor:
        out = x.new_full((rows, outputs), torch.nan)
        scratch = torch.empty(64 * padded, dtype=torch.uint8), torch.empty(64 * groups, dtype=torch.float32)
        kernels.call(name, x, 1, values, sums, scale, case.bias, None, *scratch, out, rows, inner, outputs)
        return out

    if kernels.isa != "amx":
        return torch.equal(linear_int8(kernels), linear_int8(kernels.without(kernels.isa)))
    if not torch.equal(linear_int8(kernels, "tile_linear_int8"), linear_int8(kernels)):
        return False
    width = 8 * panels
    scale = torch.rand(2 * width, generator=generator).to(x.dtype)
    apart, expected, out = (x.new_full((rows, size), torch.nan) for size in (2 * width, width, width))
    scratch = torch.empty(64 * padded, dtype=torch.uint8), torch.empty(64 * groups, dtype=torch.float32)
    kernels.call("tile_linear_int8", x, 1, values, sums, scale, None, None, *scratch, apart, rows, inner, 2 * width)
    kernels.call("swiglu", apart, expected, rows, width, 1)
    kernels.call("tile_swiglu_int8", x, 1, values, sums, scale, *scratch, out, rows, inner, 2 * width)
    return torch.equal(out, expected) and int8_mlp_is_right(kernels)


def int8_mlp_is_right(kernels: NativeKernels) -> bool:
    """Whether both products of a small layer of 8-bit weights, made together, are what they are apart."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden, gated, outputs = 70, 96, 592, 37  # more gated results than a group has
    x = torch.randn(rows, hidden, generator=generator).to(torch.bfloat16)
    values13, values2 = (
        torch.randint(-32, 33, (panels, inputs // 4, 16, 4), generator=generator, dtype=torch.int8)
        for panels, inputs in ((gated // 8, 128), (3, 640))
    )
    scale13, scale2 = (torch.rand(size, generator=generator).to(x.dtype) for size in (2 * gated, outputs))
    inputs, gated_inputs = torch.empty(96 * 128, dtype=torch.uint8), torch.empty(96 * 640, dtype=torch.uint8)
    scales, middle = torch.empty(2 * 96), x.new_empty(rows, gated)
    expected, out = x.new_full((2, rows, outputs), torch.nan)
    sizes13, sizes2 = (rows, hidden, 2 * gated), (rows, gated, outputs)
    kernels.call("tile_swiglu_int8", x, 1, values13, None, scale13, inputs, scales, middle, *sizes13)
    kernels.call(
        "tile_linear_int8", middle, 1, values2, None, scale2, None, None, gated_inputs, scales, expected, *sizes2
    )
    scratch = inputs, torch.empty(96), gated_inputs, scales
    kernels.call(
        "tile_mlp_int8", x, 1, values13, scale13, values2, scale2, None, *scratch, out, rows, hidden, gated, outputs
    )
    return torch.equal(out, expected)


def attention_is_right(kernels: NativeKernels) -> bool:
    """Whether attention of single queries and of chunks over small caches, in bf16 and in 8 bits, comes out by the
    kernels for bf16, if there are any, as it does by the one for all."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, size, num_keys = 6, 2, 64, 16, (1, 70, 1100)
    counts = [-(-n // size) for n in num_keys]
    block_ids = torch.randperm(sum(counts), generator=generator)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    shape = 2, len(block_ids), kv_heads, size
    in_bf16 = torch.randn(*shape, dim, generator=generator).bfloat16()
    in_8_bits = torch.randint(-127, 128, (*shape, dim), generator=generator, dtype=torch.int8)
    scales = torch.rand(shape, generator=generator).div_(64).bfloat16()
    for kernel, length, tokens, flags in (
        ("decode_attention", 1, (), ()),
        ("prefill_attention", 19, (None,) * 4, (1,)),
    ):
        if not kernels.address(kernel):
            continue
        lengths = [min(length, n) for n in num_keys]
        first = [sum(lengths[:i]) for i in range(len(lengths))]
        sequences = torch.tensor(
            [[*row] for row in zip(first, lengths, [0] * 3, num_keys, starts, [-1] * 3, strict=True)]
        )
        q = torch.randn(sum(lengths), heads, dim, generator=generator).bfloat16()
        sizes = len(sequences), heads, kv_heads, dim, size, heads * dim
        for caches in ((*in_bf16, None, None), (*in_8_bits, *scales)):
            out, expected = q.new_full((2, *q.shape), torch.nan)
            kernels.call(kernel, q, *caches, sequences, block_ids, *tokens, out, None, *sizes, 0, *flags, 0.125)
            others = kernels.without(kernels.isa)
            others.call("paged_attention", q, *caches, sequences, block_ids, None, expected, None, *sizes, 1, 0, 0.125)
            if not ((out - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True)).all():
                return False
    return True


def block_mass_is_right(kernels: NativeKernels) -> bool:
    """Whether the mass of blocks of keys, over caches in bf16 and in 8 bits, is what the kernel for all shapes gives
    with values that say which block a key is of."""
    if not kernels.address("block_mass"):
        return True
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, size, scaling = 6, 2, 64, 16, 0.125
    num_queries, num_keys, query_block, key_block, stride = 150, 1100, 128, 64, 16  # as in csrc/attention
    block_ids = torch.randperm(-(-num_keys // size), generator=generator)
    key_blocks, query_blocks = -(-num_keys // key_block), -(-num_queries // query_block)
    shape = len(block_ids), kv_heads, size
    of_block = torch.zeros(*shape, dim)
    for place, block in enumerate(block_ids.tolist()):
        of_block[block, ..., place * size // key_block] = 1
    scales = torch.rand(shape, generator=generator).div_(64).bfloat16()
    in_8_bits = torch.randint(-127, 128, (*shape, dim), generator=generator, dtype=torch.int8)
    in_bf16 = torch.randn(*shape, dim, generator=generator).bfloat16()
    q = torch.randn(num_queries, heads, dim, generator=generator).bfloat16()
    table = torch.tensor([[0, num_queries, 0, num_keys, 0, 0]])
    for keys, values, key_scales, value_scales in (
        (in_bf16, of_block.bfloat16(), None, None),
        (in_8_bits, of_block.to(torch.int8), scales, torch.ones(shape).bfloat16()),
    ):
        mass, mixed = torch.zeros(2, kv_heads, query_blocks, key_blocks), torch.empty(q.shape)
        sizes = 1, heads, kv_heads, dim, size, heads * dim
        kernels.call("block_mass", q, keys, key_scales, table, block_ids, mass, *sizes, mass[0].numel(), scaling)
        cache = keys, values, key_scales, value_scales
        others = kernels.without(kernels.isa)
        others.call("paged_attention", q, *cache, table, block_ids, None, mixed, None, *sizes, 1, 1, scaling)
        for block in range(query_blocks):
            end = min((block + 1) * query_block, num_queries)
            rows = torch.arange(block * query_block, end, stride).add(stride - 1).clamp(max=num_queries - 1)
            shares = mixed[rows, :, :key_blocks].unflatten(1, (kv_heads, -1)).mean(2)
            expected = torch.stack([shares[0::2].mean(0), shares[1::2].mean(0)])
            if not ((mass[:, :, block] - expected).abs() <= 0.02 * expected + 1e-5).all():
                return False
    return True


class Experts:
    """A small layer, of experts with few rows, some and many, and more inputs than a group has."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.rows, self.experts, self.hidden, self.width = 80, 4, 600, 70
        self.x = torch.randn(self.rows, self.hidden, generator=self.generator).bfloat16()
        self.selected = torch.tensor([[0] * 3 + [1] * 25 + [2] * 52, [3] * self.rows]).t().contiguous()
        self.weights = torch.rand(self.rows, 2, generator=self.generator).bfloat16()
        self.shapes = (2 * self.width, self.hidden), (self.hidden, self.width)

    def mix(self, kernels: NativeKernels, name: str, matrices: list[torch.Tensor], *few: int) -> torch.Tensor:
        """By a kernel, one of 8 bits where each matrix is three tensors."""
        is_bf16 = (1,) * (len(matrices) == 6)
        out, scratch = torch.full_like(self.x, torch.nan), torch.empty(4 << 20, dtype=torch.uint8)  # enough
        sizes = len(scratch), self.rows, 2, self.experts, self.hidden, self.width
        kernels.call(name, self.x, *is_bf16, self.selected, self.weights, *matrices, out, scratch, *sizes, *few)
        return out


def bf16_experts_are_right(kernels: NativeKernels) -> bool:
    """Whether a small layer in bf16 comes out by tiles to rounding as it does without the instruction set."""
    case = Experts()
    matrices = [
        (torch.randn(case.experts, *shape, generator=case.generator) / shape[1] ** 0.5).bfloat16()
        for shape in case.shapes
    ]
    expected = case.mix(kernels.without(kernels.isa), "experts_bf16", matrices, case.rows)
    out = case.mix(kernels, "tile_experts_bf16", matrices, 6, 40)
    return bool(((out - expected).abs() <= 0.02 * expected.abs().amax()).all())


def int8_experts_are_right(kernels: NativeKernels) -> bool:
    """Whether a small layer in 8 bits, by tiles where there are such, comes out as without the instruction set, to
    the bit."""
    case = Experts()
    matrices: list[torch.Tensor] = []
    for outputs, inner in case.shapes:  # layouts as ops/linear/int8.py has them
        panels, padded = -(-outputs // 16), -(-inner // 64) * 64
        shape = case.experts, panels, padded // 4, 16, 4
        values = torch.randint(-32, 33, shape, generator=case.generator, dtype=torch.int8)
        matrices += [
            values,
            torch.stack([group.sum((2, 4)) for group in values.split(128, 2)], dim=2).to(torch.int16),
            torch.rand(case.experts, outputs, generator=case.generator).div_(1000).bfloat16(),
        ]
    expected = case.mix(kernels.without(kernels.isa), "experts_int8", matrices)
    if kernels.isa == "amx":
        return torch.equal(case.mix(kernels, "tile_experts_int8", matrices, 6), expected)
    return torch.equal(case.mix(kernels, "experts_int8", matrices), expected)
