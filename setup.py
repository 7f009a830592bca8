"""The native parts, and which wheel comes out: one of its platform if they are in it, or ``py3-none-any``.

``AIOSHM_NATIVE=0`` leaves them out; ``AIOSHM_NATIVE=1`` lets the build fail that cannot have them. All else stands in
pyproject.toml.
"""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
WANTED = os.environ.get("AIOSHM_NATIVE", "")
FLAGS = ["-std=c11", "-O2", "-fvisibility=hidden"]
RING = Path("aioshm", "ring", "core")

# The ring's is for the stable ABI, which free-threaded builds of CPython do not have; that of events reads the insides
# of numbers, and lists that the GIL keeps as they are. setuptools tells the two apart by their last names.
NATIVE = [
    Extension(
        "aioshm.ring._native",
        sorted(map(str, RING.glob("*.c"))),
        depends=sorted(map(str, RING.glob("*.h"))),
        extra_compile_args=FLAGS,
        optional=WANTED != "1",
        py_limited_api=not FREE_THREADED,
    ),
    Extension(
        "aioshm.events.protocol._encoder",
        ["aioshm/events/protocol/_encoder.c"],
        extra_compile_args=FLAGS,
        optional=WANTED != "1",
    ),
]


class BuildNative(build_ext):
    """Forgets what it cannot build, so that it counts as left out; an earlier build's file does not take its place."""

    def run(self) -> None:
        super().run()
        built = [each for each in self.extensions if Path(self.get_ext_fullpath(each.name)).exists()]
        self.distribution.ext_modules = self.extensions = built

    def build_extension(self, extension: Any) -> None:
        try:
            super().build_extension(extension)
        except Exception:
            with suppress(FileNotFoundError):
                Path(self.get_ext_fullpath(extension.name)).unlink()
            raise


class Wheel(bdist_wheel):
    """Names the wheel by what was built, not by what was to be."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


if WANTED not in {"", "0", "1"}:
    raise SystemExit(f"AIOSHM_NATIVE={WANTED!r}: it must be 0 or 1")
left_out = NATIVE[1:] if FREE_THREADED else []
setup(
    ext_modules=[] if WANTED == "0" else [each for each in NATIVE if each not in left_out],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
