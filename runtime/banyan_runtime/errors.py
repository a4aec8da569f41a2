"""Errors that a user can cause, raised where they are found and turned into HTTP, an exit code or a condition once, at
the border. Everything else is a bug: it is logged with its trace, and that one request fails."""

from __future__ import annotations

import re


class UserError(Exception):
    """Something the user can put right.

    `message`: what is wrong, and what to do. `code`: a stable word for programs, by default the name of the class, as
    `cache_not_writable`. `field`: the flag or variable that is to blame. `value`: what it was given, never a secret. `hint`: what to
    do on this command line; the user of a manifest does not read it.
    """

    exit_code = 1
    code = "user_error"

    def __init_subclass__(cls) -> None:
        if "code" not in cls.__dict__:
            cls.code = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, *, code: str = "", field: str = "", value: object = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.field, self.value, self.hint = message, field, str(value), hint
        if code:
            self.code = code

    def __str__(self) -> str:
        blamed = f"{self.field}={self.value}" if self.field and self.value else self.field or self.value
        return (f"{blamed}: " if blamed else "") + self.message + (f"; {self.hint}" if self.hint else "")


class ConfigError(UserError):
    """A flag or a manifest field is wrong (exit code 64, as in sysexits)."""

    exit_code = 64
    code = "invalid_flag"


class ModelError(UserError):
    """The model's files are missing, broken, or not supported (exit code 65)."""

    exit_code = 65
    code = "invalid_model"


class InputError(UserError):
    """The batch input cannot be used at all (exit code 65); a single bad line is no error of the run."""

    exit_code = 65


class DeviceFull(UserError):
    """The device has no memory for what it is to compute (exit code 70)."""

    exit_code = 70
    code = "out_of_memory"


class AccessError(UserError):
    """Credentials or permissions are wrong (exit code 77)."""

    exit_code = 77
    code = "access_denied"


class CacheNotWritable(AccessError):
    """Models are to be fetched to a folder that this user may not write to."""


class UnavailableError(UserError):
    """Something the run depends on is down; trying again later may help (exit code 75)."""

    exit_code = 75
    code = "unavailable"


class SourceUnreachable(UnavailableError):
    """Nothing answers where a model is to be fetched from: a matter of the network, or of the address."""
