"""The native attention kernel beside the torch reference, by every instruction set that this processor has."""

import random
import shutil

import numpy as np
import pytest
import torch

from lfm2_cb.ops.attention.cascade import SharedPrefix, cascade_attention, shared_blocks
from lfm2_cb.ops.attention.packed import PAIR_ISAS, SDPA_KEYS, SDPA_QUERIES, PackedSequences
from lfm2_cb.ops.attention.reference import paged_attention

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)


class Case:
    """Random sequences in a paged cache whose blocks lie in any order, and are NaN where nothing is stored."""

    def __init__(self, seed, dtype, kv_lens, lengths=None, kv_heads=None, group=None, dim=None, size=None):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        kv_heads = kv_heads or rng.choice([1, 2, 3, 8])
        group = group or rng.choice([1, 2, 3, 4, 20])
        dim = dim or rng.choice([2, 4, 8, 10, 32, 40, 64, 100, 128])
        self.size = size = size or rng.choice([1, 3, 16, 64])
        self.kv_lens = kv_lens
        self.lengths = lengths or [
            rng.choice([1, 1, min(n, 4), rng.randint(1, min(n, 3 * SDPA_QUERIES))]) for n in kv_lens
        ]
        counts = [-(-n // size) for n in kv_lens]
        ids = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)]
        self.tables = list(ids.split(counts))
        shape = (2, sum(counts) + 3, kv_heads, size, dim)
        self.keys, self.values = torch.full(shape, float("nan")).to(dtype)
        for n, table in zip(kv_lens, self.tables, strict=True):
            for cache in (self.keys, self.values):
                stored = torch.randn(len(table) * size, kv_heads, dim, generator=generator)
                stored[n:] = float("nan")
                cache[table] = stored.unflatten(0, (-1, size)).transpose(1, 2).to(dtype)
        self.offsets = np.concatenate(([0], np.cumsum(self.lengths))).tolist()
        self.q = (2 * torch.randn(sum(self.lengths), kv_heads * group, dim, generator=generator)).to(dtype)
        self.scaling = dim**-0.5

    def sequences(self, kernels, first_keys=None):
        return PackedSequences(kernels, self.offsets, self.kv_lens, self.tables, first_keys)

    def native(self, kernels):
        return self.sequences(kernels).attend(self.q, self.keys, self.values, self.scaling)

    def reference(self):
        whole = self.q.double(), self.keys.double(), self.values.double()
        return paged_attention(*whole, self.offsets, self.kv_lens, self.tables, self.scaling)


