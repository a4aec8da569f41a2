"""What pyproject.toml cannot say: a wheel that is built where a C++ compiler is brings the CPU kernels along, compiled.

Elsewhere, and in an editable install, they are compiled at a server's first start.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from banyan_runtime.model.native import build


def compiler() -> bool:
    try:
        return bool(build.compiler())
    except build.NotBuilt:
        return False


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            for path in build.build_all(Path(self.build_lib) / "banyan_runtime" / "model" / "native" / "lib"):
                print(f"compiled {path.name}")
        except build.NotBuilt as error:
            print(f"the CPU kernels are not part of this wheel: {error}")


class WheelWithKernels(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not compiler()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])  # the kernels know nothing of Python


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
