"""Why a batch run can end without results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from banyan_runtime.errors import AccessError, ConfigError, InputError, UnavailableError, UserError
from banyan_runtime.storage.store import Damaged, Denied, NotFound, Precondition, Stopped, StoreError, Throttled, Unreachable


class InvalidSpec(ConfigError):
    """A flag or URI is wrong."""

    code = ConfigError.code


class InputNotFound(InputError):
    """The input does not exist."""


class InputInvalid(InputError):
    """The input holds no request, or a bad line under --on-invalid-line fail."""


class InputChanged(InputError):
    """The input was replaced while the run read it."""


class OutputExists(InputError):
    """There are results of another run where this run's should go."""


class RunEnded(InputError):
    """The run that is to be gone on with was ended before all of it was done, and has published that."""


class ResultsDamaged(InputError):
    """What the run keeps in storage, its finished lines among it, cannot be read any more."""


class AllLinesFailed(InputError):
    """Not one line succeeded. What the server said of each is published."""


class ConditionalWritesUnsupported(ConfigError):
    """The storage ignores the conditions of writes, so two writers could not be told apart."""


class TooManyErrors(UserError):
    """More lines failed than --max-error-percent allows."""

    exit_code = 79


class Unfinished(UserError):
    """There is work left that this process was not asked to do."""

    exit_code = 75


class OutputNotFound(ConfigError):
    """The bucket (or folder) for the results does not exist."""


class AccessDenied(AccessError):
    """The storage or the server refuses the credentials."""

    code = "storage_denied"


class ModelNotFound(ConfigError):
    """The server does not serve the model, or not this endpoint."""


class StorageUnavailable(UnavailableError):
    """The storage does not answer."""


class ServerNotReady(UnavailableError):
    """The server did not become ready in time."""


class ServerFailed(UserError):
    """The server that the run started itself ended. If that server said whose fault it was (64 to 78), so does the run."""

    exit_code = 69

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        if 64 <= status <= 78:
            self.exit_code = status


class ServerGone(UserError):
    """The server stopped answering and did not come back in time."""

    exit_code = 69


class Interrupted(UserError):
    """SIGTERM or Ctrl-C with lines left: nothing was published."""

    exit_code = 143


def from_store(error: StoreError, *, reading: bool) -> UserError:
    """What a store's error means for a run: `reading` the input, or writing results."""
    kind: type[UserError] = InvalidSpec
    if isinstance(error, Stopped):
        kind = Interrupted
    elif isinstance(error, Denied):
        kind = AccessDenied
    elif isinstance(error, Throttled | Unreachable | Precondition):  # of the latter nobody knows who writes there; another try may win
        kind = StorageUnavailable
    elif isinstance(error, Damaged):
        kind = ResultsDamaged
    elif isinstance(error, NotFound):
        kind = InputNotFound if reading else OutputNotFound
    return kind(error.message, value=error.key)


@contextlib.contextmanager
def store_errors(*, reading: bool) -> Iterator[None]:
    """Raise a store's errors as what they mean for a run."""
    try:
        yield
    except StoreError as error:
        raise from_store(error, reading=reading) from error
