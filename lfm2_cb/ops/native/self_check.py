"""Small cases, by which a library that gives wrong results on this processor is found before it is used."""

from __future__ import annotations

import torch

from .kernels import NativeKernels


def addition_is_right(kernels: NativeKernels) -> bool:
    """Whether small cases of odd shapes come out by what an instruction set adds as they do without it.

    Asked once a process: few processors have these, so the kernels have been run on fewer than the others.
    """
    if not (attention_is_right(kernels) and block_mass_is_right(kernels)):
        return False
    generator = torch.Generator().manual_seed(0)
    rows, inner, outputs = 37, 2100, 53  # more inputs than the packed product takes at once
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (outputs, inner), outputs))
    x, weight, bias = (tensor.to(torch.bfloat16) for tensor in (x, weight, bias))
    panels, padded, groups = -(-outputs // 16), -(-inner // 64) * 64, -(-inner // 512)  # as in linear/int8.py
    values = torch.randint(-32, 33, (panels, padded // 4, 16, 4), generator=generator, dtype=torch.int8)
    sums = torch.stack([group.sum((1, 3)) for group in values.split(128, 1)], dim=1).to(torch.int16)
    scale = torch.rand(outputs, generator=generator).to(x.dtype)

    def linear_int8(kernels: NativeKernels, name: str = "linear_int8") -> torch.Tensor:
        out = x.new_full((rows, outputs), torch.nan)
        scratch = torch.empty(64 * padded, dtype=torch.uint8), torch.empty(64 * groups, dtype=torch.float32)
        kernels.call(name, x, 1, values, sums, scale, bias, None, *scratch, out, rows, inner, outputs)
        return out

    if kernels.isa == "avx512bf16":
        return True
    if not experts_are_right(kernels):
        return False
    if kernels.isa != "amx":
        return torch.equal(linear_int8(kernels), linear_int8(kernels.without(kernels.isa)))
    exact = x.double() @ weight.double().T + bias.double()
    in_fp32 = 2**-20 * (x.double().abs() @ weight.double().abs().T)
    for name in ("amx_in_place_linear_bf16", "amx_packed_linear_bf16"):
        out = x.new_full((rows, outputs), torch.nan)
        kernels.call(name, x, weight, bias, None, out, rows, inner, outputs)
        if not ((out - exact).abs() <= 2**-8 * exact.abs() + in_fp32).all():
            return False
    width = outputs // 2
    gate, up = (x.double() @ weight[: 2 * width].double().T).split(width, 1)
    exact = torch.nn.functional.silu(gate) * up
    for name in ("amx_in_place_swiglu_bf16", "amx_packed_swiglu_bf16"):
        out = x.new_full((rows, width), torch.nan)
        kernels.call(name, x, weight, out, rows, inner, width)
        if not ((out - exact).abs() <= 2**-8 * (exact.abs() + gate.abs() + up.abs())).all():
            return False
    if not torch.equal(linear_int8(kernels, "amx_linear_int8"), linear_int8(kernels)):
        return False
    width = 8 * panels
    scale = torch.rand(2 * width, generator=generator).to(x.dtype)
    apart, expected, out = (x.new_full((rows, size), torch.nan) for size in (2 * width, width, width))
    scratch = torch.empty(64 * padded, dtype=torch.uint8), torch.empty(64 * groups, dtype=torch.float32)
    kernels.call("amx_linear_int8", x, 1, values, sums, scale, None, None, *scratch, apart, rows, inner, 2 * width)
    kernels.call("swiglu", apart, expected, rows, width, 1)
    kernels.call("amx_swiglu_int8", x, 1, values, sums, scale, *scratch, out, rows, inner, 2 * width)
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
    kernels.call("amx_swiglu_int8", x, 1, values13, None, scale13, inputs, scales, middle, *sizes13)
    kernels.call(
        "amx_linear_int8", middle, 1, values2, None, scale2, None, None, gated_inputs, scales, expected, *sizes2
    )
    scratch = inputs, torch.empty(96), gated_inputs, scales
    kernels.call(
        "amx_mlp_int8", x, 1, values13, scale13, values2, scale2, None, *scratch, out, rows, hidden, gated, outputs
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


def experts_are_right(kernels: NativeKernels) -> bool:
    """Whether a small layer, of experts with few rows, some and many, comes out as without what the instruction set
    adds: in 8 bits to the bit and, where that is matrix units, in bf16 to rounding."""
    generator = torch.Generator().manual_seed(0)
    rows, experts, hidden, width = 80, 4, 600, 70  # more inputs than a group has
    is_amx, others = kernels.isa == "amx", kernels.without(kernels.isa)
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    selected = torch.tensor([[0] * 3 + [1] * 25 + [2] * 52, [3] * rows]).t().contiguous()
    weights = torch.rand(rows, 2, generator=generator).bfloat16()
    scratch = torch.empty(4 << 20, dtype=torch.uint8)  # enough
    sizes = scratch, len(scratch), rows, 2, experts, hidden, width

    in_8_bits: list[torch.Tensor] = []
    in_bf16 = []
    for outputs, inner in ((2 * width, hidden), (hidden, width)):  # layouts as ops/linear/int8.py has them
        in_bf16.append((torch.randn(experts, outputs, inner, generator=generator) / inner**0.5).bfloat16())
        panels, padded = -(-outputs // 16), -(-inner // 64) * 64
        shape = experts, panels, padded // 4, 16, 4
        values = torch.randint(-32, 33, shape, generator=generator, dtype=torch.int8)
        in_8_bits += [
            values,
            torch.stack([group.sum((2, 4)) for group in values.split(128, 2)], dim=2).to(torch.int16),
            torch.rand(experts, outputs, generator=generator).div_(1000).bfloat16(),
        ]

    def int8(kernels: NativeKernels, name: str, *few: int) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        kernels.call(name, x, 1, selected, weights, *in_8_bits, out, *sizes, *few)
        return out

    def bf16(kernels: NativeKernels, name: str, *thresholds: int) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        kernels.call(name, x, selected, weights, *in_bf16, out, *sizes, *thresholds)
        return out

    if not is_amx:
        return torch.equal(int8(kernels, "experts_int8"), int8(others, "experts_int8"))
    expected = bf16(others, "experts_bf16", rows)
    close = ((bf16(kernels, "amx_experts_bf16", 6, 40) - expected).abs() <= 0.02 * expected.abs().amax()).all()
    return bool(close) and torch.equal(int8(kernels, "amx_experts_int8", 6), int8(others, "experts_int8"))
