"""Paged attention against the torch reference: single queries, split along their keys or not, and chunks."""

import random

import pytest
import torch
from cases import Step, assert_near, widened

from lfm2_cb.ops.attention.kv_blocks import Int8Blocks, gather, make_blocks, write_rows
from lfm2_cb.ops.attention.reference import causal_attention
from lfm2_cb.ops.triton import attention, varlen
from lfm2_cb.ops.triton.kernels import TritonKernels
from lfm2_cb.ops.triton.tables import AttentionTables

KERNELS = TritonKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fill(step, kv_heads, dim, dtype, in_8_bits, device, generator):
    """Keys and values: NaN wherever no sequence has written."""
    shape = step.num_blocks, kv_heads, step.block_size, dim
    caches = []
    for _ in range(2):
        blocks = make_blocks(shape, torch.int8 if in_8_bits else dtype, device)
        if not in_8_bits:
            blocks.fill_(torch.nan)
        for s, kv_len in zip(step.sequences, step.kv_lens, strict=True):
            position = torch.arange(kv_len)
            block = torch.tensor(s.block_table)[position // step.block_size]
            rows = (block[:, None] * kv_heads + torch.arange(kv_heads)) * step.block_size
            rows = rows + (position % step.block_size)[:, None]
            numbers = torch.randn(kv_len, kv_heads, dim, generator=generator).to(device, dtype)
            write_rows(blocks, rows.flatten().to(device), numbers)
        caches.append(blocks)
    return caches


def by_torch(step, q, caches, scaling):
    """Of a dtype, what SDPA finds in it."""

    def compute(dtype):
        out = torch.empty_like(q, dtype=dtype)
        tables, ends = step.block_tables(q.device), step.cu_seqlens
        for i, kv_len in enumerate(step.kv_lens):
            k, v = (gather(blocks, tables[i], kv_len).to(dtype) for blocks in caches)
            rows = slice(ends[i], ends[i + 1])
            out[rows] = causal_attention(q[rows].to(dtype), k, v, scaling)
        return out

    return compute


@pytest.mark.parametrize("split_keys", [16, 512])
def test_equals_torch(device, split_keys, monkeypatch):
    monkeypatch.setattr(attention, "SPLIT_KEYS", split_keys)
    for seed in range(100 * (split_keys == 512), 100 + 100 * (split_keys == 512)):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype, in_8_bits = DTYPES[seed % 3], seed % 4 == 3
        kv_heads, group = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 17])
        dim = rng.choice([64, 128, 4 * rng.randint(1, 30), 10])
        step = Step.random(rng, most_tokens=rng.choice([5, 40]), longest=rng.choice([10, 50]), count=2)
        caches = fill(step, kv_heads, dim, dtype, in_8_bits, device, generator)
        q = torch.randn(step.num_tokens, kv_heads * group * dim, generator=generator).to(device, dtype)
        q = q.view(-1, kv_heads * group, dim)
        tables = step.tables(device, attention.chunk_queries(group))
        got = KERNELS.attend(q, *caches, tables, dim**-0.5)
        assert_near(got, by_torch(step, q, caches, dim**-0.5), dtype)


def test_a_row_does_not_depend_on_who_shares_its_batch(device, monkeypatch):
    """Nor on how wide the tables are: keys are split at the same places."""
    monkeypatch.setattr(attention, "SPLIT_KEYS", 16)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    step = Step.random(rng, most_tokens=1, longest=80, count=5, size=8)
    caches = fill(step, 2, 16, torch.float32, False, device, generator)
    q = torch.randn(step.num_tokens, 4, 16, generator=generator).to(device)
    whole = KERNELS.attend(q, *caches, step.tables(device, attention.chunk_queries(2)), 0.25)
    for i, s in enumerate(step.sequences):
        own = Step([s], step.block_size, step.num_blocks).tables(device, attention.chunk_queries(2))
        rows = slice(step.cu_seqlens[i], step.cu_seqlens[i + 1])
        tables = AttentionTables(own.first, own.kv_lens, widened(own.block_tables, 1, 20), own.decodes, own.chunks)
        assert torch.equal(KERNELS.attend(q[rows], *caches, tables, 0.25), whole[rows])


