"""Builds the packages and the C++ core; everything declarative is in pyproject.toml."""

from __future__ import annotations

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_namespace_packages, setup

ParallelCompile("MAX_JOBS", default=0).install()

flags = ["-O3", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
link_flags: list[str] = []
if os.environ.get("MEGATRON_PACKED_SANITIZE") == "1":
    # For the memory-checked test run; see the asan target of the Makefile.
    flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=undefined"]
    link_flags += ["-fsanitize=address,undefined"]


def extension(name: str, folder: str, extra_flags: list[str] | None = None) -> Pybind11Extension:
    """A C++17 extension module from the sources of one folder."""
    return Pybind11Extension(
        f"megatron.packed.{name}",
        sorted(glob(f"{folder}/*.cpp")),
        depends=sorted(glob(f"{folder}/*.h")),
        cxx_std=17,
        extra_compile_args=flags + (extra_flags or []),
        extra_link_args=link_flags,
    )


setup(
    packages=find_namespace_packages(include=["megatron.packed*"]),
    ext_modules=[
        extension("_C", "csrc"),
        # Element-wise kernels: vectorised for the processor they run on, chosen at load time.
        extension("_cpu_ops", "csrc/cpu_ops", ["-fno-math-errno", "-fno-trapping-math"]),
    ],
    cmdclass={"build_ext": build_ext},
)
