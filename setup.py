"""Builds the C++ row kernels where torch and a compiler are at hand; without them, a pure wheel of the same tree.

GRPO_KERNELS_BUILD_CPP: auto (default), 0 (never), 1 (or fail). torch is no requirement of the build: in an isolated
environment it is absent, and `pip install --no-build-isolation` builds against the torch that is installed.
"""

from __future__ import annotations

import os
import platform
import runpy
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

VARIABLE = "GRPO_KERNELS_BUILD_CPP"
TORCH_2_10 = "0x020a000000000000"  # the oldest torch whose stable ABI has all that is used
FORMULAS = Path("grpo_kernels/formulas.py")
X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTIONS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    # registers of 512 bits are what that file is for; compilers prefer narrower ones by themselves
    "kernels_avx512.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # of GCC 12 about its own intrinsics
    ],
}


class BuildKernels(build_ext):
    """Flags of its own for a source, and no failure unless the kernels were asked for."""

    def build_extensions(self) -> None:
        """Every source compiled and linked; what fails is left out."""
        compile_one: Any = self.compiler._compile

        def compile_with_flags(obj: str, src: str, ext: str, cc_args: Any, flags: list[str], pp_opts: Any) -> None:
            own = INSTRUCTIONS.get(Path(src).name, []) if X86 else []
            compile_one(obj, src, ext, cc_args, flags + own, pp_opts)

        self.compiler._compile = compile_with_flags
        try:
            self._write_formulas()
            super().build_extensions()
        except (BaseError, CCompilerError, OSError) as error:
            if mode() == "1":
                raise
            self.warn(f"the C++ kernels were not built, the torch implementation takes their place: {error}")
            self.extensions = self.distribution.ext_modules = []

    def _write_formulas(self) -> None:
        """The formulas as a header: their one copy is Python."""
        made = runpy.run_path("csrc/translate.py")["header"](
            FORMULAS.read_text(encoding="utf-8"), "token_terms", "held_back"
        )
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "formulas.h").write_text(made, encoding="utf-8")
        for extension in self.extensions:
            extension.include_dirs.append(str(folder))


class Wheel(bdist_wheel):
    """cp310-abi3 with the kernels, pure without."""

    def get_tag(self) -> tuple[str, str, str]:
        """What is known only after the build."""
        self.root_is_pure = not self.distribution.has_ext_modules()
        return super().get_tag()


def mode() -> str:
    """auto, 0 or 1."""
    asked = os.environ.get(VARIABLE) or "auto"
    if asked not in ("auto", "0", "1"):
        raise SystemExit(f"{VARIABLE} must be auto, 0 or 1, got {asked!r}.")
    return asked


def extensions() -> list[Extension]:
    """The extension, if it is wanted and can be built."""
    asked = mode()
    if asked == "0":
        return []
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        if asked == "1":
            raise SystemExit(
                f"{VARIABLE}=1 needs torch to build against: {error}. Install it and use pip's --no-build-isolation."
            ) from error
        return []
    if asked == "auto" and not compiler_works():
        return []
    return [
        Extension(
            "grpo_kernels._cpp",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=[str(FORMULAS), "csrc/translate.py", *sorted(str(path) for path in Path("csrc").glob("*.h"))],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=cpp_extension.library_paths(),
            libraries=["torch_cpu"],
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_10), *([("GRPO_KERNELS_X86", "1")] if X86 else [])],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0"],
            py_limited_api=True,
            language="c++",
        )
    ]


def compiler_works() -> bool:
    """Whether a C++ compiler makes a shared library of the smallest source."""
    from distutils.ccompiler import new_compiler  # what setuptools makes of it, also where Python has none
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <optional>\nint probe() { return std::optional<int>(1).value(); }\n")
        try:
            objects = compiler.compile([str(source)], output_dir=folder, extra_preargs=["-std=c++17"])
            compiler.link_shared_object(objects, str(Path(folder) / "probe.so"), target_lang="c++")
        except (BaseError, CCompilerError, OSError):
            return False
    return True


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
