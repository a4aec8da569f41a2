"""Server processes of the tiny model."""

from tests.support.server.process import server, shared_server, slowed, start_server, storage  # noqa: F401
