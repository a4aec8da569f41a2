"""The catalogue of messages: docs/messages.py on sources made for it, and what docs/messages.md knows of the product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ERRORS = """
class UserError(Exception):
    exit_code = 1

class ConfigError(UserError):
    exit_code = 64

class AnswerError(Exception):
    def __init__(self, status, message, *, code=None, param=None):
        super().__init__(message)

def invalid(param: str, message: str, code: str = "invalid_value") -> AnswerError:
    return AnswerError(400, f"Invalid {param}: {message}.", code=code, param=param)
"""
USES = """
from banyan_runtime.errors import ConfigError, invalid

WAY = "; name another one"

def strings(option, value):
    raise ConfigError(f"--{option}={value[:20]}: a folder " "is expected" + WAY)

def nested(limit):
    raise invalid("top_k", f"at most {limit} are allowed")

def branches(given):
    text = "nothing was given"
    if given:
        text = f"{given} was given"
    raise ConfigError(text)
    text = "this is said nowhere"

def no_message():
    raise ConfigError(branches(1)) from ValueError("an internal value is wrong")
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A repository with two modules."""
    folder = tmp_path / "runtime" / "banyan_runtime"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (folder / "errors.py").write_text(ERRORS)
    (folder / "uses.py").write_text(USES)
    return tmp_path


def _run(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "docs" / "messages.py"), f"--root={root}", *flags]
    return subprocess.run(script, capture_output=True, text=True, timeout=60)


def _rows(root: Path) -> list[list[str]]:
    """The cells of the catalogue's tables, without the heads."""
    lines = [line for line in (root / "docs" / "messages.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| Module ")]


def test_a_message_is_shown_with_its_module_its_code_and_names_for_its_values(sources: Path) -> None:
    assert _run(sources).returncode == 0
    assert _rows(sources) == [
        ["errors.py", "AnswerError", "status=400", "Invalid {param}: {message}."],
        ["uses.py", "AnswerError", "status=400, code=invalid_value, param=top_k", "Invalid top_k: at most {limit} are allowed."],
        ["uses.py", "ConfigError", "exit_code=64", "--{option}={value}: a folder is expected; name another one"],
        ["uses.py", "ConfigError", "exit_code=64", "nothing was given"],
        ["uses.py", "ConfigError", "exit_code=64", "{given} was given"],
    ]


def test_a_check_tells_of_a_changed_sentence_and_writes_nothing(sources: Path) -> None:
    _run(sources)
    assert _run(sources, "--check").returncode == 0
    page, uses = sources / "docs" / "messages.md", sources / "runtime" / "banyan_runtime" / "uses.py"
    before = page.read_text()
    uses.write_text(USES.replace("nothing was given", "there was nothing"))
    told = _run(sources, "--check")
    assert told.returncode == 1
    assert "there was nothing" in told.stdout
    assert told.stdout.endswith("make messages\n")
    assert page.read_text() == before


@pytest.mark.parametrize(
    ("module", "speaker", "known"),
    [
        ("front/errors.py", "ApiError", "code=queue_full"),
        ("engine/limits.py", "refusal", "code=context_length_exceeded"),
        ("batch/lines.py", "refusal", "code=url_mismatch"),
        ("batch/run.py", "OutputExists", "exit_code=65"),
        ("hub/checkpoint.py", "ModelError", "exit_code=65"),
        ("storage/s3_errors.py", "Denied", ""),
        ("observed/diagnosis.py", "condition", "reason=OOMKilled"),
        ("observed/events.py", "event", "reason=RolloutFinished"),
        ("api/validation.py", "problem", "field=metadata.name"),
        ("local/state.py", "BusyError", "exit_code=75"),
    ],
)
def test_the_catalogue_knows_the_products_messages(module: str, speaker: str, known: str) -> None:
    assert any(row[:2] == [module, speaker] and known in row[2] for row in _rows(ROOT))
