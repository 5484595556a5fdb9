"""Attention by products of bf16 and of bytes, by the processor's instructions and by their emulation.

So its logic is tested on any processor. Errors are those against float64, beside SDPA's in bf16.
"""

import ctypes
import random
import shutil

import pytest
import torch
from test_int8_cache import Case as Int8Case
from test_packed import Case

from lfm2_cb.ops.attention.cascade import SharedPrefix, cascade_attention, shared_blocks
from lfm2_cb.ops.attention.packed import PAIR_ISAS, TILE_ISAS, PackedSequences
from lfm2_cb.ops.attention.reference import paged_attention
from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import ONCE
from lfm2_cb.ops.native.self_check import addition_is_right, attention_is_right, block_mass_is_right

COMPILER = shutil.which(torch.utils.cpp_extension.get_cxx_compiler())
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SOURCES = ("decode_attention.cpp", "prefill_attention.cpp", "block_mass.cpp")


class Heard(NativeKernels):
    """The library by an instruction set, or by the emulation of one; notes which kernels are called."""

    def __init__(self, isa, emulated=None):
        loaded = native.load()
        super().__init__(loaded._library, "plain" if emulated else isa)
        self.isa, self.emulated, self.called = isa, emulated, []

    def call(self, name, *args):
        self.called.append(name)
        super().call(name, *args)

    def _find(self, name):
        if self.emulated is None:
            return super()._find(name)
        found = [getattr(library, f"{name}_emulated", None) for library in self.emulated]
        return next(filter(None, found), None) or getattr(self._library, f"{name}_plain")


@pytest.fixture(scope="session")
def emulation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    flags = ["-O1", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-shared"]
    for source in SOURCES:
        path = next(build.SOURCES.rglob(source))
        defines = ["-DEMULATED", "-DISA=emulated", "-I", str(build.SOURCES)]
        once = [str(next(build.SOURCES.rglob(name))) for name in ONCE]
        build._run([COMPILER, *flags, *defines, str(path), *once, "-o", str(folder / source)])
    return [ctypes.CDLL(str(folder / source)) for source in SOURCES]


@pytest.fixture(params=[*sorted(PAIR_ISAS), "emulated"])
def kernels(request):
    return by_instruction_set(request)


@pytest.fixture(params=[*sorted(TILE_ISAS), "emulated", "emulated zen4"])
def tiles(request):
    """Kernels by tiles."""
    return by_instruction_set(request)


def by_instruction_set(request):
    if request.param == "emulated":
        return Heard("amx", request.getfixturevalue("emulation"))
    if request.param == "emulated zen4":
        return Heard("zen4", [request.getfixturevalue("zen4_emulation"), *request.getfixturevalue("emulation")])
    if request.param not in native.load().supported:
        pytest.skip(f"this processor has no {request.param}")
    return Heard(request.param)


def make_case(seed, num_keys, lengths, cache=torch.bfloat16, group=None):
    rng = random.Random(seed)
    shape = {"group": group or rng.randint(1, 8), "dim": rng.choice([64, 128]), "size": rng.choice([16, 48, 64])}
    shape["kv_heads"] = rng.choice([1, 2, 3])
    if cache == torch.bfloat16:
        return Case(seed, torch.bfloat16, num_keys, lengths, **shape)
    return Int8Case(seed, torch.bfloat16, num_keys, lengths, **shape)


def attend(case, kernels):
    packed = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables)
    return packed.attend(case.q, case.keys, case.values, case.scaling)


def error(got, case):
    return (got.double() - case.reference()).norm()


def by_sdpa(case):
    caches = case.keys, case.values
    if isinstance(case, Case):
        caches = [cache.nan_to_num() for cache in caches]
    return paged_attention(case.q, *caches, case.offsets, case.kv_lens, case.tables, case.scaling)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_single_queries_of_random_shapes(kernels, cache, seed):
    rng = random.Random(seed)
    torch.set_num_threads(rng.choice([1, 2, 5]))
    num_keys = [rng.choice([1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, rng.randint(1, 5000)]) for _ in range(4)]
    case = make_case(seed, num_keys, [1] * 4, cache)
    got = attend(case, kernels)
    assert kernels.called == ["decode_attention"]
    assert error(got, case) <= 1.03 * error(by_sdpa(case), case)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("group", range(1, 9))
