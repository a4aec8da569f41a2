"""What a comparison asks of each server or library."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from load.plan import Plan
from load.sample import Played

CACHE: Final = Path.home() / ".cache" / "banyan" / "bench"


class Unavailable(Exception):
    """The peer cannot be had on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all peers are given alike. `cpus`: as taskset takes them, "0,1"; `longest`: tokens of prompt and output; `streams`: at once;
    `first`: before whatever else wants these CPUs."""

    cpus: str
    longest: int
    streams: int
    first: bool = False

    @property
    def threads(self) -> int:
        return self.cpus.count(",") + 1

    @property
    def place(self) -> list[str]:
        """What comes before a command so that it runs there."""
        return ["taskset", "-c", self.cpus]

    @property
    def kv_tokens(self) -> int:
        """As many tokens of keys and values as all streams may need together."""
        return self.longest * self.streams


class Running(Protocol):
    """A peer with a model loaded."""

    @property
    def about(self) -> str:
        """What it says of itself: the type it computes in and the like."""

    def play(self, plan: Plan) -> Played: ...

    def pause(self) -> None:
        """Stop its processes (SIGSTOP), so that another one has the machine."""

    def resume(self) -> None: ...

    def cpu_seconds(self) -> float:
        """CPU time of its processes since their start."""


class Peer(Protocol):
    name: str

    def get(self) -> str:
        """Install what is not there yet, into CACHE; its version. Raises Unavailable."""

    def convert(self, model: Path, weights: str) -> Path:
        """The model in the peer's form, from a folder with bfloat16 safetensors; made once. `weights`: bf16, or a type of GGUF's. Raises
        Unavailable."""

    def start(self, model: Path, setup: Setup) -> AbstractContextManager[Running]:
        """Load what `convert` returned and be ready. Raises Unavailable."""


def only_bf16(weights: str) -> None:
    """Raises Unavailable for any other kind of weights."""
    if weights != "bf16":
        raise Unavailable(f"{weights} weights: it is measured with bf16 alone")


def run(command: list[str], what: str, **options: object) -> None:
    """A step of an installation. Raises Unavailable with the end of its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Unavailable(f"{what} failed: {' '.join(done.stdout.split()[-60:])}")


def module(python: str, name: str) -> list[str]:
    """The command of a module of this package. -P: this folder, where modules are named as the libraries are, is no place to look."""
    return [python, "-P", "-m", f"peers.{name}"]


def paths() -> dict[str, str]:
    """The variables with which it finds this package."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


@contextlib.contextmanager
def being_made(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its place when all went well: what is half made is never taken for whole."""
    scratch = folder.with_name(folder.name + ".making")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    yield scratch
    scratch.rename(folder)


def environment(folder: Path, *steps: list[str]) -> Path:
    """The Python of a virtual environment at `folder`; made with `pip STEP` for each step. Raises Unavailable."""
    python, made = folder / "bin" / "python", folder / ".made"
    if not made.exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"no virtual environment could be made in {folder}: {error}") from error
        for step in steps:
            run([str(python), "-m", "pip", "--quiet", *step], f"pip {' '.join(step)}")
        made.touch()
    return python
