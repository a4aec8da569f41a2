"""Who may ask for what: each class of routes with each kind of key, and that every route has a class."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Scope

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.auth import KEY_NAME, OWNER, Access, Gate
from banyan_runtime.front.context import Context
from banyan_runtime.front.keys import InternalKey
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.routes import ROUTES
from banyan_runtime.front.state import ServerState

USER: dict[str, Any] = {"api_key": "user"}
ADMIN: dict[str, Any] = {"admin_api_key": "admin"}
OPEN = {"/", "/ping", "/livez", "/health", "/healthz", "/readyz", "/ready", "/health_generate", "/metrics", "/metrics/load"}
ADMINS = {"/flush_cache", "/reset_prefix_cache"}
OURS = {"/v1/models", "/server_info", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}


def ask(
    options: dict[str, Any],
    access: Access,
    key: str | None,
    *,
    client: str = "10.0.0.9",
    internal: InternalKey | None = None,
    header: str | None = None,
) -> int:
    """The status of the refusal; 200 for none."""
    raw = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    raw += [] if header is None else [(header.encode(), b"127.0.0.1")]
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": raw, "client": (client, 5)}
    refusal = Gate.of(ServerConfig(model_path="m", **options), internal or InternalKey()).check(scope, access)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("options", "answers"),
    [  # answers: to no key, a wrong one, a user's, an admin's
        ({}, {Access.OPEN: (200, 200, 200, 200), Access.USER: (200, 200, 200, 200), Access.ADMIN: (403, 403, 403, 403)}),
        (USER, {Access.OPEN: (200, 200, 200, 200), Access.USER: (401, 401, 200, 401), Access.ADMIN: (401, 401, 403, 401)}),
        (ADMIN, {Access.OPEN: (200, 200, 200, 200), Access.USER: (200, 200, 200, 200), Access.ADMIN: (401, 401, 401, 200)}),
        (USER | ADMIN, {Access.OPEN: (200, 200, 200, 200), Access.USER: (401, 401, 200, 200), Access.ADMIN: (401, 401, 403, 200)}),
    ],
)
def test_each_class_of_routes_takes_its_keys_and_no_others(options: dict[str, Any], answers: dict[Access, tuple[int, ...]]) -> None:
    for access, statuses in answers.items():
        assert tuple(ask(options, access, key) for key in (None, "wrong", "user", "admin")) == statuses, access
    user, internal = answers[Access.USER], tuple(ask(options, Access.INTERNAL, key) for key in (None, "wrong", "user", "admin"))
    assert internal == user


def test_who_sends_no_key_is_told_how_to_and_who_sends_a_wrong_one_that_it_is_wrong() -> None:
    gate = Gate.of(ServerConfig(model_path="m", **USER), InternalKey())
    said: list[str] = []
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Basic abc")]):
        refusal = gate.check({"type": "http", "method": "POST", "path": "/", "headers": headers, "client": None}, Access.USER)
        assert refusal is not None
        assert (refusal.status, refusal.code, refusal.headers) == (401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        said.append(refusal.message)
    none, wrong, other_scheme = said
    assert none == other_scheme != wrong
    assert "Authorization: Bearer" in none


def test_without_an_admin_key_users_of_this_machine_are_admins() -> None:
    for client in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert ask({}, Access.ADMIN, None, client=client) == 200
        assert [ask(USER, Access.ADMIN, key, client=client) for key in (None, "wrong", "user")] == [401, 401, 200]
        assert [ask(ADMIN, Access.ADMIN, key, client=client) for key in (None, "admin")] == [401, 200]
    for client in ("10.0.0.9", "127.0.0.6", "::ffff:10.0.0.9", "testclient", ""):
        assert ask({}, Access.ADMIN, None, client=client) == 403


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for", "x-real-ip", "via"])
def test_what_a_proxy_on_this_machine_passes_on_is_not_from_this_machine(header: str) -> None:
    assert ask({}, Access.ADMIN, None, client="127.0.0.1", header=header) == 403


def test_the_servers_own_key_is_good_for_what_batches_ask_and_for_nothing_else() -> None:
    internal = InternalKey()
    for options in (USER, USER | ADMIN):
        assert ask(options, Access.INTERNAL, internal.value, internal=internal) == 200
        assert ask(options, Access.INTERNAL, InternalKey().value, internal=internal) == 401
        for access in (Access.USER, Access.ADMIN):
            assert ask(options, access, internal.value, internal=internal, client="127.0.0.1") == 401
    assert {route.path for route in ROUTES if route.access is Access.INTERNAL} <= OURS


def test_the_name_of_a_key_is_told_and_a_key_without_one_has_none(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("ada: one\ntwo\n")
    gate = Gate.of(ServerConfig(model_path="m", api_keys_file=str(file)), InternalKey())
    for key, name in (("one", "ada"), ("two", ""), ("three", None)):
        scope: Scope = {"type": "http", "headers": [(b"x-api-key", key.encode())], "client": None}
        gate.check(scope, Access.USER)
        assert scope[KEY_NAME] == name


def test_each_key_is_an_owner_of_its_own_and_admins_are_nobodys_equals(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("ada: one\nada: new\ntwo\nthree\n")
    internal = InternalKey()
    gate = Gate.of(ServerConfig(model_path="m", api_keys_file=str(file), admin_api_key="admin"), internal)

    def owner(key: str) -> Any:
        scope: Scope = {"type": "http", "headers": [(b"x-api-key", key.encode())], "client": None}
        gate.check(scope, Access.INTERNAL)
        return scope[OWNER]

    assert [owner(key) for key in ("one", "new", "admin", internal.value, "wrong")] == ["ada", "ada", None, None, ""]
    assert len({owner("two"), owner("three"), "ada", ""}) == 4
    assert owner("two") == owner("two")
    assert "two" not in owner("two")


def test_every_route_has_a_class_and_only_probes_are_open() -> None:
    """Who adds a route that everybody or only an admin may use, says so here too."""
    state, client = ServerState("x"), None
    config = ServerConfig(model_path="x", enable_tokenizer_info_endpoint=True)
    app = create_app(Context(config, client, None, Metrics("x", state), state))  # type: ignore[arg-type]
    seen = set()
    for route in app.routes:
        path, access = getattr(route, "path", str(route)), getattr(getattr(route, "endpoint", None), "access", None)
        assert isinstance(access, Access), f"{path} has no class: it does not come from the table of routes"
        assert (access is Access.OPEN) == (path in OPEN), f"{path} is {access}"
        assert (access is Access.ADMIN) == (path in ADMINS), f"{path} is {access}"
        seen.add(path)
    assert seen == {route.path for route in ROUTES}