def test_every_number_of_heads_a_kv_head(kernels, cache, group):
    case = make_case(group, [200, 77], [1, 1], cache, group)
    assert error(attend(case, kernels), case) <= 1.03 * error(by_sdpa(case), case)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_a_result_depends_neither_on_batch_mates_nor_on_threads(kernels, cache):
    case = make_case(5, [1300, 40, 600, 5000], [1, 1, 1, 1], cache)
    torch.set_num_threads(1)
    whole = attend(case, kernels)
    torch.set_num_threads(4)
    assert torch.equal(attend(case, kernels), whole)
    for i, (n, table) in enumerate(zip(case.kv_lens, case.tables, strict=True)):
        rows = slice(case.offsets[i], case.offsets[i + 1])
        alone = PackedSequences(kernels, [0, case.lengths[i]], [n], [table])
        assert torch.equal(alone.attend(case.q[rows], case.keys, case.values, case.scaling), whole[rows])


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("kv_heads", "sequences"), [(3, 5), (8, 9), (12, 16)])
def test_heads_taken_together_are_as_apart(kernels, cache, kv_heads, sequences):
    """With many sequences a task has several kv heads: of 12, 8 and 4."""
    torch.set_num_threads(1)
    num_keys = [1100, *(random.Random(i).randint(1, 150) for i in range(sequences - 1))]
    make = Case if cache == torch.bfloat16 else Int8Case
    shape = {"dim": 64, "group": 2 if kv_heads > 8 else 8, "size": 64, "kv_heads": kv_heads}
    case = make(7, torch.bfloat16, num_keys, [1] * sequences, **shape)
    together = attend(case, kernels)
    assert error(together, case) <= 1.03 * error(by_sdpa(case), case)
    for i, (n, table) in enumerate(zip(case.kv_lens, case.tables, strict=True)):
        alone = PackedSequences(kernels, [0, 1], [n], [table])
        assert torch.equal(alone.attend(case.q[i : i + 1], case.keys, case.values, case.scaling)[0], together[i])


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_with_keys_left_out_there_is_a_denominator_too(kernels, cache):
    case = make_case(6, [1500, 300, 49], [1, 1, 1], cache, group=3)
    first_keys = [1024 // case.keys.shape[2] * case.keys.shape[2], 0, 48]
    packed = PackedSequences(kernels, case.offsets, case.kv_lens, case.tables, first_keys)
    got, lse = packed.attend_with_lse(case.q, case.keys, case.values, case.scaling)
    keys, values = case.keys, case.values
    if cache == torch.int8:
        keys, values = (b.values.float() * b.scale.float() for b in (keys, values))
    fp32 = PackedSequences(native.load(), case.offsets, case.kv_lens, case.tables, first_keys)
    expected, exact_lse = fp32.attend_with_lse(case.q.float(), keys.float(), values.float(), case.scaling)
    assert got.dtype == torch.float32
    torch.testing.assert_close(lse, exact_lse, rtol=2e-5, atol=2e-3)
    assert (got - expected).norm() <= 2e-3 * expected.norm()


def test_scores_of_any_size_neither_overflow_nor_vanish(kernels):
    for scale in (1e-30, 100.0, 1e6):
        case = make_case(3, [700, 90, 1], [1, 1, 1], group=2)
        case.q = scale * case.q.sign()
        got, exact = attend(case, kernels), case.reference()
        assert (got - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(kernels, cache):
    case = make_case(4, [100, 100, 100], [1, 1, 1], cache, group=2)
    case.q[0] = float("nan")
    values = case.values if cache == torch.bfloat16 else case.values.scale
    values[case.tables[1][0], :, 3] = float("nan")
    got = attend(case, kernels)
    assert got[0].isnan().all() and got[1].isnan().all() and got[2].isfinite().all()


def test_other_shapes_go_to_the_kernel_for_any(kernels):
    for other in ({"dim": 32}, {"group": 9}, {"size": 24}, {"dtype": torch.float32}):
        shape = {"dtype": torch.bfloat16, "dim": 64, "group": 2, "size": 16, "kv_heads": 2, **other}
        attend(Case(0, kv_lens=[40, 3], lengths=[1, 1], **shape), kernels)
        assert kernels.called.pop() == "paged_attention", other


def test_single_queries_beside_chunks(kernels):
    case = make_case(2, [300, 80, 17, 200], [1, 7, 1, 64])
    got = attend(case, kernels)
    assert kernels.called == ["decode_attention", f"{'prefill' if kernels.isa in TILE_ISAS else 'paged'}_attention"]
    assert error(got, case) <= 1.03 * error(by_sdpa(case), case)


def test_queries_that_lie_apart_are_read_where_they_are(kernels):
    case = make_case(6, [40, 9], [1, 1])
    expected = attend(case, kernels)
    wide = torch.full((2, case.q.shape[1] + 1, case.q.shape[2]), float("nan"), dtype=case.q.dtype)
    wide[:, :-1] = case.q
    case.q = wide[:, :-1]
    assert torch.equal(attend(case, kernels), expected)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_chunks_of_random_shapes(tiles, cache, seed):
    rng = random.Random(seed)
    torch.set_num_threads(rng.choice([1, 2, 5]))
    num_keys = [rng.choice([2, 15, 16, 17, 64, 65, 127, 129, rng.randint(2, 400)]) for _ in range(3)]
    num_keys.append(rng.choice([2050, 5000]) if seed % 4 == 0 else 40)
    case = make_case(seed, num_keys, [rng.randint(2, min(n, 100)) for n in num_keys], cache)
    got = attend(case, tiles)
    assert tiles.called == ["prefill_attention"]
    assert error(got, case) <= 1.03 * error(by_sdpa(case), case)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("group", range(1, 9))
def test_chunks_for_every_number_of_heads_a_kv_head(tiles, cache, group):
    case = make_case(group, [200, 77], [45, 77], cache, group)
    assert error(attend(case, tiles), case) <= 1.03 * error(by_sdpa(case), case)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [11, 37, 512])
def test_a_row_does_not_depend_on_how_its_prompt_is_cut_into_chunks(tiles, cache, size):
    """Nor on batch mates and threads. A chunk of one query is a decode, by another kernel."""
    shape = {"kv_heads": 1, "group": 2, "dim": 64, "size": 16}
    n = 70 if tiles.emulated else 1300  # also beyond what went through SDPA
    case = (Case if cache == torch.bfloat16 else Int8Case)(size, torch.bfloat16, [n, 130], [n, 130], **shape)
    torch.set_num_threads(1)
    whole = attend(case, tiles)
    torch.set_num_threads(3)
    assert torch.equal(attend(case, tiles), whole)
    for start in range(0, n - 1, size):
        end = min(n, start + size)
        chunk = PackedSequences(tiles, [0, end - start], [end], [case.tables[0][: -(-end // 16)]])
        got = chunk.attend(case.q[start:end], case.keys, case.values, case.scaling)
        assert end - start == 1 or torch.equal(got, whole[start:end]), start


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_chunks_with_keys_left_out_have_a_denominator_too(tiles, cache):
    case = make_case(6, [1500, 300, 49], [20, 9, 1], cache, group=3)
    first_keys = [1024 // case.keys.shape[2] * case.keys.shape[2], 0, 48]
    packed = PackedSequences(tiles, case.offsets, case.kv_lens, case.tables, first_keys)
    got, lse = packed.attend_with_lse(case.q, case.keys, case.values, case.scaling)
    assert tiles.called == ["decode_attention", "prefill_attention"]
    keys, values = case.keys, case.values
    if cache == torch.int8:
        keys, values = (b.values.float() * b.scale.float() for b in (keys, values))
    fp32 = PackedSequences(native.load(), case.offsets, case.kv_lens, case.tables, first_keys)
    expected, exact_lse = fp32.attend_with_lse(case.q.float(), keys.float(), values.float(), case.scaling)
    torch.testing.assert_close(lse, exact_lse, rtol=2e-5, atol=2e-3)
    assert (got - expected).norm() <= 2e-3 * expected.norm()


def test_chunks_with_scores_of_any_size(tiles):
    for scale in (1e-30, 100.0, 1e6):
        case = make_case(3, [300, 90], [70, 5], group=2)
        case.q = scale * case.q.sign()
        got, exact = attend(case, tiles), case.reference()
        assert (got - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_what_is_not_finite_stays_in_its_row(tiles, cache):
    case = make_case(4, [100, 100], [40, 40], cache, group=2)
    case.q[5] = float("nan")
    got = attend(case, tiles)
    assert got[5].isnan().all()
    assert got[:5].isfinite().all() and got[6:].isfinite().all()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_shared_prefixes_are_attended_by_all_their_queries_at_once(tiles, cache, seed):
    rng = random.Random(seed)
    shape = {"kv_heads": 2, "group": rng.choice([1, 2, 4]), "dim": rng.choice([64, 128]), "size": rng.choice([16, 64])}
    num_shared = rng.choice([1, 3, 9])
    own = [rng.randint(1, 90) for _ in range(7)]
    lengths = [rng.choice([1, rng.randint(1, n)]) for n in own]
    num_keys = [n + num_shared * shape["size"] for n in own]
    case = (Case if cache == torch.bfloat16 else Int8Case)(seed, torch.bfloat16, num_keys, lengths, **shape)
    prefixes = []
    for members in ([0, 2, 3], [4, 6]):  # 1 and 5 share nothing
        blocks = case.tables[members[0]][:num_shared]
        for i in members:
            case.tables[i] = torch.cat((blocks, case.tables[i][num_shared:]))
        tokens = torch.cat([torch.arange(case.offsets[i], case.offsets[i + 1]) for i in members])
        prefixes.append(SharedPrefix(members, blocks, tokens))
    first_keys = [shape["size"] * count for count in shared_blocks(prefixes, 7)]
    whole = case.q, case.keys, case.values, case.offsets, case.kv_lens, case.tables, case.scaling
    packed = PackedSequences(tiles, case.offsets, case.kv_lens, case.tables, first_keys)
    torch.set_num_threads(1)
    got = cascade_attention(*whole, prefixes, packed=packed)
    assert tiles.called[-1] == "prefill_attention" and "paged_attention" not in tiles.called
    assert error(got, case) <= 1.03 * error(by_sdpa(case), case)
    torch.set_num_threads(3)
    assert torch.equal(cascade_attention(*whole, prefixes, packed=packed), got)  # with what was packed before
    alone = [SharedPrefix([0], prefixes[0].block_ids, torch.arange(lengths[0]))]
    packed = PackedSequences(tiles, [0, lengths[0]], case.kv_lens[:1], case.tables[:1], first_keys[:1])
    first = (case.q[: lengths[0]], case.keys, case.values, [0, lengths[0]], case.kv_lens[:1], case.tables[:1])
    assert torch.equal(cascade_attention(*first, case.scaling, alone, packed=packed), got[: lengths[0]])


def test_the_check_at_load_sees_what_is_wrong(kernels):
    class Wrong(Heard):
        wrong, error = "", 0.05

        def without(self, isa):
            return native.load().using("plain")

        def call(self, name, *args):
            super().call(name, *args)
            if name == self.wrong:
                out = args[{"decode_attention": 7, "prefill_attention": 11, "block_mass": 5}[name]]
                out[-1, -1, -1] += self.error * out.abs().max()

    wrong = Wrong(kernels.isa, kernels.emulated)
    assert attention_is_right(wrong) and block_mass_is_right(wrong)
    for kernel in set(wrong.called) - {"paged_attention"}:
        wrong.wrong = kernel
        assert attention_is_right(wrong) == (kernel == "block_mass")
        assert not addition_is_right(wrong)
    for kernel in ("prefill_attention", "block_mass"):
        assert (kernel in wrong.called) == (kernels.isa in TILE_ISAS)
