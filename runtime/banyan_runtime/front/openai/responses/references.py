"""Input items that stand for items of earlier responses: `{"type": "item_reference", "id": …}`, whose type may be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from banyan_runtime.front.errors import ApiError, invalid
from banyan_runtime.front.openai.responses.ids import response_of, was_not_kept
from banyan_runtime.front.parsing import string_of

MAX_RESPONSES: Final = 256  # that one request may refer to
MAX_BYTES: Final = 32 << 20  # of them all
_KIND: Final = "item_reference"


class Kept(msgspec.Struct, frozen=True):
    """A response that a request refers to: its output, and its input items."""

    response: msgspec.Raw
    items: msgspec.Raw


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """What the server knows of a response that is asked for: the id it will have, the messages of the conversation so far, and the
    responses whose items it refers to, by their ids."""

    id: str
    history: msgspec.Raw = msgspec.Raw(b"[]")
    kept: Mapping[str, Kept] = {}


class Named(msgspec.Struct, frozen=True):
    """What a request names of what is kept: the response that it goes on from, and those whose items it refers to."""

    previous: str | None = None
    responses: tuple[str, ...] = ()


def named(body: Mapping[str, Any]) -> Named:
    """What else is wrong with the request is found out later. Raises ApiError."""
    previous, items = body.get("previous_response_id"), body.get("input")
    responses: dict[str, None] = {}
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and _refers(item) and isinstance(own := item.get("id"), str):
            response = response_of(own)
            if response is not None:
                responses[response] = None
    if len(responses) > MAX_RESPONSES:
        message = f"the items of at most {MAX_RESPONSES} responses can be referred to, got {len(responses)}. Send the items themselves."
        raise invalid("input", message, "array_above_max_length")
    return Named(previous if isinstance(previous, str) else None, tuple(responses))


def resolved(items: str | Sequence[Mapping[str, Any]], kept: Mapping[str, Kept]) -> str | Sequence[Mapping[str, Any]]:
    """The items, with those that were referred to in place of the references. Raises ApiError for one that is not kept."""
    if isinstance(items, str):
        return items
    known = {item["id"]: item for response_id, one in kept.items() for item in _items(one) if response_of(item["id"]) == response_id}
    return [_meant(item, f"input[{index}]", known) if _refers(item) else item for index, item in enumerate(items)]


def _refers(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == _KIND or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def _items(kept: Kept) -> list[dict[str, Any]]:
    """Of these, some have ids of other responses: a client may have sent them again, and changed them."""
    return [*msgspec.json.decode(kept.items), *msgspec.json.decode(kept.response)["output"]]


def _meant(reference: Mapping[str, Any], where: str, known: Mapping[str, Any]) -> Any:
    own = string_of(reference, "id", where)
    if own in known:
        return known[own]
    hint = ""
    if was_not_kept(own):
        hint = " Items are not kept when `store` is false: set it to true, or send the item itself."
    raise ApiError(404, f"Item with id '{own[:100]}' not found.{hint}", param="input")