def test_rows_that_fill_up_a_step_are_zeros_and_touch_nobody(device):
    generator = torch.Generator().manual_seed(0)
    step = Step.random(random.Random(1), most_tokens=1, longest=50, count=3, size=4)
    for s in step.sequences:
        s.token_ids = [0]
    caches = fill(step, 2, 32, torch.float32, False, device, generator)
    count, table = len(step.sequences), widened(step.tables(device).block_tables, 8, 30)
    kv_lens = torch.tensor([*step.kv_lens, *[0] * (8 - count)], dtype=torch.int32, device=device)
    q = torch.randn(8, 6, 32, generator=generator).to(device)
    got = KERNELS.decode_attention(q, *caches, kv_lens, table, 0.2)
    torch.testing.assert_close(got[:count], by_torch(step, q[:count], caches, 0.2)(torch.float32))
    assert not got[count:].any()


def test_decode_attention_equals_torch(device):
    """As padded steps call it: beyond a sequence's blocks its table has any that there are."""
    for seed in range(20):
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        step = Step.random(rng, most_tokens=1, longest=40, count=3, size=rng.choice([4, 16]))
        for s in step.sequences:
            s.token_ids = [0]
        caches = fill(step, 2, 16, torch.float32, seed % 2 == 1, device, generator)
        q = torch.randn(step.num_tokens, 4, 16, generator=generator).to(device)
        table = widened(step.tables(device).block_tables, len(step.sequences), 12)
        kv_lens = torch.tensor(step.kv_lens, dtype=torch.int32, device=device)
        got = KERNELS.decode_attention(q, *caches, kv_lens, table, 0.25)
        assert_near(got, by_torch(step, q, caches, 0.25), torch.float32)


def paged_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table
):
    """What torch's documentation says that `varlen_attn` computes over pages."""
    assert cu_seq_k is None and enable_gqa and window_size == (-1, 0)
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    out = torch.empty_like(query)
    for i, (start, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        num_keys = int(seqused_k[i])
        assert end - start <= max_q and num_keys <= max_k
        pages = block_table[i, : -(-num_keys // key.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[:num_keys] for x in (key, value))
        out[start:end] = causal_attention(query[start:end], k, v, scale)
    return out


def test_torchs_own_kernel_is_called_as_it_is_documented(device, monkeypatch):
    monkeypatch.setattr(varlen.varlen, "varlen_attn", paged_varlen)
    for seed in range(20):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        step = Step.random(rng, most_tokens=rng.choice([1, 20]))
        caches = fill(step, 2, 16, torch.bfloat16, False, device, generator)
        q = torch.randn(step.num_tokens, 6, 16, generator=generator).to(device, torch.bfloat16)
        got = varlen.paged_attention(q, *caches, step.tables(device), 0.25)
        assert torch.equal(got, by_torch(step, q, caches, 0.25)(torch.bfloat16))


def test_torchs_own_kernel_runs_where_the_card_and_the_version_have_it(monkeypatch):
    """Chosen at run time; here the card is made up."""

    class OnCard(torch.Tensor):
        device = torch.device("cuda")

    q, keys = (torch.empty(3, 4, 64, dtype=torch.bfloat16).as_subclass(OnCard) for _ in range(2))
    in_8_bits = make_blocks((1, 1, 8, 64), torch.int8, torch.device("cpu"))
    assert isinstance(in_8_bits, Int8Blocks)
    capability, activated = (9, 0), "FA3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: activated, raising=False)
    assert varlen.can_attend(q, keys)
    assert not varlen.can_attend(q, in_8_bits)
    assert not varlen.can_attend(q.float().as_subclass(OnCard), keys)
    assert not varlen.can_attend(q[..., :63], keys)
    assert not varlen.can_attend(torch.empty(3, 4, 64, dtype=torch.bfloat16), keys)
    capability = (8, 0)
    assert not varlen.can_attend(q, keys)
    capability, activated = (9, 0), None
    assert not varlen.can_attend(q, keys)


def test_torchs_signature_has_what_is_passed():
    inspect = pytest.importorskip("inspect")
    parameters = inspect.signature(pytest.importorskip("torch.nn.attention.varlen").varlen_attn).parameters
    if "block_table" not in parameters:
        pytest.skip("this torch has no paging")
    assert parameters.keys() >= inspect.signature(paged_varlen).parameters.keys()
