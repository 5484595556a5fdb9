"""What a wheel holds: every package, and the native kernels, so that nothing is compiled where it is installed."""

import importlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lfm2_cb import demo_model_path
from lfm2_cb.ops.native.build import PREBUILT

ROOT = Path(__file__).parents[2]


def test_every_folder_with_code_is_packaged():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"lfm2_cb.integrations": "integrations"}
    ours = {path.parent.relative_to(ROOT) for path in (ROOT / "lfm2_cb").rglob("__init__.py")}
    theirs = {Path("lfm2_cb", path.parent.relative_to(ROOT)) for path in (ROOT / "integrations").rglob("__init__.py")}
    assert sorted(setuptools["packages"]) == sorted(".".join(path.parts) for path in ours | theirs)


def test_integrations_are_importable_under_the_package():
    package = importlib.import_module("lfm2_cb.integrations")
    assert package.__file__ is not None and Path(package.__file__).name == "__init__.py"


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """A wheel of the sources as they are. Returns: it, and what was said meanwhile."""
    skipped = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "build", "tests", "shared", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=skipped)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=folder / "source", env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return next(folder.glob("*.whl")), done.stderr


def test_without_a_compiler_the_wheel_is_pure_and_says_why(tmp_path):
    wheel, said = build_wheel(tmp_path, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "without native kernels" in said and "no-such-compiler" in said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_a_wheel_brings_its_kernels_to_where_there_is_no_compiler(tmp_path):
    wheel, _ = build_wheel(tmp_path)
    assert "-py3-none-" in wheel.name and wheel.name.endswith(f"{platform.machine().lower()}.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(installed), str(wheel)], check=True)
    assert len(list((installed / PREBUILT.relative_to(ROOT)).glob("*.so"))) == 1
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(empty), "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(empty)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "lfm2_cb", *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert ", prebuilt" in next(
        line for line in run("info", demo_model_path()).splitlines() if line.startswith("kernels")
    )
    prompts = empty / "prompts.txt"
    prompts.write_text("It is a truth\nShe was\n")
    out = empty / "answers.jsonl"
    run("generate", demo_model_path(), "--input", str(prompts), "--output", str(out), "--max-new-tokens", "4")
    assert len(out.read_text().splitlines()) == 2
    assert not list(empty.rglob("native-*"))  # nothing was built
