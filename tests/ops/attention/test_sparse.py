"""Block-sparse attention: the choice of blocks, and every kernel beside the torch reference."""

import shutil

import pytest
import torch
from test_bf16 import emulation, kernels  # noqa: F401  # fixtures: every instruction set for bf16, and the emulation
from test_int8_cache import Case as Int8Case
from test_packed import Case

from lfm2_cb.ops.attention import reference, sparse
from lfm2_cb.ops.attention.packed import TILE_ISAS, PackedSequences
from lfm2_cb.ops.attention.reference import causal_attention, paged_attention, sparse_attention
from lfm2_cb.ops.attention.sparse import KEY_BLOCK, QUERY_BLOCK, SparsePrefill, block_mass, choose_blocks
from lfm2_cb.ops.native import library as native

NO_COMPILER = shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None
NEVER = 10**9


def random_qkv(seed, num_queries, num_keys, kv_heads=2, group=2, dim=16, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    q = sharpness * torch.randn(num_queries, kv_heads * group, dim, generator=generator)
    k, v = torch.randn(2, num_keys, kv_heads, dim, generator=generator)
    return q, k, v


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (5, 5), (300, 300), (130, 900), (257, 1000)])
def test_the_mass_is_what_the_sampled_queries_attend_to(num_queries, num_keys):
    q, k, _ = random_qkv(0, num_queries, num_keys)
    mass = block_mass(q, k, 0.25)
    block = mass.shape[2] - 1
    first = block * QUERY_BLOCK
    rows = [min(first + i, num_queries - 1) for i in range(15, 128, 16) if first + i - 15 < num_queries]
    sums = mass.sum(-1)
    assert torch.allclose(sums[0], torch.ones(()), atol=1e-5)
    assert torch.allclose(sums[1, :, block], torch.tensor(float(len(rows) > 1)), atol=1e-5)
    for half in range(min(2, len(rows))):
        expected = torch.zeros(mass.shape[-1])
        for row in rows[half::2]:
            seen = num_keys - num_queries + row + 1
            for head in (0, 1):
                weights = (k[:seen, 0] @ q[row, head] * 0.25).softmax(-1)
                expected.index_add_(0, torch.arange(seen) // KEY_BLOCK, weights / len(rows[half::2]) / 2)
        torch.testing.assert_close(mass[half, 0, block], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95, 1.0])
