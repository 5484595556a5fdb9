"""The native kernels: C++ in `ops/csrc`, compiled on first use for every instruction set, and kept.

Every source is compiled once per entry of `ISAS`, but as `ADDITIONS` and `EMULATED` say, and all of it linked into one
library. It includes no torch header: a kernel is a C function of pointers, `int64_t`, `double` and, last, the number
of threads, declared with `KERNEL(name)` from `csrc/core/simd.h`. So a build takes seconds, needs nothing but a C++
compiler, and outlives no ABI. Which instruction set is used is decided when the library is loaded, by what the
processor has.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler

logger = logging.getLogger("transformers.lfm2_cb")

SOURCES = Path(__file__).parents[1] / "csrc"
KERNELS = ("auto", "native", "torch")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
)
AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")
#: instruction set → the compiler's flags for it, best last; a kernel `f` is there as `f_plain`, `f_avx2`, …
ISAS: Mapping[str, tuple[str, ...]] = (
    {
        "plain": (),
        "avx2": AVX2,
        "avxvnni": (*AVX2, "-mavxvnni"),  # multiplying integers and adding them in one operation: csrc/arch/x86/dot.h
        "avx512": AVX512,
        "vnni": (*AVX512, "-mavx512vnni"),  # the same
        "avx512bf16": AVX512_BF16,  # products of pairs of bf16: csrc/arch/x86/lanes.h
        "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),  # matrix units: csrc/arch/x86/tiles.h
    }
    if platform.machine().lower() in ("x86_64", "amd64")
    else {"plain": ()}
)
#: sources that are of use for one instruction set alone; and those that have them too, by an emulation, so that they
#: can be tested: without and with fused multiply-add
EMULATED: Mapping[str, tuple[str, ...]] = {"amx": ("amx_in_place.cpp", "amx_packed.cpp", "amx_int8.cpp")}
EMULATORS = ("plain", "avx2")
#: an instruction set that adds to another: which, and the sources that are compiled for it; the rest is the other's
ADDITIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "avxvnni": ("avx2", ("int8.cpp", "features.cpp")),
    "vnni": ("avx512", ("int8.cpp", "features.cpp")),
    "avx512bf16": ("vnni", ("decode_attention.cpp", "features.cpp")),
    "amx": ("avx512bf16", (*EMULATED["amx"], "features.cpp")),
}
#: classes of arguments that go as they are
PLAIN = frozenset((int, float, bool, type(None)))


class NativeUnavailable(RuntimeError):
    """The native kernels cannot be had here; says why."""


class NativeKernels:
    """The library's functions for one instruction set.

    isa: the instruction set. supported: all that this processor and the library have, but for those in `without`,
    best last.
    listeners: by thread, who is told of every call: the kernels, name, arguments, and those as the kernel gets them.
    """

    listeners: dict[int, Callable[[NativeKernels, str, tuple, list], None]] = {}  # of all instances

    def __init__(self, library: ctypes.CDLL, isa: str | None = None, without: Collection[str] = ()) -> None:
        self._library, self._without = library, without
        built = [name for name in ISAS if name not in without and hasattr(library, f"supported_{name}")]
        self.supported = tuple(name for name in built if getattr(library, f"supported_{name}")())
        self.isa = isa or self.supported[-1]
        if self.isa not in self.supported:
            raise NativeUnavailable(f"this processor has no {self.isa}, only {', '.join(self.supported)}")
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}

    def using(self, isa: str) -> NativeKernels:
        """The same library, by another instruction set. Raises: NativeUnavailable."""
        return NativeKernels(self._library, isa, self._without)

    def without(self, isa: str) -> NativeKernels:
        """The same library, by the best of the other instruction sets."""
        return NativeKernels(self._library, without=(*self._without, isa))

    def call(self, name: str, *args: torch.Tensor | int | float | None) -> None:
        """Run a kernel: tensors go as pointers (they must be contiguous as the kernel says), None as a null pointer,
        ints as int64_t, floats as double; torch's number of threads goes last."""
        function = self._functions.get(name)
        if function is None:  # a kernel's parameters do not change their kinds from call to call
            function = self._functions[name] = self._find(name)
            function.restype, function.argtypes = None, [*map(_c_type, args), ctypes.c_int64]
        # (`isinstance` asks torch's metaclass, which takes longer than the rest.)
        pointers = [a if a.__class__ in PLAIN else a.data_ptr() for a in args]  # type: ignore[union-attr]
        pointers.append(torch.get_num_threads())
        if self.listeners and (heard := self.listeners.get(threading.get_ident())):
            heard(self, name, args, pointers)
        function(*pointers)

    def address(self, name: str) -> int:
        """Of a function of the library for this instruction set; 0: it has none of that name."""
        try:
            return ctypes.cast(self._find(name), ctypes.c_void_p).value or 0
        except AttributeError:
            return 0

    def _find(self, name: str) -> ctypes._NamedFuncPointer:
        for isa in reversed(list(ISAS)[: list(ISAS).index(self.isa) + 1]):  # a better one can do what the others can
            if hasattr(self._library, f"{name}_{isa}"):
                return getattr(self._library, f"{name}_{isa}")
        raise AttributeError(f"the native library has no {name}")


