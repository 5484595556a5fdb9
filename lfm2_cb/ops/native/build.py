"""Builds the native library from `ops/csrc`: for a wheel, or on first use for this processor.

Every source is compiled once per instruction set, but as `ADDITIONS`, `EMULATED` and `ONCE` say, and linked into one
library: for a wheel with all instruction sets, else with those of one base. It includes no torch header: a kernel is a
C function of pointers, `int64_t`, `double` and, last, the number of threads, declared with `KERNEL(name)` from
`csrc/core/simd.h`. So a build takes seconds, needs nothing but a C++ compiler, serves every version of torch and
Python, and outlives no ABI.

`setup.py` imports this module where there is no torch: it needs nothing but the standard library.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .instruction_sets import ADDITIONS, EMULATED, EMULATORS, FEATURES, ISAS, ONCE, base_of

logger = logging.getLogger("transformers.lfm2_cb")

SOURCES = Path(__file__).parents[1] / "csrc"
#: where a wheel has its library
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
)


class NativeUnavailable(RuntimeError):
    """The native kernels cannot be had here; says why."""


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


def find_compiler() -> str:
    """The C++ compiler: `$CXX`, or `c++`. Raises: NativeUnavailable: there is none."""
    name = os.environ.get("CXX", "c++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler found ({name}): install one, or set CXX to its name")
    return compiler


def prebuilt_library(sources: Path = SOURCES, directory: Path = PREBUILT) -> Path | None:
    """The library that came with the wheel, if one did, it is whole, and it is made of these very sources."""
    library = directory / f"native-{_key(sources)}.so"
    return library if _is_whole(library) else None


def prebuild_library(directory: Path, sources: Path = SOURCES) -> Path:
    """Compile for all instruction sets of this platform that the compiler knows, for a wheel.

    Raises: NativeUnavailable: no compiler, or it failed.
    """
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    return _build(compiler, sources, directory / f"native-{_key(sources)}.so", for_any_processor=True)


def build_library(sources: Path = SOURCES, directory: Path | None = None, base: str | None = None) -> Path:
    """The library made of a folder of sources for this processor: from the cache where it is there and whole, else
    compiled.

    Args: base: the instruction set that it is for, with its additions; None: the best that this processor has. It
        says of all whether this processor has them.
    Raises: NativeUnavailable: no compiler, or it failed.
    """
    compiler = find_compiler()
    directory = directory or cache_directory()
    parts = compiler, _run([compiler, "--version"]), _processor(), base or "the best"
    library = directory / f"native-{_key(sources, *parts)}.so"
    if _is_whole(library):
        return library
    logger.info("lfm2_cb: building the native kernels, once, into %s", directory)
    return _build(compiler, sources, library, base)


def _build(
    compiler: str, sources: Path, library: Path, base: str | None = None, for_any_processor: bool = False
) -> Path:
    """Its name holds a hash of all it is made from; a file beside it holds the hash of its content.

    Both are moved into place when they are complete, so that builders who race and builders who die do no harm.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        built = _compile(compiler, sources, Path(scratch), base, for_any_processor)
        noted = Path(scratch, "sha256")
        noted.write_text(_hash(built))
        os.replace(built, library)
        os.replace(noted, _checksum(library))
    return library


def _checksum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    return library.is_file() and _checksum(library).is_file() and _checksum(library).read_text() == _hash(library)


def _key(sources: Path, *others: str) -> str:
    """A hash of what a library is made from and for."""
    parts = [*others, platform.machine(), repr((FLAGS, ISAS, ADDITIONS, EMULATED, EMULATORS, ONCE))]
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


def _compile(compiler: str, sources: Path, scratch: Path, base: str | None, for_any_processor: bool) -> Path:
    """The sources for the instruction sets of a base (of this processor's best, or of all bases), side by side, then
    one library."""
    known = _known_isas(compiler, scratch)
    isas = list(known)
    if not for_any_processor:
        _run([compiler, "-shared", *map(str, known.values()), "-o", str(scratch / "supported.so")])
        asked = ctypes.CDLL(str(scratch / "supported.so"))
        known = {isa: target for isa, target in known.items() if getattr(asked, f"supported_{isa}")()}
        base = base or base_of(list(known)[-1])
        isas = [isa for isa in known if base_of(isa) == base]
    jobs = {
        scratch / f"{source.stem}.{isa}.o": compile_command(compiler, isa, source, sources)
        for isa in isas
        for source in sources_for(isa, sources)
    }
    once = [source for name in ONCE for source in sources.rglob(name)]
    jobs |= {scratch / f"{source.stem}.o": compile_command(compiler, "plain", source, sources) for source in once}
    commands = [[*command, "-o", str(target)] for target, command in jobs.items()]
    width = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(width) as pool:
        compiled = [pool.submit(_run, command) for command in commands]
        try:
            for job in compiled:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    library = scratch / "library.so"
    _run([compiler, "-shared", "-pthread", *map(str, [*known.values(), *jobs]), "-o", str(library)])
    return library


def compile_command(compiler: str, isa: str, source: Path, sources: Path = SOURCES) -> list[str]:
    """What compiles a source for an instruction set, but for where it goes."""
    return [compiler, *FLAGS, *ISAS[isa], "-I", str(sources), f"-DISA={isa}", "-c", str(source)]


def sources_for(isa: str, sources: Path = SOURCES) -> list[Path]:
    """Those of a folder that are compiled for an instruction set, but for `FEATURES`."""
    left_out = {FEATURES, *ONCE}
    if isa not in EMULATORS:
        left_out.update(name for names in EMULATED.values() for name in names)
    return [
        source
        for source in sorted(sources.rglob("*.cpp"))
        if (source.name in ADDITIONS[isa][1] if isa in ADDITIONS else source.name not in left_out)
    ]


def _known_isas(compiler: str, scratch: Path) -> dict[str, Path]:
    """The instruction sets that this compiler can be asked for, with what it makes of `FEATURES`."""
    known = {}
    for isa, flags in ISAS.items():
        target = scratch / f"supported.{isa}.o"
        try:
            _run([*compile_command(compiler, isa, SOURCES / "arch" / FEATURES), "-o", str(target)])
            known[isa] = target
        except NativeUnavailable as error:
            if not flags:
                raise
            logger.info("lfm2_cb: the native kernels are built without %s: %s", isa, error)
    return known


def _run(command: Sequence[str]) -> str:
    """Run a command; its output. Raises: NativeUnavailable: it failed, with what it said."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise NativeUnavailable(f"{' '.join(command)} failed: {done.stdout.strip()[-500:]}")
    return done.stdout
