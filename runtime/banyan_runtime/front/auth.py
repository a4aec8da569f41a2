"""Who may ask for what. Closed by default: each route names its class, and what has no route is a matter for those with a key."""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError, bad_key, forbidden, no_key
from banyan_runtime.front.keys import InternalKey, Keys, ToldKeys, fingerprint, presented_key

INTERNAL: Final = "banyan.internal"  # in the scope, True: a process of this server asks
KEY_NAME: Final = "banyan.key_name"  # in the scope: whose key it is, "" for a valid one without a name; None: no valid key was needed
OWNER: Final = "banyan.owner"  # in the scope: who asks, by the name of the key or what else tells it from others; "" for whoever has
# none, and None for an admin and for this server itself, who are nobody's equals
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip", "via")
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})  # not all of 127/8: meshes put others' requests there (127.0.0.6)


class Access(enum.Enum):
    """The class of a route."""

    OPEN = "open"  # probes and metrics: everybody
    USER = "user"  # who has a key, where keys are configured; else everybody
    INTERNAL = "internal"  # as USER, and this server's own processes
    ADMIN = "admin"  # who has an admin key; where none is configured, users on this machine


class ToldGate(msgspec.Struct, frozen=True):
    """A `Gate` on its way to another process of this server."""

    users: ToldKeys | None
    admins: ToldKeys | None
    internal: str

    def __repr__(self) -> str:
        return "ToldGate(...)"  # it may get into a log


class Gate:
    """Decides from a request's key and address."""

    def __init__(self, users: Keys | None, admins: Keys | None, internal: InternalKey) -> None:
        self._users = users
        self._admins = admins
        self._internal = internal

    @staticmethod
    def of(config: ServerConfig, internal: InternalKey) -> Gate:
        """Raises ConfigError when the keys cannot be read."""
        return Gate(Keys.of_users(config), Keys.of_admins(config), internal)

    @staticmethod
    def of_told(told: ToldGate) -> Gate:
        """As another process of this server has it."""
        users, admins = (None if keys is None else Keys.of_told(keys) for keys in (told.users, told.admins))
        return Gate(users, admins, InternalKey(told.internal))

    def told(self) -> ToldGate:
        """For `of_told`. It holds the internal key."""
        users, admins = (None if keys is None else keys.told() for keys in (self._users, self._admins))
        return ToldGate(users, admins, self.internal_key)

    @property
    def internal_key(self) -> str:
        """What this server's own processes ask with."""
        return self._internal.value

    @property
    def asks_users(self) -> bool:
        """Whether who uses the server needs a key."""
        return self._users is not None

    @property
    def asks_admins(self) -> bool:
        """Whether who operates the server needs a key."""
        return self._admins is not None

    @property
    def names(self) -> set[str]:
        """Of the keys that have one."""
        return {name for keys in (self._users, self._admins) if keys is not None for name in keys.names}

    def check(self, scope: Scope, access: Access) -> ApiError | None:
        """The refusal, or None; then the scope tells who asks."""
        scope[KEY_NAME], scope[OWNER] = None, ""
        if access is Access.OPEN:
            return None
        key = presented_key(Headers(scope=scope))
        admin = None if key is None or self._admins is None else self._admins.owner(key)
        user = None if key is None or self._users is None else self._users.owner(key)
        scope[KEY_NAME] = admin if user is None else user
        if admin is not None:
            scope[OWNER] = None
            return None
        if user is not None:
            assert key is not None
            scope[OWNER] = user or fingerprint(key)
        if access is Access.INTERNAL and key is not None and self._internal.valid(key):
            scope[INTERNAL], scope[OWNER] = True, None
            return None
        refused = no_key() if key is None else bad_key()
        if access is Access.ADMIN and self._admins is not None:
            return refused if user is None else forbidden("this path takes an admin key")
        if self._users is not None and user is None:
            return refused
        if access is Access.ADMIN and not _on_this_machine(scope):
            return forbidden("without --admin-api-keys-file this path answers on the loopback address only")
        return None


def _on_this_machine(scope: Scope) -> bool:
    """Whether the client is. A proxy on this machine that passes others' requests on says so."""
    client: Any = scope.get("client")
    headers = Headers(scope=scope)
    return client is not None and client[0] in _LOOPBACK and not any(name in headers for name in _FORWARDED)
