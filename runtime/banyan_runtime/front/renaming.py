"""Errors of a request that was made of another one: they name the fields that the client wrote.

A response and a message of Anthropic's are checked as the chat completion that they ask for. What is wrong with it is found under
its names, here or by the engine, and told under theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import ChatPlan, GenerateRequest

Renaming = tuple[str, str]
"""A field of the chat completion, and the client's field that it was made of."""
_PATH: Final = re.compile(r"(?<![\w.\]])[A-Za-z_]\w*(?:\[\d+\]|\.[A-Za-z_]\w*)*")
_STEP: Final = re.compile(r"[.\[]")
_NAMED: Final = ("'", "`", "the ", "for ")  # what stands before a word that is a field's name and no word of English


def renamed(error: ApiError, names: Sequence[Renaming]) -> ApiError:
    """The error in the words of who asked. Of the names that fit, the longest holds, with what stands behind it. In the message only
    those fields are renamed that the error is about: the other words are a client's own, a library's, or English."""
    known = dict(names)
    about = {error.param, *error.beside}

    def told(found: re.Match[str]) -> str:
        path, before = found.group(), error.message[: found.start()]
        if path not in about or (path.isalpha() and before and not before.endswith(_NAMED)):
            return path
        return _renamed(path, known)

    param = None if error.param is None else _renamed(error.param, known)
    beside = [_renamed(path, known) for path in error.beside]
    message = _PATH.sub(told, error.message)
    return ApiError(error.status, message, code=error.code, param=param, headers=error.headers, beside=beside)


def renamed_plan(plan: ChatPlan, names: Sequence[Renaming]) -> ChatPlan:
    """The plan, which names the fields of who asked: those without effect, and in its requests what the engine may find wrong with them."""
    known = dict(names)
    return msgspec.structs.replace(
        plan,
        envelope=msgspec.structs.replace(plan.envelope, ignored=tuple(_renamed(path, known) for path in plan.envelope.ignored)),
        requests=tuple(_renamed_request(request, known) for request in plan.requests),
        unshown=tuple(_renamed(path, known) for path in plan.unshown),
    )


def _renamed_request(request: GenerateRequest, names: Mapping[str, str]) -> GenerateRequest:
    constraint = request.constraint
    if constraint is not None:
        constraint = msgspec.structs.replace(constraint, param=_renamed(constraint.param, names))
    return msgspec.structs.replace(request, param=_renamed(request.param, names), constraint=constraint)


def _renamed(path: str, names: Mapping[str, str]) -> str:
    if path in names:
        return names[path]
    for step in reversed([found.start() for found in _STEP.finditer(path)]):
        if path[:step] in names:
            return names[path[:step]] + path[step:]
    return path