def test_the_chosen_blocks_hold_the_share_and_no_more_than_needed(share):
    q, k, _ = random_qkv(1, 512, 4000)
    q[:] = q[:1]  # queries that attend alike
    k *= torch.rand(63, generator=torch.Generator().manual_seed(0)).repeat_interleave(KEY_BLOCK)[:4000, None, None]
    mass = block_mass(q, k, 0.25)
    taken = choose_blocks(mass, SparsePrefill(share, NEVER), 512, 4000)
    assert (torch.where(taken, mass, 0).sum(-1) >= share - 0.01).all()
    assert taken[..., 0].all() and taken[:, 0, (4000 - 512) // 64 - 2 : (4000 - 512 + 128) // 64].all()
    visible = choose_blocks(mass, SparsePrefill(1.0, NEVER), 512, 4000)
    assert not (taken & ~visible).any() and (share == 1 or taken.sum() < visible.sum())
    if share == 0.95:  # one block less would not be enough
        held, heaviest = torch.where(taken, mass, 0).sum(-1), mass.amax(-1)
        assert (held <= share + heaviest + 0.01).all()


def true_mass(q, k, taken):
    """Of the attention of all queries, the least that any block of queries gives to the blocks it takes."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * 0.25
    unseen = torch.arange(len(k)) > len(k) - len(q) + torch.arange(len(q))[:, None]
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    group, by_key = q.shape[1] // k.shape[1], taken.repeat_interleave(KEY_BLOCK, -1)[..., : len(k)]
    by_row = by_key.repeat_interleave(QUERY_BLOCK, 1)[:, : len(q)].repeat_interleave(group, 0)
    return float((weights * by_row).sum(-1).unflatten(1, (-1, QUERY_BLOCK)).mean(-1).min())


def test_queries_that_do_not_attend_alike_still_have_their_share():
    """Each has a few heavy keys of its own: chosen by the sample alone, blocks would hold the sample's."""
    q, k, _ = random_qkv(6, 256, 4000, sharpness=6.0)
    taken = choose_blocks(block_mass(q, k, 0.25), SparsePrefill(0.8, NEVER), 256, 4000)
    assert not taken.all() and true_mass(q, k, taken) > 0.78


def test_all_is_seen_from_the_exact_position_on():
    q, k, _ = random_qkv(2, 512, 2000)
    taken = choose_blocks(block_mass(q, k, 0.25), SparsePrefill(0.01, 1999), 512, 2000)
    assert taken[:, -1].all() and not taken[:, :-1].all(-1).any()


def test_the_reference_with_all_blocks_is_the_dense_one(monkeypatch):
    q, k, v = random_qkv(3, 400, 1000)
    taken = choose_blocks(block_mass(q, k, 0.25), SparsePrefill(1.0, NEVER), 400, 1000)
    dense = causal_attention(q, k, v, 0.25)
    torch.testing.assert_close(sparse_attention(q, k, v, taken, 0.25), dense, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(reference, "MASK_ENTRIES", 10_000)  # a long prompt's mask is made in parts
    torch.testing.assert_close(causal_attention(q, k, v, 0.25), dense, rtol=1e-5, atol=1e-5)


def test_the_reference_reads_the_chosen_blocks_alone():
    q, k, v = random_qkv(4, 200, 900)
    taken = torch.rand(2, 2, 15, generator=torch.Generator().manual_seed(0)) < 0.5
    taken[:, :, 10:] = True
    got = sparse_attention(q, k, v, taken, 0.25)
    for head in range(2):
        for block in range(2):
            unread = ~taken[head, block].repeat_interleave(KEY_BLOCK)[:900]
            changed = v.clone()
            changed[unread, head] = 99.0
            same = sparse_attention(q, k, changed, taken, 0.25)
            rows = slice(block * QUERY_BLOCK, (block + 1) * QUERY_BLOCK)
            assert torch.equal(same[rows, 2 * head : 2 * head + 2], got[rows, 2 * head : 2 * head + 2])


def sparse_of(case, share):
    return [
        SparsePrefill(share, n - 1) if length > 1 else None
        for n, length in zip(case.kv_lens, case.lengths, strict=True)
    ]


def run_sparsely(case, kernels, share):  # noqa: F811
    how = sparse_of(case, share)
    packed = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables, sparse=how)
    got = packed.attend(case.q, case.keys, case.values, case.scaling)
    cache = case.q.double(), case.keys, case.values
    if isinstance(case.keys, torch.Tensor):
        cache = tuple(x.double() for x in cache)
    return got, paged_attention(*cache, case.offsets, case.kv_lens, case.tables, case.scaling, how)


def assert_close_but_for_ties(got, exact):
    """A block that is as heavy as another may be chosen for it by one kernel and not by the other."""
    error = (got.double() - exact).abs().amax((1, 2))
    assert got.isfinite().all() and (error <= 0.03 * exact.abs().max()).float().mean() > 0.97, error.max()


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(("group", "dim"), [(2, 64), (1, 128), (3, 64), (8, 128)])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_kernels_for_bf16_choose_and_attend_as_the_reference(kernels, group, dim, in_8_bits):  # noqa: F811
    if kernels.emulated and group > 2:
        pytest.skip("the emulation takes minutes")
    kind = Int8Case if in_8_bits else Case
    case = kind(7 * group, torch.bfloat16, [700, 1, 1500, 40, 900], [700, 1, 290, 40, 3], 2, group, dim, 64)
    torch.set_num_threads(3)
    got, exact = run_sparsely(case, kernels, 0.6)
    assert_close_but_for_ties(got, exact)
    called = ["block_mass", "block_mass", "decode_attention", "prefill_attention"]  # the last blocks, then all of them
    assert kernels.isa not in TILE_ISAS or kernels.called == called


def flat_and_peaked(num_keys, share):
    """Two prompts that share a batch: the second one's queries attend to one key far before, by a long way."""
    case = Case(9, torch.bfloat16, [num_keys] * 2, [300] * 2, 2, 2, 64, 64)
    case.q[:300] = 0
    case.q[300:] = 3
    case.keys[case.tables[1][1], :, 5] = 0.65  # 97 % of the mass
    return case, [SparsePrefill(share, NEVER)] * 2


def test_no_list_is_made_where_it_would_leave_out_next_to_nothing():
    case, (how, _) = flat_and_peaked(2000, 0.95)
    keys = [case.keys[table].transpose(1, 2).flatten(0, 1)[:2000] for table in case.tables]
    assert sparse.choose_lists(case.q[:300], keys[0], case.scaling, how) is None
    taken = sparse.choose_lists(case.q[300:], keys[1], case.scaling, how)
    assert torch.equal(taken, choose_blocks(block_mass(case.q[300:], keys[1], case.scaling), how, 300, 2000))
    assert taken.float().mean() < 0.3


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_kernels_make_no_list_that_would_not_pay(kernels):  # noqa: F811
    case, how = flat_and_peaked(700 if kernels.emulated else 2000, 0.95)
    dense = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables)
    expected = dense.attend(case.q, case.keys, case.values, case.scaling)
    kernels.called.clear()
    packed = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables, sparse=how)
    got = packed.attend(case.q, case.keys, case.values, case.scaling)
    tiles = kernels.isa in TILE_ISAS
    assert kernels.called.count("block_mass") == 2 * tiles
    close = torch.equal if tiles else lambda a, b: torch.allclose(a, b, rtol=2**-7, atol=1e-2)
    assert close(got[:300], expected[:300]) and not torch.equal(got[300:], expected[300:])
    kernels.called.clear()
    packed = PackedSequences(kernels, [0, 300], [case.kv_lens[0]], [case.tables[0]], sparse=how[:1])
    assert close(packed.attend(case.q[:300], case.keys, case.values, case.scaling), expected[:300])
    assert kernels.called.count("block_mass") == tiles


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_kernel_for_all_shapes_attends_as_the_reference(share):
    case = Case(5, torch.float32, [700, 1, 2100, 3], [700, 1, 333, 3], 3, 2, 40, 16)
    got, exact = run_sparsely(case, native.load(), share)
    torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-6)
    if share == 1:
        dense = PackedSequences(native.load(), case.offsets, case.kv_lens, case.tables)
        torch.testing.assert_close(got, dense.attend(case.q, case.keys, case.values, case.scaling))


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_with_all_blocks_the_matrix_units_give_the_dense_bits(kernels):  # noqa: F811
    case = Case(6, torch.bfloat16, [2500, 300, 1], [600, 300, 1], 2, 2, 64, 64)
    got, _ = run_sparsely(case, kernels, 1.0)
    dense = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables)
    expected = dense.attend(case.q, case.keys, case.values, case.scaling)
    if kernels.isa in TILE_ISAS:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-2)


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_the_sample_of_the_matrix_units_is_the_references(kernels):  # noqa: F811
    if kernels.isa not in TILE_ISAS:
        pytest.skip("another kernel's")
    case = Case(8, torch.bfloat16, [777], [515], 2, 3, 64, 16)
    q, k = case.q, case.keys[case.tables[0]].transpose(1, 2).flatten(0, 1)[:777]
    expected = sparse.block_mass(q, k, case.scaling)
    mass, size = torch.zeros_like(expected), expected[0].numel()
    table = torch.tensor([[0, 515, 0, 777, 0, 0]])
    sizes = 1, 6, 2, 64, 16, q.stride(0), size
    kernels.call("block_mass", q, case.keys, None, table, case.tables[0], mass, *sizes, case.scaling)
    torch.testing.assert_close(mass, expected, rtol=1e-3, atol=1e-6)
