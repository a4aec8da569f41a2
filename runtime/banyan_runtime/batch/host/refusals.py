"""What a client is refused, as the front tells it: a status, a message, OpenAI's code and the parameter that is wrong."""

from __future__ import annotations

from typing import Final

from banyan_runtime.storage.home import Gone
from banyan_runtime.storage.store import Full, StoreError

AGAIN_S: Final = 5


class Refusal(Exception):
    """A request that is answered with an error; the front makes OpenAI's error object of it."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def missing(param: str) -> Refusal:
    return Refusal(400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def invalid(param: str, message: str) -> Refusal:
    return Refusal(400, message, code="invalid_value", param=param)


def no_such_file(identity: str) -> Refusal:
    return Refusal(404, f"No such File object: {identity[:200]}", param="id")


def no_such_batch(identity: str) -> Refusal:
    return Refusal(404, f"No batch found with id '{identity[:200]}'.", param="id")


class Unreadable(Refusal):
    """A document is damaged, or of a later release."""

    def __init__(self, identity: str) -> None:
        super().__init__(500, f"The server cannot read what it has stored about '{identity}'; its log says why.", code="internal_error")


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"The file is larger than {limit} bytes, the most that this server takes.", code="file_too_large", param="file")


def storage_full() -> Refusal:
    # 413, not 507: clients send again what gets a status of 500 and more
    return Refusal(413, "The server's storage is full: delete files, or try again later.", code="storage_full", param="file")


def storage_away(error: StoreError) -> Refusal:
    """What an error of the storage means for a request. Its text stays in the log: it may name paths and buckets."""
    if is_full(error):
        return storage_full()
    if isinstance(error, Gone):
        return Refusal(503, "The folder of the server's files and batches has gone; they are there again once it is.", code="unavailable")
    return Refusal(503, "The server's storage does not answer just now.", code="unavailable")


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room left, or the user no quota."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Full):
        cause = cause.__cause__
    return cause is not None
