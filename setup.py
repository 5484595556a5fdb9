"""Builds the native kernels into the wheel, where there is a C++ compiler. All else is in pyproject.toml."""

import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("lfm2_cb", "ops", "native")
# The package itself imports torch, which is not there while it is built: of it only what builds is imported.
native = ModuleType("native")
native.__path__ = [str(Path(__file__).parent / NATIVE)]
sys.modules["native"] = native

from native.build import NativeUnavailable, prebuild_library  # noqa: E402


class BuildWithKernels(build_py):
    """An editable install has no library: it is built on first use, as the sources may change."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            prebuild_library(Path(self.build_lib, NATIVE, "prebuilt").absolute())
            self.distribution.has_ext_modules = lambda: True
        except NativeUnavailable as error:
            self.warn(f"a wheel without native kernels, which are built on first use where it is installed: {error}")


class PlatformWheel(bdist_wheel):
    """For any Python of this platform: the kernels are a C library. Pure, where they could not be built."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return (python, abi, system) if self.root_is_pure else ("py3", "none", system)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
