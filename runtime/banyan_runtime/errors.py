"""Errors that a user can cause, raised where they are found and turned into HTTP, an exit code or a condition once, at
the border. Everything else is a bug: it is logged with its trace, and that one request fails."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right. The message names the field or file, the value, and what to do."""

    exit_code = 1


class ConfigError(UserError):
    """A flag or a manifest field is wrong (exit code 64, as in sysexits)."""

    exit_code = 64


class ModelError(UserError):
    """The model's files are missing, broken, or not supported (exit code 65)."""

    exit_code = 65


class InputError(UserError):
    """The batch input cannot be used at all (exit code 65); a single bad line is no error of the run."""

    exit_code = 65


class DeviceFull(UserError):
    """The device has no memory for what it is to compute (exit code 70)."""

    exit_code = 70


class AccessError(UserError):
    """Credentials or permissions are wrong (exit code 77)."""

    exit_code = 77


class CacheNotWritable(AccessError):
    """Models are to be fetched to a folder that this user may not write to."""


class UnavailableError(UserError):
    """Something the run depends on is down; trying again later may help (exit code 75)."""

    exit_code = 75


class SourceUnreachable(UnavailableError):
    """Nothing answers where a model is to be fetched from: a matter of the network, or of the address."""
