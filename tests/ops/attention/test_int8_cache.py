"""K/V in 8 bits: what is stored, and attention over it by the reference and by every instruction set's kernel."""

import random
import shutil

import pytest
import torch
from helpers import random_config
from transformers import Lfm2Config

from lfm2_cb.model.hybrid_cache import CachePlan, HybridCache
from lfm2_cb.ops import native
from lfm2_cb.ops.attention.cascade import SharedPrefix, cascade_attention, shared_blocks
from lfm2_cb.ops.attention.kv_blocks import Int8Blocks, copy_block, gather, make_blocks, write_rows
from lfm2_cb.ops.attention.packed import PAIR_ISAS, SDPA_KEYS, SDPA_QUERIES, PackedSequences
from lfm2_cb.ops.attention.reference import paged_attention
from lfm2_cb.ops.native.instruction_sets import ISAS

has_compiler = shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is not None


@pytest.fixture(params=["torch", *ISAS])
def kernels(request):
    """None: the torch reference."""
    if request.param == "torch":
        return None
    if not has_compiler:
        pytest.skip("no C++ compiler")
    loaded = native.load()
    if request.param not in loaded.supported:
        pytest.skip(f"this processor has no {request.param}")
    return loaded.using(request.param)


class Case:
    """Random sequences whose K/V lie in 8-bit blocks in any order; scales are NaN where nothing is stored."""

    def __init__(self, seed, dtype, kv_lens, lengths=None, kv_heads=None, group=None, dim=None, size=None):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        kv_heads, group = kv_heads or rng.choice([1, 2, 3, 8]), group or rng.choice([1, 2, 3, 20])
        dim, size = dim or rng.choice([2, 4, 10, 32, 40, 64, 100, 128]), size or rng.choice([1, 3, 16, 64])
        self.kv_lens, self.scaling = kv_lens, dim**-0.5
        self.lengths = lengths or [
            rng.choice([1, 1, min(n, 4), rng.randint(1, min(n, SDPA_QUERIES))]) for n in kv_lens
        ]
        counts = [-(-n // size) for n in kv_lens]
        ids = torch.randperm(sum(counts), generator=generator)
        self.tables = list(ids.split(counts))
        shape = (len(ids), kv_heads, size, dim)
        self.keys, self.values = (make_blocks(shape, torch.int8, torch.device("cpu")) for _ in range(2))
        for blocks in (self.keys, self.values):
            blocks.values.fill_(77)
            blocks.scale.fill_(torch.nan)
        for n, table in zip(kv_lens, self.tables, strict=True):
            place = torch.arange(n)
            rows = (table[place // size, None] * kv_heads + torch.arange(kv_heads)) * size + place[:, None] % size
            for blocks in (self.keys, self.values):
                spread = torch.rand(n, kv_heads, 1, generator=generator) * 4
                new = (spread * torch.randn(n, kv_heads, dim, generator=generator)).to(dtype)
                write_rows(blocks, rows.flatten(), new)
        self.offsets = [sum(self.lengths[:i]) for i in range(len(kv_lens) + 1)]
        self.q = (2 * torch.randn(sum(self.lengths), kv_heads * group, dim, generator=generator)).to(dtype)

    def whole(self):
        return self.q, self.keys, self.values, self.offsets, self.kv_lens, self.tables, self.scaling

    def attend(self, kernels):
        if kernels is None:
            return paged_attention(*self.whole())
        packed = PackedSequences(kernels, self.offsets, self.kv_lens, self.tables)
        return packed.attend(self.q, self.keys, self.values, self.scaling)

    def reference(self):
        """In fp64, over what is stored."""
        keys, values = (b.values.double() * b.scale.double() for b in (self.keys, self.values))
        return paged_attention(self.q.double(), keys, values, *self.whole()[3:])


def assert_near(got, exact, kernels):
    assert got.isfinite().all()
    if got.dtype == torch.bfloat16 and kernels is None:  # SDPA's own error in bf16, over keys rounded to bf16
        assert (got - exact).norm() < 1e-2 * exact.norm()
        return
    if got.dtype == torch.bfloat16 and kernels.isa in PAIR_ISAS:  # the query in two bytes, the weights too
        error = (got.double() - exact).abs()
        assert error.norm() <= 2e-3 * exact.norm()
        assert (error <= 2**-8 * (exact.abs() + exact.abs().amax(-1, keepdim=True))).all()
        return
    limits = {"rtol": 2**-8, "atol": 1e-5} if got.dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(got.double(), exact, **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(kernels, dtype, seed):
    rng = random.Random(seed)
    case = Case(seed, dtype, [rng.choice([1, 2, 63, 64, 65, 513, rng.randint(1, 300)]) for _ in range(7)])
    assert_near(case.attend(kernels), case.reference(), kernels)


def test_long_sequences_and_long_chunks(kernels):
    case = Case(1, torch.float32, [2100, 700, SDPA_KEYS + 9], [1, 5, SDPA_QUERIES + 1], size=16)
    assert_near(case.attend(kernels), case.reference(), kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_cascade(kernels, dtype, seed):
    size, num_shared = [1, 4, 16][seed], 5
    case = Case(seed, dtype, [n + num_shared * size for n in (3, 40, 9, 21)], [1, 4, 2, 1], size=size)
    members = [0, 2, 3]
    for i in members[1:]:
        case.tables[i] = torch.cat((case.tables[0][:num_shared], case.tables[i][num_shared:]))
    tokens = torch.cat([torch.arange(case.offsets[i], case.offsets[i + 1]) for i in members])
    prefixes = [SharedPrefix(members, case.tables[0][:num_shared], tokens)]
    first_keys = [size * count for count in shared_blocks(prefixes, 4)]
    packed = kernels and PackedSequences(kernels, case.offsets, case.kv_lens, case.tables, first_keys)
    assert_near(cascade_attention(*case.whole(), prefixes, packed=packed), case.reference(), kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_come_back_within_half_a_step_of_their_largest_value(dtype):
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([0.0, 1e-4, 1, 50, 1, 1])[:, None, None]
    rows = (size * torch.randn(6, 3, 10, generator=generator)).to(dtype)
    blocks = make_blocks((4, 3, 2, 10), torch.int8, torch.device("cpu"))
    token, head = torch.arange(6)[:, None], torch.arange(3)
    write_rows(blocks, (((token // 2) * 3 + head) * 2 + token % 2).flatten(), rows)
    got = gather(blocks, torch.arange(3), 6)
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    assert got.dtype == torch.float32 and got[0].eq(0).all()
    assert ((got.double() - rows.double()).abs() <= 0.51 * step + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_stores_the_same_bits(kernels, dtype, seed):
    """Also of rows that lie in a wider tensor, ties, zeros, huge and tiny values, and those that are not finite."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, dim, tokens = rng.choice([1, 2, 8]), rng.choice([1, 4, 10, 40, 64, 100]), rng.choice([1, 7, 300])
    wide = torch.randn(tokens, heads + 2, dim, generator=generator)
    wide *= 10.0 ** torch.randint(-20, 20, (tokens, heads + 2, 1), generator=generator)
    wide[::3] = torch.randint(-254, 255, wide[::3].shape, generator=generator) / 2
    wide[-1, 0] = 0
    rows = wide.to(dtype)[:, :heads]
    slots = torch.randperm(tokens * heads, generator=generator)
    expected, got = (make_blocks((tokens, heads, 1, dim), torch.int8, torch.device("cpu")) for _ in range(2))
    write_rows(expected, slots, rows)
    write_rows(got, slots, rows, kernels)
    assert torch.equal(got.values, expected.values) and torch.equal(got.scale, expected.scale)
    for broken in (torch.nan, torch.inf):
        rows[0, 0, -1] = broken
        write_rows(got, slots, rows, kernels)
        assert not gather(got, slots[:1] // heads, 1)[:, slots[0] % heads].isfinite().all()


def test_what_is_stored_of_a_row_does_not_depend_on_the_rows_beside_it():
    rows = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(0))
    together, apart = (make_blocks((10, 2, 4, 32), torch.int8, torch.device("cpu")) for _ in range(2))
    token, head = torch.arange(40)[:, None], torch.arange(2)
    slots = ((token // 4) * 2 + head) * 4 + token % 4
    write_rows(together, slots.flatten(), rows)
    for i in torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist():
        write_rows(apart, slots[i], rows[i : i + 1])
    assert torch.equal(together.values, apart.values) and torch.equal(together.scale, apart.scale)


def test_a_copied_block_has_its_scales():
    blocks = make_blocks((3, 2, 4, 8), torch.int8, torch.device("cpu"))
    blocks.values.random_(-127, 127)
    blocks.scale.uniform_(1, 2)
    copy_block(blocks, 2, 0)
    assert torch.equal(blocks.values[0], blocks.values[2]) and torch.equal(blocks.scale[0], blocks.scale[2])
    assert not torch.equal(blocks.scale[0], blocks.scale[1])


def test_8_bit_keys_beside_full_values_are_refused():
    if not has_compiler:
        pytest.skip("no C++ compiler")
    case = Case(0, torch.float32, [4], [1])
    case.values = case.values.values.float()
    with pytest.raises(ValueError, match="one dtype"):
        case.attend(native.load())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_the_plan_counts_the_bytes_that_the_tensors_take(dtype, checkpoints):
    config = random_config(3)
    plan = CachePlan.from_budget(
        config, 2**20, block_size=8, num_slots=3, dtype=dtype, checkpoints=checkpoints, cache_dtype="int8"
    )
    cache = HybridCache(config, plan, dtype, torch.device("cpu"))
    stored = [t for b in (*cache.keys.values(), *cache.values.values()) for t in (b.values, b.scale)]
    size = sum(t.numel() * t.element_size() for t in (*stored, *cache.conv_states.values()))
    assert size == plan.total_bytes and all(isinstance(b, Int8Blocks) for b in cache.keys.values())
    assert all(state.dtype == dtype for state in cache.conv_states.values())


def test_a_budget_holds_nearly_twice_the_tokens_of_bf16():
    layers = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
    config = Lfm2Config(
        hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=16, layer_types=layers
    )
    common = {"block_size": 64, "num_slots": 64, "dtype": torch.bfloat16}
    for checkpoints, least in ((False, 1.93), (True, 1.8)):
        full, low = (
            CachePlan.from_budget(config, 2**30, checkpoints=checkpoints, cache_dtype=c, **common)
            for c in (None, "int8")
        )
        assert least < low.num_blocks / full.num_blocks < 2
        assert "int8" in str(low) and "int8" not in str(full)
