""".ci/install and .ci/pip-bar: the real scripts in a folder of their own, with a Python that makes environments and runs pip as told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

INPUTS = ("constraints.txt", ".ci/constraints-dev.txt", "runtime/pyproject.toml", "operator/pyproject.toml", ".ci/requirements-dev.txt")
KERNELS = "runtime/banyan_runtime/model/native"
STUB = f"""#!/bin/bash
# A Python whose version, environments and pip are those that the test's folder says. It runs our own scripts for real.
say() {{ cat "$HERE/$1" 2>/dev/null; }}
case "$*" in
"-c import sys; print"*) say version || echo 3.12 ;;
"-c import torch") [ -e "$(dirname "$0")/../torch" ] ;;
"-m venv "*)
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
  if [ -e "$HERE/no-ensurepip" ]; then echo "ensurepip is not available"; exit 1; fi
  if [ -e "$HERE/disk-full" ]; then echo "Error: Command '['python3', '-m', 'ensurepip']' returned non-zero exit status 1."; exit 1; fi
  if [ -e "$HERE/interrupted" ]; then echo "Traceback ... KeyboardInterrupt"; exit 130; fi
  touch "$3/pip" ;;
"-m pip --version") [ -e "$(dirname "$0")/../pip" ] ;;
"-m pip "*)
  echo "$*" >>"$HERE/calls"
  case "$*" in *torch==*) touch "$(dirname "$0")/../torch" ;; esac
  if [ -e "$HERE/pip-says" ] && [[ "$*" == *"$(say pip-fails-for)"* ]]; then cat "$HERE/pip-says"; exit 1; fi ;;
