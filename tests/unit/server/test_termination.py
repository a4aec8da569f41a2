"""The termination message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from banyan_operator.observed.diagnosis import _SERVER_EXITS, _WORKER_EXITS
from banyan_operator.observed.termination import TerminationMessage
from banyan_runtime.batch import errors
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, UserError
from banyan_runtime.server import termination

FALLBACK = {"user_error", "input_error", "engine_died", "server_failed"}
"""Codes of which the exit code says more."""


def test_it_is_read_by_the_operator_as_it_was_written_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_TERMINATION_LOG", str(tmp_path / "log"))
    assert termination.fatal(ConfigError("x" * 9000, field="--page-size", value="3" * 9000)) == 64
    text = (tmp_path / "log").read_text()
    assert list(json.loads(text)) == ["code", "field", "value", "message"]
    assert len(text) <= termination.MAX_BYTES
    read = TerminationMessage.parse(text)
    assert (read.code, read.field, read.value) == ("invalid_flag", "--page-size", "3" * termination.MAX_VALUE)


def test_a_key_is_never_its_value() -> None:
    with pytest.raises(ConfigError) as told:
        ServerConfig(model_path="folder", api_key="sk-secret", api_keys_file="file")
    assert "sk-secret" not in json.dumps(termination.words(told.value))


def test_the_operator_has_a_reason_for_each_code() -> None:
    kinds: list[type[UserError]] = [
        UserError,
        *(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, UserError)),
    ]
    codes = {one.code for kind in kinds for one in (kind, *kind.__subclasses__())}
    assert not codes - FALLBACK - _WORKER_EXITS.keys() - _SERVER_EXITS.keys()
