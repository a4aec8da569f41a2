"""API keys: several, from a file that changes, and where a key may stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front import auth
from banyan_runtime.front.auth import Keys, presented_key


def test_every_key_of_the_file_is_valid_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nalpha\n\n beta \n")
    keys = Keys([], file)
    assert [keys.valid(key) for key in ("alpha", "beta", "gamma", "", "# the team", "alpha\n")] == [True, True, False, False, False, False]


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_AGAIN_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    keys = Keys([], file)
    file.write_text("beta-two\n")
    assert (keys.valid("alpha"), keys.valid("beta-two")) == (False, True)
    file.write_text("\n")
    assert keys.valid("beta-two")
    file.unlink()
    assert keys.valid("beta-two")


def test_a_file_without_keys_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    for name in ("keys", "absent"):
        with pytest.raises(ConfigError, match="--api-keys-file"):
            Keys.of(ServerConfig(model_path="m", api_keys_file=str(tmp_path / name)))


def test_without_configuration_no_key_is_asked_for() -> None:
    assert Keys.of(ServerConfig(model_path="m")) is None
    keys = Keys.of(ServerConfig(model_path="m", api_key="secret"))
    assert keys is not None
    assert keys.valid("secret")


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
