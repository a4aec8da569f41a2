"""What a user of local mode can put right: one clear line and an exit code."""

from __future__ import annotations


class LocalError(Exception):
    """Ends the command; exit code 64 (usage or manifest), as in sysexits."""

    exit_code = 64


class BusyError(LocalError):
    """Another operator works in the same state folder (exit code 75: try again when it has ended)."""

    exit_code = 75


class NotRunningError(LocalError):
    """There is no operator to ask (exit code 69)."""

    exit_code = 69


class StateError(LocalError):
    """The state folder cannot be made, read or written (exit code 73)."""

    exit_code = 73