def _c_type(value: torch.Tensor | int | float | None) -> type:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(value, float) else ctypes.c_int64


def resolve_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> NativeKernels | None:
    """What a model on this device and in this dtype runs with; None: the torch reference.

    Args: kernels: "auto": native where it can be had, with one log line where a CPU cannot; "native"; "torch".
    Raises: ValueError: another name. NativeUnavailable: "native" cannot be had.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(map(repr, KERNELS))}, got {kernels!r}")
    if kernels == "torch":
        return None
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        if kernels == "native":
            raise NativeUnavailable(f"kernels='native' is for float32 and bfloat16 on CPU, not {dtype} on {device}")
        return None
    try:
        return load()
    except NativeUnavailable:
        if kernels == "native":
            raise
        return None


def load() -> NativeKernels:
    """The library, built or taken from the cache once a process. Raises: NativeUnavailable, at every call."""
    found = _load_once()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


@functools.cache
def _load_once() -> NativeKernels | NativeUnavailable:
    try:
        kernels = NativeKernels(ctypes.CDLL(str(build())))
        with torch.device("cpu"):  # whatever the default is where the library is first asked for
            while kernels.isa in ADDITIONS and not addition_is_right(kernels):
                wrong, kernels = kernels.isa, kernels.without(kernels.isa)
                logger.warning("lfm2_cb: the %s kernels give wrong results here; using %s", wrong, kernels.isa)
        return kernels
    except (NativeUnavailable, OSError) as error:
        logger.warning("lfm2_cb: no native kernels, attention runs in torch: %s", error)
        return error if isinstance(error, NativeUnavailable) else NativeUnavailable(str(error))


def addition_is_right(kernels: NativeKernels) -> bool:
    """Whether small cases of odd shapes come out by what an instruction set adds as they do without it.

    Asked once a process: few processors have these, so the kernels have been run on fewer than the others.
    """
    if kernels.address("decode_attention") and not decode_attention_is_right(kernels):
        return False
    generator = torch.Generator().manual_seed(0)
    rows, inner, outputs = 37, 2100, 53  # more inputs than the packed product takes at once
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (outputs, inner), outputs))
    x, weight, bias = (tensor.to(torch.bfloat16) for tensor in (x, weight, bias))
    panels, padded, groups = -(-outputs // 16), -(-inner // 64) * 64, -(-inner // 128)  # as ops/int8.py has them
    values = torch.randint(-32, 33, (panels, padded // 4, 16, 4), generator=generator, dtype=torch.int8)
    sums = torch.randint(-4096, 4097, (panels, groups, 16), generator=generator, dtype=torch.int16)
    scale = torch.rand(outputs, generator=generator).to(x.dtype)

    def linear_int8(kernels: NativeKernels, name: str = "linear_int8") -> torch.Tensor:
        out = x.new_full((rows, outputs), torch.nan)
        scratch = torch.empty(64 * padded, dtype=torch.uint8), torch.empty(rows * groups, dtype=torch.float32)
        kernels.call(name, x, 1, values, sums, scale, bias, *scratch, out, rows, inner, outputs)
        return out

    if kernels.isa == "avx512bf16":
        return True
    if kernels.isa != "amx":
        return torch.equal(linear_int8(kernels), linear_int8(kernels.without(kernels.isa)))
    exact = x.double() @ weight.double().T + bias.double()
    in_fp32 = 2**-20 * (x.double().abs() @ weight.double().abs().T)
    for name in ("amx_in_place_linear_bf16", "amx_packed_linear_bf16"):
        out = x.new_full((rows, outputs), torch.nan)
        kernels.call(name, x, weight, bias, out, rows, inner, outputs)
        if not ((out - exact).abs() <= 2**-8 * exact.abs() + in_fp32).all():
            return False
    return torch.equal(linear_int8(kernels, "amx_linear_int8"), linear_int8(kernels))


def decode_attention_is_right(kernels: NativeKernels) -> bool:
    """Whether attention of single queries over small caches, in bf16 and in 8 bits, comes out as it does otherwise."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, size, num_keys = 6, 2, 64, 16, (1, 70, 1100)
    counts = [-(-n // size) for n in num_keys]
    block_ids = torch.randperm(sum(counts), generator=generator)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    sequences = torch.tensor([[i, 1, 0, n, start] for i, (n, start) in enumerate(zip(num_keys, starts, strict=True))])
    q = torch.randn(len(num_keys), heads, dim, generator=generator).bfloat16()
    shape = 2, len(block_ids), kv_heads, size
    in_bf16 = torch.randn(*shape, dim, generator=generator).bfloat16()
    in_8_bits = torch.randint(-127, 128, (*shape, dim), generator=generator, dtype=torch.int8)
    scales = torch.rand(shape, generator=generator).div_(64).bfloat16()
    sizes = len(sequences), heads, kv_heads, dim, size, heads * dim
    for caches in ((*in_bf16, None, None), (*in_8_bits, *scales)):
        out, expected = q.new_full((2, *q.shape), torch.nan)
        kernels.call("decode_attention", q, *caches, sequences, block_ids, out, None, *sizes, 0, 0.125)
        others = kernels.without(kernels.isa)
        others.call("paged_attention", q, *caches, sequences, block_ids, expected, None, *sizes, 1, 0, 0.125)
        if not ((out - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True)).all():
            return False
    return True


def cache_directory() -> Path:
    """Where built libraries are kept: `$XDG_CACHE_HOME/lfm2_cb` or `~/.cache/lfm2_cb`, for this user alone.

    A directory that others may write to, or that cannot be made, is not used: a fresh temporary one is instead.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root, "lfm2_cb")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        mine = not path.is_symlink() and (os.name != "posix" or status.st_uid == os.geteuid())
        if mine and not status.st_mode & 0o022 and os.access(path, os.W_OK):
            return path
        logger.warning("lfm2_cb: %s is not this user's alone to write to; building in a temporary directory", path)
    except OSError as error:
        logger.warning("lfm2_cb: no cache directory (%s); building in a temporary one", error)
    path = Path(tempfile.mkdtemp(prefix="lfm2_cb-"))  # 0700
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def build(sources: Path = SOURCES, directory: Path | None = None) -> Path:
    """The library made of a folder of sources: from the cache where it is there and whole, else compiled.

    Its name holds a hash of all it is made from; a file beside it holds the hash of its content. Both are moved into
    place when they are complete, so that builders who race and builders who die do no harm.

    Raises: NativeUnavailable: no compiler, or it failed.
    """
    compiler = shutil.which(get_cxx_compiler())
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler ({get_cxx_compiler()}; set CXX to name one)")
    directory = directory or cache_directory()
    library = directory / f"native-{_key(sources, compiler)}.so"
    checksum = library.with_suffix(".sha256")
    if library.is_file() and checksum.is_file() and checksum.read_text() == _hash(library):
        return library
    logger.info("lfm2_cb: building the native kernels, once, into %s", directory)
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as scratch:
        built = _compile(compiler, sources, Path(scratch))
        noted = Path(scratch, "sha256")
        noted.write_text(_hash(built))
        os.replace(built, library)
        os.replace(noted, checksum)
    return library


def _key(sources: Path, compiler: str) -> str:
    flags = repr((FLAGS, ISAS, ADDITIONS, EMULATED, EMULATORS))
    parts = [compiler, _run([compiler, "--version"]), torch.__version__, platform.machine(), _processor(), flags]
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    parts += [f"{path.relative_to(sources)}\n{path.read_text('utf-8')}" for path in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What tells processors apart by their instruction sets, as machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return platform.processor()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: str, sources: Path, scratch: Path) -> Path:
    """Every source for every instruction set of this processor, as many at a time as there are threads, then one
    library."""
    known = _known_isas(compiler, scratch)
    _run([compiler, "-shared", *map(str, known.values()), "-o", str(scratch / "supported.so")])
    asked = ctypes.CDLL(str(scratch / "supported.so"))
    jobs = {
        scratch / f"{source.stem}.{isa}.o": compile_command(compiler, isa, source, sources)
        for isa in known
        if getattr(asked, f"supported_{isa}")()
        for source in sources_for(isa, sources)
    }
    commands = [[*command, "-o", str(target)] for target, command in jobs.items()]
    width = torch.get_num_threads()
    for i in range(0, len(commands), width):
        _run_all(commands[i : i + width])
    library = scratch / "library.so"
    # libgomp comes with torch under the same name: what is already loaded is used, so there is one pool of threads.
    _run([compiler, "-shared", "-fopenmp", *map(str, jobs), "-o", str(library)])
    return library


def compile_command(compiler: str, isa: str, source: Path, sources: Path = SOURCES) -> list[str]:
    """What compiles a source for an instruction set, but for where it goes."""
    return [compiler, *FLAGS, *ISAS[isa], "-I", str(sources), f"-DISA={isa}", "-c", str(source)]


def sources_for(isa: str, sources: Path = SOURCES) -> list[Path]:
    """Those of a folder that are compiled for an instruction set."""
    emulated = {name for names in EMULATED.values() for name in names}
    return [
        source
        for source in sorted(sources.rglob("*.cpp"))
        if (source.name in ADDITIONS[isa][1] if isa in ADDITIONS else isa in EMULATORS or source.name not in emulated)
    ]


def _known_isas(compiler: str, scratch: Path) -> dict[str, Path]:
    """The instruction sets that this compiler can be asked for, with what it makes of features.cpp."""
    known = {}
    for isa, flags in ISAS.items():
        target = scratch / f"supported.{isa}.o"
        try:
            _run([*compile_command(compiler, isa, SOURCES / "arch" / "features.cpp"), "-o", str(target)])
            known[isa] = target
        except NativeUnavailable as error:
            if not flags:
                raise
            logger.info("lfm2_cb: the native kernels are built without %s: %s", isa, error)
    return known


def _run_all(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run commands side by side; their output. Raises: NativeUnavailable: one failed, with what it said."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
                )
            )
        outputs = [process.communicate()[0] for process in running]
    except OSError as error:
        raise NativeUnavailable(f"{commands[len(running)][0]} does not run: {error}") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise NativeUnavailable(f"{' '.join(process.args)} failed: {output.strip()[-500:]}")  # type: ignore[arg-type]
    return outputs


def _run(command: Sequence[str]) -> str:
    return _run_all([command])[0]
