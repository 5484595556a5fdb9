"""Kernels that look at each token by itself, and the short convolution, against the torch reference."""

import random

import torch
from cases import Step, assert_near

from lfm2_cb.ops import pointwise as reference
from lfm2_cb.ops.attention.kv_blocks import make_blocks, write_rows
from lfm2_cb.ops.short_conv import gated_short_conv
from lfm2_cb.ops.triton.kernels import TritonKernels

KERNELS = TritonKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: shapes of each kernel, a third in each dtype
SHAPES = [(seed, DTYPES[seed % 3]) for seed in range(201)]


def random_tensors(seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def test_norms(device):
    for seed, dtype in SHAPES:
        rng, randn = random.Random(seed), random_tensors(seed, dtype, device)
        tokens, size, eps = rng.randint(1, 4), rng.randint(1, 300), rng.choice([1e-5, 1e-3])
        x, residual, weight = randn(tokens, size), randn(tokens, size), randn(size)
        if seed % 2:
            x = randn(size, tokens).t()
        by_torch = lambda t: reference.rms_norm(x.to(t), weight.to(t), eps)  # noqa: B023, E731
        assert_near(KERNELS.rms_norm(x, weight, eps), by_torch, dtype)
        total, normed = KERNELS.add_rms_norm(x, residual, weight, eps)
        assert torch.equal(total, x + residual)
        assert_near(normed, lambda t: reference.rms_norm(total.to(t), weight.to(t), eps), dtype)  # noqa: B023


def test_swiglu(device):
    for seed, dtype in SHAPES:
        rng, randn = random.Random(seed), random_tensors(seed, dtype, device)
        x = 3 * randn(rng.randint(1, 4), 2 * rng.choice([rng.randint(1, 300), 1024, 1500]))
        assert_near(KERNELS.swiglu(x), lambda t: reference.swiglu(x.to(t)), dtype)  # noqa: B023


def test_rotary(device):
    for seed, dtype in SHAPES:
        rng = random.Random(seed)
        positions = torch.tensor([rng.randrange(2000) for _ in range(rng.randint(1, 5))], device=device)
        positions = positions.to(rng.choice([torch.int32, torch.int64]))
        inv_freq, scale = torch.rand(rng.randint(1, 64), device=device), rng.choice([1.0, 1.3])
        got = KERNELS.rotary(positions, inv_freq, scale, dtype)
        for one, expected in zip(got, reference.rotary(positions, inv_freq, scale, torch.float32), strict=True):
            assert one.shape == expected.shape and one.dtype == dtype
            tolerance = 2e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
            torch.testing.assert_close(one.float(), expected, rtol=0, atol=tolerance)


def test_norm_rotate_and_write(device):
    """Queries and keys are no further from fp64 than torch's; values are as they came; and 8 bits are what torch makes
    of the keys and values that the kernel writes to a whole cache."""
    for seed, dtype in SHAPES:
        rng, randn = random.Random(seed), random_tensors(seed, dtype, device)
        step = Step.random(rng, most_tokens=3, longest=20, count=1)
        kv_heads, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 8]), 2 * rng.choice([1, 4, 5, 32, 64])
        heads, tokens = kv_heads * group, step.num_tokens
        qkv, q_weight, k_weight = randn(tokens, (heads + 2 * kv_heads) * dim), randn(dim), randn(dim)
        tables = step.tables(device)
        slots = tables.slots.clone()
        if seed % 3 == 1:
            slots[-1] = -1
        rope = reference.rotary(tables.positions, torch.rand(dim // 2, device=device), 1.0, dtype)
        shape = step.num_blocks, kv_heads, step.block_size, dim
        keys, values = (make_blocks(shape, dtype, device) for _ in range(2))
        inputs = qkv, heads, q_weight, k_weight, rope, 1e-5, slots
        got = KERNELS.norm_rotate(*inputs, keys, values)

        def by_torch(t):
            parts = (qkv, q_weight, k_weight, *rope)  # noqa: B023
            x, wq, wk, cos, sin = (part.to(t) for part in parts)
            return reference.norm_rotate(x, heads, wq, wk, (cos, sin), 1e-5)  # noqa: B023

        assert_near(got, lambda t: by_torch(t)[0], dtype)
        written = slots >= 0
        token_slots = slots[written].long()
        block, offset = token_slots // step.block_size, token_slots % step.block_size
        assert_near(keys[block, :, offset], lambda t: by_torch(t)[1][written], dtype)  # noqa: B023
        assert torch.equal(values[block, :, offset], by_torch(dtype)[2][written])
        untouched = torch.ones(shape[0], shape[2], dtype=torch.bool)
        untouched[block, offset] = False
        assert not any(one.transpose(1, 2)[untouched].any() for one in (keys, values))
        if seed % 2:
            in_8_bits = [make_blocks(shape, torch.int8, device) for _ in range(2)]
            assert torch.equal(KERNELS.norm_rotate(*inputs, *in_8_bits), got)
            every_head = torch.arange(kv_heads, device=device)
            rows = ((block[:, None] * kv_heads + every_head) * step.block_size + offset[:, None]).flatten()
            for ours, whole in zip(in_8_bits, (keys, values), strict=True):
                by_rows = make_blocks(shape, torch.int8, device)
                write_rows(by_rows, rows, whole[block, :, offset])
                assert torch.equal(ours.values, by_rows.values) and torch.equal(ours.scale, by_rows.scale)


def conv_step(rng, kernel):
    """A step whose sequences begin from and write states as in the engine, and one that overwrites a checkpoint that
    it began from."""
    step = Step.random(rng, most_tokens=rng.choice([3, 3, 3, 18]), longest=40, count=2, size=rng.choice([8, 16]))
    num_slots, size = len(step.sequences), step.block_size
    for i, s in enumerate(step.sequences):
        checkpoint = lambda block: 1 + num_slots + block  # noqa: E731
        s.writes = [
            (checkpoint(s.block_table[b // size - 1]), b - s.start)
            for b in range((s.start // size + 1) * size, s.start + len(s.token_ids) + 1, size)
        ]
        if rng.random() < 0.8:
            s.writes.insert(0, (1 + i, len(s.token_ids)))
        s.read_row = 0 if s.start == 0 else 1 + i
        if s.start and rng.random() < 0.2:
            s.read_row = checkpoint(s.block_table[s.start // size])
    return step, 1 + num_slots + step.num_blocks


def conv_reference(step, kernel, dtype, bcx, cache, weight, bias):
    """By the torch reference, from what it takes."""
    window, first = kernel - 1, step.cu_seqlens

    def extended(i, place):
        return len(step.sequences) * window + first[i] + place if place >= 0 else i * window + window + place

    taps = [
        [extended(i, p - distance) for i, s in enumerate(step.sequences) for p in range(len(s.token_ids))]
        for distance in range(window, -1, -1)
    ]
    writes = [(row, i, end) for i, s in enumerate(step.sequences) for row, end in s.writes]
    index = torch.tensor([[extended(i, end - window + w) for w in range(window)] for _, i, end in writes]).long()
    device = bcx.device
    cache = cache.to(dtype).clone()
    out, _ = gated_short_conv(
        bcx.to(dtype),
        cache,
        torch.tensor([s.read_row for s in step.sequences], device=device),
        torch.tensor(taps, device=device),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        torch.tensor([row for row, _, _ in writes], device=device).long(),
        index.view(-1, window).to(device),
    )
    return out, cache


def test_short_conv(device):
    for seed, dtype in SHAPES:
        rng, randn = random.Random(seed), random_tensors(seed, dtype, device)
        kernel, hidden = rng.choice([2, 3, 3, 4, 5]), rng.choice([rng.randint(1, 40), 150])
        step, num_rows = conv_step(rng, kernel)
        bcx, cache, weight = (
            randn(step.num_tokens, 3 * hidden),
            randn(num_rows, kernel - 1, hidden),
            randn(hidden, 1, kernel),
        )
        cache[0] = 0
        bias = randn(hidden) if seed % 2 else None
        ours = cache.clone()
        got = KERNELS.short_conv(bcx, ours, weight, bias, step.tables(device))
        inputs = bcx, cache, weight, bias
        assert_near(got, lambda t: conv_reference(step, kernel, t, *inputs)[0], dtype)  # noqa: B023
        assert torch.equal(ours, conv_reference(step, kernel, dtype, *inputs)[1])
