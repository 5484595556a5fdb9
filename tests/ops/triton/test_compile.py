"""Every Triton kernel compiles to PTX, and that to machine code, for cards that need not be there."""

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lfm2_cb.ops.triton import attention, pointwise, sampling, short_conv  # noqa: E402

INT8 = {"keys": "*i8", "values": "*i8", "key_scales": "*bf16", "value_scales": "*bf16"}
#: of parameters that have the same type wherever they are; of others it is that of the model
TYPES = {
    **dict.fromkeys(("tiles", "first", "kv_lens", "block_tables", "decodes", "positions", "slots"), "*i32"),
    **dict.fromkeys(("read_rows", "write_first", "write_rows", "write_ends"), "*i32"),
    **dict.fromkeys(("table_width", "q_stride", "num_tokens", "size", "half", "width", "hidden", "stride"), "i32"),
    **dict.fromkeys(("scaling", "eps", "scale"), "fp32"),
    **{"lse": "*fp32", "parts": "*fp32", "inv_freq": "*fp32", "choices": "*fp64", "tokens": "*i64"},
}
WHOLE = {"key_scales": None, "value_scales": None}
_ATTENTION = {"KV_HEADS": 8, "GROUP": 2, "DIM": 64, "PADDED_DIM": 64, "BLOCK_SIZE": 64, "KEYS": attention.KEY_TILE}
CHUNKS = _ATTENTION | {"ROWS": attention.CHUNK_ROWS, "SPLIT": 0, "lse": None}
DECODES = _ATTENTION | {"ROWS": attention.LEAST_ROWS, "SPLIT": attention.SPLIT_KEYS}
_HEADS = {"HEADS": 16, "DIM": 64, "PADDED_DIM": 64}
MERGE = _HEADS | {"PADDED_HEADS": 16, "SPLIT": attention.SPLIT_KEYS}
NORM_ROTATE = _HEADS | {"KV_HEADS": 8, "BLOCK_SIZE": 64, "TILE": pointwise.HEAD_TILE}
WRITE = NORM_ROTATE | {"HEADS": 0} | dict.fromkeys(("q_weight", "k_weight", "cos", "sin"))
CONV = {"KERNEL": 3, "CHANNELS": short_conv.CHANNELS, "STATE_ROWS": 2}
PADDED = dict.fromkeys(("read_rows", "write_rows"), "*i64")  # rows of padded steps
#: kernel, its constants, and types that are others
CASES = [
    (attention._attention, CHUNKS | WHOLE, {}),
    (attention._attention, DECODES | WHOLE, {"out": "*fp32"}),
    (attention._attention, DECODES, {**INT8, "out": "*fp32"}),
    (attention._merge_splits, MERGE, {}),
    (pointwise._rms_norm, {"SIZE": 1024}, {}),
    (pointwise._rms_norm, {"SIZE": 1024, "residual": None, "total": None}, {}),
    (pointwise._rotary, {"HALF": 32}, {"positions": "*i64"}),
    (pointwise._norm_rotate, NORM_ROTATE | WHOLE, {"slots": "*i64"}),
    (pointwise._norm_rotate, NORM_ROTATE, INT8),
    (pointwise._norm_rotate, WRITE, INT8),
    (pointwise._swiglu, {"TILE": pointwise.WIDTH_TILE}, {}),
    (short_conv._short_conv, CONV | {"TOKENS": short_conv.CONV_TOKENS}, {}),
    (short_conv._short_conv, CONV | {"TOKENS": 1, "bias": None}, PADDED),
    (sampling._choose, {"TILE": sampling.TILE}, {}),
]


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bf16"),
        pytest.param(80, "bf16", marks=pytest.mark.slow),
        pytest.param(80, "fp32", marks=pytest.mark.slow),
        pytest.param(90, "fp32", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(capability, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, constants, own in CASES:
        types = {name: own.get(name, TYPES.get(name, f"*{dtype}")) for name in kernel.arg_names}
        signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        warps = 8 if kernel is sampling._choose else 4
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]
        assert compiled.metadata.shared <= 99 * 1024  # what a program may have on the least of these cards
        if kernel is attention._attention and dtype == "bf16":
            assert "mma" in compiled.asm["ptx"]  # by the matrix units


def test_no_kernel_is_left_out():
    modules = attention, pointwise, sampling, short_conv
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)}
    called = {short_conv._products, sampling._scores, sampling._order, sampling._shares}  # by others
    assert kernels - called == {kernel for kernel, _, _ in CASES}
