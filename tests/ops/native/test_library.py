"""How the native kernels are built, kept and done without."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.ops.native import NativeUnavailable, build, resolve_kernels
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.build import build_library, cache_directory, prebuild_library, prebuilt_library
from lfm2_cb.ops.native.instruction_sets import ADDITIONS, ISAS, base_of

needs_compiler = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
CPU = torch.device("cpu")


@pytest.fixture
def small_sources(tmp_path):
    """A folder with one function, which compiles in no time."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text(
        '#define JOIN_(a) one_##a\n#define JOIN(a) JOIN_(a)\nextern "C" int JOIN(ISA)() { return 1; }'
    )
    return folder


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has loaded nothing yet."""
    native._load_once.cache_clear()
    yield
    native._load_once.cache_clear()


@needs_compiler
def test_a_library_is_built_once_and_again_when_its_source_changes(small_sources, tmp_path):
    first = build_library(small_sources, tmp_path)
    made = first.stat().st_mtime_ns
    assert build_library(small_sources, tmp_path) == first and first.stat().st_mtime_ns == made
    (small_sources / "one.cpp").write_text("static int one;")
    assert build_library(small_sources, tmp_path) != first
    assert not list(tmp_path.glob("build-*"))


@needs_compiler
def test_a_library_is_for_one_base_and_says_what_the_processor_has(small_sources, tmp_path):
    best = ctypes.CDLL(str(build_library(small_sources, tmp_path)))
    plain = ctypes.CDLL(str(build_library(small_sources, tmp_path, "plain")))
    supported = native.load().supported
    for library, base in ((best, base_of(supported[-1])), (plain, "plain")):
        assert [isa for isa in ISAS if hasattr(library, f"one_{isa}")] == [base]
        assert [isa for isa in ISAS if hasattr(library, f"supported_{isa}")] == [*supported]


@pytest.mark.skipif("avx512" not in ISAS, reason="not x86")
def test_other_instruction_sets_are_built_when_a_kernel_of_theirs_is_asked_for(monkeypatch, fresh):
    """And what one has not is not looked for, nor built, among those that it does not add to."""
    built = []

    class Library:
        def __init__(self, base):
            for isa in ("plain", "avx2", "avxvnni", "avx512", "vnni"):
                setattr(self, f"supported_{isa}", lambda: 1)
                if base_of(isa) == (base or "avx512") and isa not in ADDITIONS:
                    setattr(self, f"route_{isa}", ctypes.CFUNCTYPE(None)(lambda: None))

    monkeypatch.setattr(native, "prebuilt_library", lambda: None)
    monkeypatch.setattr(native, "build_library", lambda base=None: built.append(base) or base or "")
    monkeypatch.setattr(native.ctypes, "CDLL", Library)
    monkeypatch.setattr(native, "addition_is_right", lambda _: True)
    kernels = native.load()
    assert kernels.isa == "vnni" and kernels.address("route") and not kernels.address("other")
    assert kernels.without("vnni").address("route") == kernels.address("route")
    assert built == [None]
    for isa in ("avx2", "avxvnni", "avx2"):
        assert kernels.using(isa).address("route") and not kernels.using(isa).address("other")
        assert built == [None, "avx2"]
    assert kernels.using("plain").address("route") and built == [None, "avx2", "plain"]


@needs_compiler
def test_a_tampered_library_is_not_loaded_but_built_again(small_sources, tmp_path):
    library = build_library(small_sources, tmp_path)
    whole = library.read_bytes()
    library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert build_library(small_sources, tmp_path) == library
    assert library.read_bytes() != whole[:-1] + bytes([whole[-1] ^ 1])
    assert library.with_suffix(".sha256").read_text() == build._hash(library)
    library.with_suffix(".sha256").unlink()
    build_library(small_sources, tmp_path)
    assert library.with_suffix(".sha256").exists()


@needs_compiler
def test_builders_who_race_leave_one_whole_library(small_sources, tmp_path):
    script = (
        "import sys; from pathlib import Path; from lfm2_cb.ops.native.build import build_library; import ctypes;"
        "ctypes.CDLL(str(build_library(Path(sys.argv[1]), Path(sys.argv[2]), 'plain'))).one_plain()"
    )
    command = [sys.executable, "-c", script, str(small_sources), str(tmp_path)]
    racers = [subprocess.Popen(command) for _ in range(3)]
    assert [racer.wait(300) for racer in racers] == [0, 0, 0]
    assert len(list(tmp_path.glob("*.so"))) == 1 and not list(tmp_path.glob("build-*"))


@needs_compiler
def test_a_source_that_does_not_compile_says_so_and_leaves_nothing(small_sources, tmp_path):
    (small_sources / "one.cpp").write_text("#error not today")
    with pytest.raises(NativeUnavailable, match="not today"):
        build_library(small_sources, tmp_path)
    assert [path for path in tmp_path.iterdir() if path != small_sources] == []


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_the_cache_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_directory()
    assert path == tmp_path / "lfm2_cb" and path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)  # anyone may put a library there
    other = cache_directory()
    assert other != path and other.stat().st_mode & 0o777 == 0o700
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert cache_directory() not in (path, tmp_path / "elsewhere")


@needs_compiler
def test_a_prebuilt_library_is_taken_while_it_is_whole_and_of_these_sources(small_sources, tmp_path):
    assert prebuilt_library(small_sources, tmp_path / "prebuilt") is None
    library = prebuild_library(tmp_path / "prebuilt", small_sources)
    assert prebuilt_library(small_sources, tmp_path / "prebuilt") == library
    whole, source = library.read_bytes(), (small_sources / "one.cpp").read_text()
    library.write_bytes(whole[:-1])
    assert prebuilt_library(small_sources, tmp_path / "prebuilt") is None
    library.write_bytes(whole)
    (small_sources / "one.cpp").write_text(source + "static int one;")
    assert prebuilt_library(small_sources, tmp_path / "prebuilt") is None


@needs_compiler
def test_the_prebuilt_library_comes_first_and_one_that_does_not_load_is_built_instead(tmp_path, monkeypatch, fresh):
    built = build_library()
    monkeypatch.setattr(native, "prebuilt_library", lambda: built)
    assert native.load().prebuilt and native.load().using("plain").prebuilt
    native._load_once.cache_clear()
    (tmp_path / "bad.so").write_text("of another system")
    monkeypatch.setattr(native, "prebuilt_library", lambda: tmp_path / "bad.so")
    assert not native.load().prebuilt


def test_no_compiler_means_torch_with_one_log_line(demo_stock, monkeypatch, fresh):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "prebuilt_library", lambda: None)
    messages = []
    monkeypatch.setattr(native.logger, "warning", lambda message, *args: messages.append(message % args))
    options = {"max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        with ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB") as generator:
            assert generator.engine.runner.native is None
            assert len(generator.generate([[5, 6, 7]], **options)[0].token_ids) == 3
    assert len(messages) == 1 and "no native kernels" in messages[0] and "no-such-compiler" in messages[0]
    with pytest.raises(NativeUnavailable, match="no-such-compiler"):
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB", kernels="native")


def test_the_switch(demo_stock):
    with pytest.raises(ValueError, match="'auto', 'native', 'torch'"):
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB", kernels="fast")
    assert resolve_kernels("torch", CPU, torch.float32) is None
    assert resolve_kernels("auto", CPU, torch.float64) is None
    assert resolve_kernels("auto", torch.device("cuda"), torch.float32) is None
    with pytest.raises(NativeUnavailable, match="float64"):
        resolve_kernels("native", CPU, torch.float64)


@needs_compiler
def test_an_instruction_set_that_is_not_there_is_refused():
    kernels = native.load()
    assert kernels.isa == kernels.supported[-1] and kernels.using("plain").isa == "plain"
    with pytest.raises(NativeUnavailable, match="vax"):
        kernels.using("vax")
