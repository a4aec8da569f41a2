"""From sources to a shared library: found beside the package, in the cache, or compiled into the cache.

A wheel that was built where a compiler is holds all variants (`python -m banyan_runtime.model.native.build DIR` makes them). Elsewhere
the one that is needed is compiled at the first start, within a minute, and kept under a name that holds the hash of everything that
went into it; so another version or processor finds another file, and two servers that start at once cannot disturb each other. One
that cannot be loaded, for it was made for another C library, is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from banyan_runtime.model.native.variants import VARIANTS, Variant

log = logging.getLogger("banyan")

SOURCES: Final = Path(__file__).parent / "src"
BUILT: Final = Path(__file__).parent / "lib"
_COMPILERS: Final = ("c++", "g++", "clang++")
_OPTIONS: Final = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
_SCRATCH: Final = ".building-"
_LIMIT_S: Final = 300  # a compiler that takes this long is stuck


class NotBuilt(Exception):
    """There is no library, and why, in words that go on after "the native runner is not used:". `for_all`: nor will there be one of
    another variant."""

    def __init__(self, why: str, *, for_all: bool = False) -> None:
        super().__init__(why)
        self.for_all = for_all


def there(variant: Variant, cache: Path | None) -> list[Path]:
    """Libraries of a variant that are there already; `cache` keeps those that this machine compiles."""
    return [path for folder in (BUILT, cache) if folder is not None and _is_file(path := folder / _name(variant))]


def make(variant: Variant, cache: Path | None) -> Path:
    """Compile the library of a variant into `cache`. Raises NotBuilt."""
    command = compiler()
    if cache is None:
        raise NotBuilt("there is no home folder to keep it in (set BANYAN_CACHE to a folder)", for_all=True)
    log.info("Compiling the CPU kernels (%s) with %s ...", variant.name, " ".join(command))
    started = time.monotonic()
    made = _compile(command, variant, cache / _name(variant))
    log.info("Compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, made)
    return made


def compiler() -> list[str]:
    """$CXX, or the first C++ compiler on the path: the words of a command. Raises NotBuilt."""
    named = os.environ.get("CXX", "").strip()
    for name, *options in (shlex.split(named),) if named else ([name] for name in _COMPILERS):
        if found := shutil.which(name):
            return [found, *options]
    raise NotBuilt(
        f"CXX={named} is not there"
        if named
        else "no C++ compiler was found to build its library with (Debian, Ubuntu: apt-get install g++; or set CXX)"
    )


def build_all(folder: Path) -> list[Path]:
    """Every variant that this machine's compiler can make, for a package. Raises NotBuilt where it can make none."""
    command = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    made, reasons = [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = [variant for variant in VARIANTS if variant.machine in (None, platform.machine())]
        for making in [pool.submit(_compile, command, variant, folder / _name(variant)) for variant in wanted]:
            try:
                made.append(making.result())
            except NotBuilt as error:
                reasons.append(str(error))
    if not made:
        raise NotBuilt("; ".join(reasons))
    for reason in reasons:
        print(f"left out: {reason}", file=sys.stderr)
    return made


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that we may not enter
        return False


def _name(variant: Variant) -> str:
    """Of a library's file: other sources or options are another file."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((variant.options, _OPTIONS)).encode())
    return f"banyan-{platform.machine()}-{variant.name}-{digest.hexdigest()[:16]}.so"


def _compile(command: list[str], variant: Variant, target: Path) -> Path:
    """Into a file beside the target, which appears whole or not at all."""
    scratch = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=_SCRATCH, suffix=".so", delete=False) as file:
            scratch = Path(file.name)
        words = [*command, *_OPTIONS, *variant.options, str(SOURCES / "library.cpp"), "-o", str(scratch)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            raise NotBuilt(f"{command[0]} ended with {done.returncode}: {said}")
        scratch.chmod(0o755)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())  # half a library, after a power cut, would end every start with a bus error
        scratch.replace(target)
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{command[0]} took more than {_LIMIT_S} s", for_all=True) from None
    except OSError as error:
        raise NotBuilt(f"{target}: {error.strerror or error} (BANYAN_CACHE names another folder)", for_all=True) from error
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
    return target


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed while they compiled have left."""
    for path in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 2 * _LIMIT_S:
                path.unlink()


if __name__ == "__main__":
    try:
        for path in build_all(Path(sys.argv[1])):
            print(path)
    except NotBuilt as error:
        sys.exit(f"the CPU kernels were not built: {error}")
