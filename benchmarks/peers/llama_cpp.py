"""llama.cpp's server, built here from the sources in the sdist of llama-cpp-python."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from peers.peer import CACHE, Running, Setup, Unavailable, being_made, module, paths, run
from peers.process import Served, answers, pinned

VERSION: Final = "0.3.36"
FOLDER: Final = CACHE / f"llama_cpp_python-{VERSION}"
SOURCES: Final = FOLDER / "vendor" / "llama.cpp"
SERVER: Final = FOLDER / "build" / "bin" / "llama-server"
OPTIONS: Final = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
]  # fmt: skip


def sources() -> Path:
    """Fetch llama.cpp's sources, which also convert models. Raises Unavailable."""
    if not SOURCES.exists():
        with being_made(FOLDER) as scratch:
            # `pip download` asks the package's build backend for its metadata, hence the environment that it makes for that.
            fetch = ["download", "--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}", "-d", str(scratch)]
            run([sys.executable, "-m", "pip", "--quiet", *fetch], "pip download")
            archive = next(scratch.glob("*.tar.gz"))
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            archive.unlink()
            unpacked = next(scratch.iterdir())
            for part in unpacked.iterdir():
                part.rename(scratch / part.name)
    return SOURCES


def gguf(model: Path, kind: str) -> Path:
    """A GGUF file of the folder `model`, of type `kind` (bf16 or f16). Raises Unavailable."""
    out = CACHE / "gguf" / f"{model.name}.{kind}.gguf"
    if not out.exists():
        vendor, packages = sources(), FOLDER / "python"
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

    def get(self) -> str:
        sources()
        if not SERVER.exists():
            print(f"building {SERVER}: some minutes", file=sys.stderr, flush=True)
            for tool in ("cmake", "ninja", "c++"):
                if subprocess.run(["which", tool], stdout=subprocess.DEVNULL).returncode:
                    raise Unavailable(f"{tool} is missing: apt-get install cmake ninja-build g++")
            build = str(FOLDER / "build")
            run(["cmake", "-B", build, "-G", "Ninja", "-S", str(SOURCES), *OPTIONS], "cmake")
            run(["cmake", "--build", build, "--target", "llama-server"], "the build")
        said = subprocess.run([str(SERVER), "--version"], capture_output=True, text=True)
        number = next((line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version")), "")
        return f"llama-cpp-python {VERSION}, {number}".rstrip(", ")

    def convert(self, model: Path) -> Path:
        return gguf(model, "bf16")

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        threads, streams = str(setup.threads), str(setup.streams)
        command = [
            str(SERVER), "-m", str(model), "-t", threads, "-tb", threads, "-np", streams, "-c", str(setup.kv_tokens), "-cb", "-fa", "on",
            "--port", str(port),
        ]  # fmt: skip
        with pinned(command, setup) as process:
            process.wait(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield Served(process, f"http://127.0.0.1:{port}", "/health", "bf16 weights, -fa on")
