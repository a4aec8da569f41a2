"""API keys: several, with names or without, from a file that changes, and where a key may stand in a request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front import keys as keys_module
from banyan_runtime.front.keys import MAX_FILE_BYTES, MAX_KEYS, Keys, presented_key


def test_every_key_of_the_file_is_valid_under_its_name_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nalpha\n\n beta \nadas-laptop: sk-1\nadas-laptop:\tsk:2\nsk:plain\n")
    keys = Keys([], file)
    assert [keys.owner(key) for key in ("alpha", "beta", "sk-1", "sk:2", "sk:plain")] == ["", "", "adas-laptop", "adas-laptop", ""]
    for wrong in ("gamma", "", "# the team", "alpha\n", "adas-laptop", "adas-laptop: sk-1"):
        assert keys.owner(wrong) is None, wrong


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOOK_AGAIN_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("team: alpha\n")
    keys = Keys([], file)
    file.write_text("other: beta-two\n")
    assert (keys.owner("alpha"), keys.owner("beta-two")) == (None, "other")
    for broken in ("\n", "two words more\n", "a: same\nb: same\n"):
        file.write_text(broken)
        assert keys.owner("beta-two") == "other", broken
    file.unlink()
    assert keys.owner("beta-two") == "other"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\n", ""),
        (b"fine\nbad name: secret\n", "line 2"),
        (b"a: secret\nb: secret\n", "line 2"),
        (b"\n".join(b"k%d" % number for number in range(MAX_KEYS + 1)), str(MAX_KEYS)),
        (b"k" * (MAX_FILE_BYTES + 1), str(MAX_FILE_BYTES)),
        (b"\xff\xfe\n", ""),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_and_no_key_is_told(tmp_path: Path, content: bytes, found: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-keys-file") as refusal:
        Keys.of_users(ServerConfig(model_path="m", api_keys_file=str(file)))
    assert found in str(refusal.value)
    assert "secret" not in str(refusal.value)
    with pytest.raises(ConfigError, match="--admin-api-keys-file"):
        Keys.of_admins(ServerConfig(model_path="m", admin_api_keys_file=str(tmp_path / "absent")))


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(keys_module, "LOOK_AGAIN_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("secret")
    keys = Keys.of_users(ServerConfig(model_path="m", api_keys_file=str(file)))
    assert keys is not None
    file.unlink()
    os.mkfifo(file)
    assert (keys.owner("secret"), keys.owner("other")) == ("", None)
    assert str(file) in caplog.text


def test_the_keys_themselves_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team: topsecret\n")
    assert "topsecret" not in repr(vars(Keys(["topsecret"], file)))


def test_without_configuration_no_key_is_asked_for() -> None:
    assert Keys.of_users(ServerConfig(model_path="m")) is None
    assert Keys.of_admins(ServerConfig(model_path="m", api_key="secret")) is None
    keys = Keys.of_users(ServerConfig(model_path="m", api_key="secret"))
    assert keys is not None
    assert keys.owner("secret") == ""


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer secret"}, "secret"),
        ({"authorization": "bearer  secret "}, "secret"),
        ({"x-api-key": "secret"}, "secret"),
        ({"api-key": "secret"}, "secret"),
        ({"authorization": "Basic secret"}, None),
        ({"authorization": "Bearer"}, None),
        ({}, None),
    ],
)
def test_a_key_may_stand_where_openai_anthropic_and_azure_put_it(headers: dict[str, str], key: str | None) -> None:
    assert presented_key(Headers(headers)) == key


def test_another_process_has_the_same_keys_and_reads_their_file_but_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOOK_AGAIN_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("ann: first\n")
    there = Keys.of_told(Keys(["fixed"], file).told())
    assert [there.owner(key) for key in ("first", "fixed", "other")] == ["ann", "", None]
    file.write_text("bob: second\n")
    assert [there.owner(key) for key in ("first", "second")] == [None, "bob"]
    ours, theirs = os.pipe()
    os.write(theirs, b"ann: first\n")
    os.close(theirs)
    told = Keys([], Path(f"/dev/fd/{ours}")).told()
    os.close(ours)
    assert told.file is None
    assert Keys.of_told(told).owner("first") == "ann"
    assert "first" not in repr(told)