*) exec -a "$0" {sys.executable} -c '
import runpy, sys
sys.executable = sys.argv.pop(1)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")' "$0" "$@" ;;
esac
"""


class Checkout:
    """What .ci/install sees of the repository, and what the stub Python does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (*INPUTS, ".ci/install", ".ci/pip-bar"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / KERNELS, root / KERNELS, ignore=shutil.ignore_patterns("lib", "__pycache__"))
        self.bin = root / "bin"
        self.bin.mkdir()
        self.python("python3")

    def python(self, name: str) -> None:
        (self.bin / name).write_text(STUB)
        (self.bin / name).chmod(0o755)

    def tell(self, what: str, text: str = "") -> None:
        (self.root / what).write_text(text)

    def install(self, *flavour: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HERE": str(self.root), **variables}
        return subprocess.run([self.root / ".ci" / "install", *flavour], env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What pip was asked for since the last time, without the options that every call has."""
        file = self.root / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [call.partition("constraints-dev.txt ")[2] for call in found]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_install_does_nothing(checkout: Checkout) -> None:
    assert checkout.install().returncode == 0
    assert len(checkout.calls()) == 3
    assert checkout.install().returncode == 0
    assert checkout.calls() == []


def test_kernels_that_changed_are_built_anew_with_the_test_tools_only(checkout: Checkout) -> None:
    lib = checkout.root / KERNELS / "lib"
    assert checkout.install("dev").returncode == 0
    lib.mkdir()
    assert checkout.install("dev").returncode == checkout.install().returncode == 0
    assert lib.exists(), "nothing changed"
    with (checkout.root / KERNELS / "src" / "library.cpp").open("a") as source:
        source.write("// changed\n")
    assert checkout.install().returncode == 0
    assert lib.exists(), "a server builds what it needs itself"
    assert checkout.install("dev").returncode == 0
    assert not lib.exists()


def test_another_torch_is_installed_in_place_of_the_one_that_is_there_and_kept(checkout: Checkout) -> None:
    checkout.install()
    checkout.calls()
    assert checkout.install(TORCH="torch==2.13.0").returncode == 0
    assert checkout.calls()[1:3] == ["--force-reinstall --no-deps torch==2.13.0", "torch==2.13.0"]
    assert checkout.install().returncode == 0
    assert checkout.calls() == [], "the choice is kept by later runs that make none"


def test_a_torch_of_another_version_may_be_chosen_with_the_triton_that_it_asks_for(checkout: Checkout) -> None:
    for number, choice in enumerate(("torch==2.11.0", "torch==2.12.0+cu126")):
        assert checkout.install(TORCH=choice).returncode == 0
        constraints = (checkout.root / ".venv" / "constraints.txt").read_text()
        assert "numpy==" in constraints
        assert "torch==" not in constraints
        assert "triton==" not in constraints
        calls = (checkout.root / "calls").read_text().splitlines()
        assert all("-c .venv/constraints.txt " in call for call in calls[-3:])
        assert len(calls) == (number + 1) * 4


def test_an_environment_for_another_python_is_made_anew(checkout: Checkout) -> None:
    checkout.install()
    (checkout.root / ".venv" / "of-before").touch()
    checkout.calls()
    checkout.python("python3.13")
    checkout.install(PYTHON="python3.13")
    assert (checkout.root / ".venv" / "of-before").exists(), "of the same version: it stays"
    (checkout.bin / "python3.13").write_text(STUB.replace("say version || echo 3.12", "echo 3.13"))
    assert checkout.install(PYTHON="python3.13").returncode == 0
    assert not (checkout.root / ".venv" / "of-before").exists()
    assert len(checkout.calls()) == 3
    assert checkout.install().returncode == 0
    assert checkout.calls() == [], "no Python is named: the environment that is there stays"


@pytest.mark.parametrize("trouble", ["no-ensurepip", "interrupted"])
def test_an_environment_that_was_half_made_is_made_anew(checkout: Checkout, trouble: str) -> None:
    checkout.tell(trouble)
    first = checkout.install()
    assert first.returncode == (1 if trouble == "no-ensurepip" else 130)
    assert ("apt-get install python3-venv" in first.stderr) == (trouble == "no-ensurepip")
    assert "Traceback" not in first.stderr + first.stdout
    (checkout.root / trouble).unlink()
    assert checkout.install().returncode == 0


def test_an_environment_that_fails_with_pip_at_hand_is_told_in_pythons_words(checkout: Checkout) -> None:
    checkout.tell("disk-full")
    made = checkout.install()
    assert made.returncode == 1
    assert "could not make a virtual environment in .venv" in made.stderr
    assert "returned non-zero exit status 1" in made.stderr
    assert "apt-get" not in made.stderr


def test_an_environment_whose_pip_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.install()
    (checkout.root / ".venv" / "pip").unlink()
    assert checkout.install().returncode == 0
    assert (checkout.root / ".venv" / "pip").exists()


def test_a_folder_that_somebody_else_made_is_left_alone(checkout: Checkout) -> None:
    mine = checkout.root / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    refused = checkout.install()
    assert (refused.returncode, mine.exists()) == (1, True)
    assert ".venv is not an environment that this made" in refused.stderr


def test_what_is_wrong_with_python_is_one_line(checkout: Checkout) -> None:
    for name in ("bash", "dirname", "cat", "env"):
        (checkout.bin / name).symlink_to(str(shutil.which(name)))
    (checkout.bin / "python3").unlink()
    gone = checkout.install(PATH=str(checkout.bin))
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    assert "needs Python 3.11 to 3.13, and there is no python3 here" in gone.stderr
    checkout.python("python3")
    checkout.tell("version", "3.9")
    old = checkout.install()
    assert (old.returncode, old.stderr.count("\n")) == (1, 1)
    assert "python3 is Python 3.9" in old.stderr


def test_pips_last_lines_are_shown_when_it_fails(checkout: Checkout) -> None:
    checkout.tell(
        "pip-says", "Collecting setuptools\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    failed = checkout.install()
    assert failed.returncode == 1
    assert "pip and setuptools: pip failed. Its last lines:" in failed.stderr
    assert "[Errno 28] No space left on device" in failed.stderr


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        ("ERROR: No matching distribution found for torch", 2),
        (
            "The conflict is caused by:\n    The user requested torch==2.13.0+cpu\n    The user requested (constraint) torch==2.13.0\n\n"
            "Additionally, some packages in these conflicts have no matching distributions available for your environment:\n    torch\n"
            "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            2,
        ),
        ("WARNING: Retrying (Retry(total=4)) after connection broken\nERROR: No matching distribution found for torch", 1),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", 1),
    ],
)
def test_another_index_is_asked_only_when_ours_has_no_cpu_build(checkout: Checkout, words: str, tries: int) -> None:
    checkout.tell("pip-says", words + "\n")
    checkout.tell("pip-fails-for", "torch==")
    failed = checkout.install()
    assert failed.returncode == 1
    asked = [call for call in checkout.calls() if "torch==" in call]
    assert ["--extra-index-url" in call for call in asked] == [False, True][:tries]
    assert words.splitlines()[-1] in failed.stderr
    assert ("TORCH='torch==" in failed.stderr) == (tries == 2)


def test_ctrl_c_ends_the_bar_and_pip_quietly(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import time\nprint('Collecting slow', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, ROOT / ".ci" / "pip-bar", "things", "1", "--", "install", "slow"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bar:
        assert bar.stdout is not None
        assert "things" in bar.stdout.readline(), "pip runs"
        bar.send_signal(signal.SIGINT)
        out, errors = bar.communicate(timeout=30)
    assert (bar.returncode, out, errors) == (130, "", "")


def test_no_target_of_the_makefile_is_listed_twice() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    (phony,) = (line.split()[1:] for line in lines if line.startswith(".PHONY:"))
    assert sorted(phony) == sorted({line.partition(":")[0] for line in lines if ": " in line and "## " in line})