def assert_near(got, exact, kernels=None):
    """In fp32 to a few roundings; in bf16 to the one rounding of the result, and of its weights where `kernels` may
    round them: then the error is SDPA's in bf16, 1.7e-3 to 2.1e-3 of the whole."""
    assert got.isfinite().all()
    if kernels is not None and kernels.isa in PAIR_ISAS and got.dtype == torch.bfloat16:
        error = (got.double() - exact).abs()
        assert error.norm() <= 2.1e-3 * exact.norm()
        assert (error <= 2**-8 * (exact.abs() + exact.abs().amax(-1, keepdim=True))).all()
        return
    limits = {"rtol": 2**-8, "atol": 1e-5} if got.dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(got.double(), exact, **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(kernels, dtype, seed):
    rng = random.Random(seed)
    torch.set_num_threads(rng.choice([1, 2, 5]))
    case = Case(seed, dtype, [rng.choice([1, 2, 63, 64, 65, rng.randint(1, 300)]) for _ in range(9)])
    assert_near(case.native(kernels), case.reference(), kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_keys", [511, 512, 513, 1025, 2048, 5000])
def test_long_sequences_are_cut_and_merged(kernels, dtype, num_keys):
    lengths = [1, 3, 40, 1]
    case = Case(num_keys, dtype, [num_keys, num_keys, num_keys, 7], lengths, kv_heads=2, group=2, dim=64, size=64)
    assert_near(case.native(kernels), case.reference(), kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_chunks_go_through_sdpa_beside_the_rest(kernels, dtype):
    lengths = [1, SDPA_QUERIES + 1, 300, 300, SDPA_QUERIES, 2]
    kv_lens = [50, SDPA_KEYS + 1, 1420, SDPA_KEYS, 1100, 700]
    case = Case(1, dtype, kv_lens, lengths, kv_heads=2, group=2, dim=16, size=16)
    assert len(case.sequences(kernels).sequences) == 4
    got, exact = case.native(kernels), case.reference()
    if dtype == torch.float32:
        assert_near(got, exact)
    else:  # SDPA's own error in bf16 is larger than one rounding
        torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=1e-2)


def test_a_result_depends_neither_on_batch_mates_nor_on_threads(kernels):
    case = Case(5, torch.float32, [1300, 40, 600, 5000], [1, 4, 20, 1], kv_heads=2, group=2, dim=64, size=16)
    torch.set_num_threads(1)
    whole = case.native(kernels)
    torch.set_num_threads(4)
    assert torch.equal(case.native(kernels), whole)
    for i, (n, table) in enumerate(zip(case.kv_lens, case.tables, strict=True)):
        rows = slice(case.offsets[i], case.offsets[i + 1])
        alone = PackedSequences(kernels, [0, case.lengths[i]], [n], [table])
        assert torch.equal(alone.attend(case.q[rows], case.keys, case.values, case.scaling), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_result_does_not_depend_on_how_a_prompt_is_cut_into_chunks(kernels, dtype, seed):
    rng = random.Random(seed)
    n = rng.choice([70, 513, SDPA_KEYS])
    case = Case(seed, dtype, [n], [n], size=16, dim=64)
    whole, start = case.native(kernels), 0
    while start < n:
        end = min(n, start + rng.choice([1, 5, SDPA_QUERIES, SDPA_QUERIES + 1, 500]))
        chunk = PackedSequences(kernels, [0, end - start], [end], [case.tables[0][: -(-end // 16)]])
        got = chunk.attend(case.q[start:end], case.keys, case.values, case.scaling)
        if end - start == 1 and dtype == torch.bfloat16 and kernels.isa in PAIR_ISAS:  # by another kernel
            assert_near(got, whole[start:end].double(), kernels)
        else:
            assert torch.equal(got, whole[start:end])
        start = end


def test_scores_of_any_size_neither_overflow_nor_vanish(kernels):
    case = Case(3, torch.float32, [700, 90, 1], [1, 5, 1], kv_heads=1, group=2, dim=8, size=16)
    for scale in (1e-30, 100.0, 1e6):
        case.q = scale * case.q.sign()
        exact = case.reference()
        torch.testing.assert_close(case.native(kernels).double(), exact, rtol=1e-4, atol=1e-4)


def test_a_nan_stays_in_its_sequence(kernels):
    case = Case(4, torch.float32, [100, 100], [1, 1], kv_heads=1, group=1, dim=8, size=16)
    case.q[0] = float("nan")
    got = case.native(kernels)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_queries_that_lie_apart_are_read_where_they_are(kernels):
    case = Case(6, torch.float32, [40, 9], [3, 1], kv_heads=2, group=1, dim=8, size=4)
    expected = case.native(kernels)
    wide = torch.full((4, 3, 8), float("nan"))
    wide[:, :2] = case.q
    case.q = wide[:, :2]
    assert torch.equal(case.native(kernels), expected)


def test_another_dtype_is_refused(kernels):
    case = Case(7, torch.float32, [4], [1])
    case.q = case.q.bfloat16()
    with pytest.raises(ValueError, match="dtype"):
        case.native(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_cascade_equals_every_row_by_itself(kernels, dtype, seed):
    rng = random.Random(seed)
    size, num_shared = rng.choice([1, 4, 16]), rng.randint(1, 9)
    own = [rng.randint(1, SDPA_QUERIES) for _ in range(5)]
    lengths = [rng.choice([1, rng.randint(1, n)]) for n in own]
    case = Case(seed, dtype, [n + num_shared * size for n in own], lengths, size=size, group=2)
    members = [0, 2, 3]
    for i in members[1:]:
        case.tables[i] = torch.cat((case.tables[0][:num_shared], case.tables[i][num_shared:]))
    tokens = torch.cat([torch.arange(case.offsets[i], case.offsets[i + 1]) for i in members])
    prefixes = [SharedPrefix(members, case.tables[0][:num_shared], tokens)]
    first_keys = [size * count for count in shared_blocks(prefixes, len(own))]
    whole = case.q, case.keys, case.values, case.offsets, case.kv_lens, case.tables, case.scaling
    mixed = cascade_attention(*whole, prefixes, packed=case.sequences(kernels, first_keys))
    assert_near(mixed, case.reference(), kernels)
