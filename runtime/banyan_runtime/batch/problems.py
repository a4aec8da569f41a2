"""Reads what a server says in an error answer: OpenAI's form, or flat as older servers write it."""

from __future__ import annotations

import msgspec


class _Error(msgspec.Struct):
    code: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    param: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Problem(_Error):
    error: _Error | None = None


class _Asked(msgspec.Struct):
    model: str = ""


_problem = msgspec.json.Decoder(_Problem)
_asked = msgspec.json.Decoder(_Asked)
_string = msgspec.json.Decoder(str)


def error_code(body: bytes) -> str:
    """`error.code` of an answer, if it has one."""
    return _text((_error(body)).code)


def missing_model(status: int, answer: bytes, request: bytes) -> str | None:
    """The model that a request asked for, if the answer says that it is not there."""
    error = _error(answer)
    about_model = _text(error.param) == "model" or "model" in _text(error.message).lower()
    if status != 404 or not (_text(error.code) == "model_not_found" or (_text(error.type) == "NotFoundError" and about_model)):
        return None
    return asked_model(request)


def asked_model(request: bytes) -> str:
    """The model that a request names, '' if none."""
    try:
        return _asked.decode(request).model
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _error(body: bytes) -> _Error:
    try:
        problem = _problem.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return _Error()
    return problem.error or problem


def _text(raw: msgspec.Raw | msgspec.UnsetType) -> str:
    try:
        return _string.decode(raw) if isinstance(raw, msgspec.Raw) else ""
    except msgspec.MsgspecError:
        return ""
