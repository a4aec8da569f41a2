"""Server processes of the tiny model."""

from tests.support.server.process import server, slowed, start_server  # noqa: F401
