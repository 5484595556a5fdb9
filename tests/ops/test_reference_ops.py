"""The torch reference ops beside plain definitions, on random shapes."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.ops import native
from lfm2_cb.ops.attention.cascade import SharedPrefix, cascade_attention
from lfm2_cb.ops.attention.decode import decode_attention
from lfm2_cb.ops.attention.reference import paged_attention
from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.linear.dense import (
    TRANSPOSED_ROWS,
    PackedLinear,
    few_rows_linear,
    many_rows_linear,
    transposed_linear,
)
from lfm2_cb.ops.native.instruction_sets import ISAS
from lfm2_cb.ops.short_conv import ragged_short_conv


@pytest.mark.parametrize("seed", range(12))
def test_paged_attention_equals_attention_spelled_out(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group, dim, size = (
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3]),
        rng.choice([4, 8, 10]),
        rng.choice([1, 4, 16]),
    )
    kv_lens = [rng.randint(1, 40) for _ in range(5)]
    lengths = [rng.choice([1, n, rng.randint(1, n)]) for n in kv_lens]
    blocks = torch.randperm(5 * 40).tolist()
    tables = [torch.tensor([blocks.pop() for _ in range(-(-n // size))]) for n in kv_lens]
    keys, values = torch.randn(2, 200, kv_heads, size, dim, dtype=torch.float64)
    q = torch.randn(sum(lengths), kv_heads * group, dim, dtype=torch.float64)
    offsets = np.concatenate(([0], np.cumsum(lengths))).tolist()
    got = paged_attention(q, keys, values, offsets, kv_lens, tables, dim**-0.5)
    for i, kv_len in enumerate(kv_lens):
        k = keys[tables[i]].transpose(1, 2).flatten(0, 1)[:kv_len].repeat_interleave(group, 1)
        v = values[tables[i]].transpose(1, 2).flatten(0, 1)[:kv_len].repeat_interleave(group, 1)
        for j in range(lengths[i]):
            seen = kv_len - lengths[i] + j + 1
            scores = torch.einsum("hd,khd->hk", q[offsets[i] + j], k[:seen]) * dim**-0.5
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:seen])
            torch.testing.assert_close(got[offsets[i] + j], expected)


def test_decode_attention_sees_nothing_beyond_a_sequences_end():
    """Not even NaN: blocks keep what their last owner wrote."""
    torch.manual_seed(0)
    q, table, lengths = torch.randn(2, 4, 8), torch.tensor([[1, 3], [2, 0]]), torch.tensor([11, 5], dtype=torch.int32)
    keys, values = torch.randn(2, 4, 2, 8, 8).unbind()
    spoilt_keys, spoilt_values = keys.clone(), values.clone()
    for blocks in (spoilt_keys, spoilt_values):
        blocks[3, :, 3:], blocks[2, :, 5:], blocks[0] = torch.nan, torch.inf, torch.nan
    expected = decode_attention(q, keys, values, lengths, table, 0.3)
    torch.testing.assert_close(decode_attention(q, spoilt_keys, spoilt_values, lengths, table, 0.3), expected)


@pytest.mark.parametrize("seed", range(12))
def test_cascade_equals_every_row_by_itself(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group, dim, size = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([4, 10]), rng.choice([1, 4])
    free = torch.randperm(600).tolist()
    tables, kv_lens, lengths, prefixes = [], [], [], []
    for members, num_shared in ((3, 5), (2, 1), (2, 0), (4, 17)):
        head, rows = [free.pop() for _ in range(num_shared)], []
        for _ in range(members):
            own = rng.randint(1, 20)
            rows.append(len(tables))
            tables.append(torch.tensor(head + [free.pop() for _ in range(-(-own // size))]))
            kv_lens.append(num_shared * size + own)
            lengths.append(rng.choice([1, own, rng.randint(1, own)]))
        if num_shared:
            prefixes.append((rows, torch.tensor(head)))
    offsets = np.concatenate(([0], np.cumsum(lengths))).tolist()
    keys, values = torch.randn(2, 600, kv_heads, size, dim, dtype=torch.float64)
    q = 3 * torch.randn(sum(lengths), kv_heads * group, dim, dtype=torch.float64)
    shared = [
        SharedPrefix(rows, head, torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in rows]))
        for rows, head in prefixes
    ]
    arguments = q, keys, values, offsets, kv_lens, tables, dim**-0.5
    torch.testing.assert_close(cascade_attention(*arguments, shared), paged_attention(*arguments))


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("bias", [True, False])
def test_ragged_short_conv_equals_one_convolution_a_sequence(kernel, bias):
    torch.manual_seed(kernel)
    lengths, hidden, window = [1, 5, 2, 1, 7], 6, kernel - 1
    states = torch.randn(len(lengths), window, hidden)
    x, weight = torch.randn(sum(lengths), hidden), torch.randn(hidden, kernel)
    b = torch.randn(hidden) if bias else None
    expected, taps, start = [], torch.empty(kernel, sum(lengths), dtype=torch.long), 0
    for s, n in enumerate(lengths):
        whole = torch.cat([states[s], x[start : start + n]]).T[None]
        expected.append(F.conv1d(whole, weight[:, None], b, groups=hidden)[0].T)
        for j in range(n):
            for k in range(kernel):
                place = j - (window - k)
                taps[k, start + j] = (
                    len(lengths) * window + start + place if place >= 0 else s * window + window + place
                )
        start += n
    got = ragged_short_conv(torch.cat([states.flatten(0, 1), x]), taps, weight, b)
    torch.testing.assert_close(got, torch.cat(expected))


@pytest.mark.parametrize("rows", [1, 2, 5, 63, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_transposed_linear_equals_linear(rows, bias):
    torch.manual_seed(rows)
    layer = PackedLinear(48, 70, bias=bias)
    x = torch.randn(rows, 48)
    expected = F.linear(x, layer.weight, layer.bias)
    got = transposed_linear(x, layer.weight, layer.bias)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        layer.transposed = False
        assert torch.equal(layer(x), expected)


def test_training_keeps_the_plain_product():
    layer = PackedLinear(8, 8)
    layer(torch.randn(max(TRANSPOSED_ROWS), 8)).sum().backward()
    assert layer.weight.grad is not None and layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [few_rows_linear, many_rows_linear])
def test_products_by_the_native_kernels(isa, dtype, product):
    try:
        kernels = native.load().using(isa)
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        rows, inner, out = (
            rng.randint(1, 33),
            rng.choice([1, 7, 16, 33, 200, 1024, 2101]),
            rng.choice([1, 2, 4, 17, 63, 130]),
        )
        x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(out, inner, dtype=dtype)
        bias = torch.randn(out, dtype=dtype) if rng.random() < 0.5 else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = product(kernels, x, weight, bias)
        assert got.dtype == dtype and got.shape == (rows, out)
        rounding = 0 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(got.double(), exact, rtol=rounding, atol=1e-5 * inner**0.5)
        residual = torch.randn(rows, out).to(dtype)
        assert torch.equal(product(kernels, x, weight, bias, residual), got + residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inner", [1, 70, 1024])
def test_a_row_of_few_in_fp32_does_not_depend_on_the_others(isa, inner):
    try:
        kernels = native.load().using(isa)
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))
    x, weight, bias = torch.randn(27, inner), torch.randn(101, inner), torch.randn(101)
    x[20, 0] = torch.nan
    whole = few_rows_linear(kernels, x, weight, bias)
    assert whole.isnan().all(1).nonzero().flatten().tolist() == [20]
    for rows in range(1, 15):
        for begin in (0, 3):
            assert torch.equal(few_rows_linear(kernels, x[begin : begin + rows], weight, bias), whole[begin:][:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_many_does_not_depend_on_the_others(dtype):
    kernels, threads = native.load(), torch.get_num_threads()
    x, weight = torch.randn(300, 1100, dtype=dtype), torch.randn(70, 1100, dtype=dtype)
    whole = many_rows_linear(kernels, x, weight)
    try:
        for n, begin, rows in [(1, 0, 300), (2, 3, 40), (3, 299, 1), (7, 100, 197)]:
            torch.set_num_threads(n)
            assert torch.equal(many_rows_linear(kernels, x[begin : begin + rows], weight), whole[begin : begin + rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_adds_a_residual(dtype, bias):
    kernels = KernelSet(native.load())
    layer, wrapped = (PackedLinear(40, 30, bias=bias).to(dtype) for _ in range(2))
    wrapped.register_forward_hook(lambda module, args, out: 3 * out)
    for rows in (1, 20, 300):
        x, residual = torch.randn(rows, 40, dtype=dtype), torch.randn(rows, 60, dtype=dtype)
        for some in (residual[:, :30].contiguous(), residual[:, 30:]):
            for module in (layer, wrapped):
                with torch.no_grad():
                    assert torch.equal(kernels.linear(module, x, some), kernels.linear(module, x) + some)


def test_a_native_layer_sees_new_weights_at_once():
    layer, kernels = PackedLinear(40, 30), KernelSet(native.load())
    x = torch.randn(20, 40)
    with torch.no_grad():
        for _ in range(2):
            layer.weight.normal_()
            torch.testing.assert_close(kernels.linear(layer, x), F.linear(x, layer.weight, layer.bias))
        assert kernels.linear(layer, x[:0]).shape == (0, 30)


def test_a_model_that_has_run_natively_can_be_copied_and_trained(demo_stock):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="16MiB") as generator:
        generator.generate([[5, 6, 7]], max_new_tokens=2)
        copied = copy.deepcopy(generator.model)
    copied(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert copied.lm_head.weight.grad is not None
