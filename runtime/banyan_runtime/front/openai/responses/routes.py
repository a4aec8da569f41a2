"""/v1/responses: create, stream, retrieve, cancel, delete; its input items, and how many tokens an input has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, answer, fail, given, ignored
from banyan_runtime.front.context import Context
from banyan_runtime.front.deadline import Deadline
from banyan_runtime.front.errors import ApiError, invalid, unsupported
from banyan_runtime.front.event_stream import EventStream
from banyan_runtime.front.openai.responses.assembly import ENDED
from banyan_runtime.front.openai.responses.references import MAX_BYTES, Before, Kept, Named, named
from banyan_runtime.front.openai.responses.run import Run
from banyan_runtime.front.openai.responses.store import Record
from banyan_runtime.front.parsing import MAX_IGNORED, NAME
from banyan_runtime.front.plan import AnswerPlan, ResponsePlan
from banyan_runtime.front.transport import while_connected
from banyan_runtime.json_text import uncut

CANCEL_S: Final = 5.0  # that a cancelled response may take to end
READ_HERE: Final = 256 << 10  # bytes of a request that take no millisecond to read
LISTED: Final = 20  # input items, where the client does not say how many
LISTED_AT_MOST: Final = 100
_JSON: Final = "application/json"
_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False}
_READ: Final = ("stream", "starting_after")  # of a retrieval's query
_NOTHING: Final = ("", "false")  # asks for nothing: include_obfuscation=false
_NAMES_KEPT: Final = (b"previous_response_id", b"item_reference", b'"id"')  # a body with none of these names nothing that is kept


async def create_response(context: Context, http: Request) -> Response:
    return await answer(context, http, "responses", ResponsePlan, _start, lambda body: _with_history(context, body))


async def input_tokens(context: Context, http: Request) -> Response:
    return await answer(context, http, "input_tokens", AnswerPlan, given, lambda body: _with_history(context, body))


async def get_response(context: Context, http: Request) -> Response:
    """The response as it is now. `?stream=true&starting_after=N`: its events, where it runs or ran in the background here."""
    response_id, headers = http.path_params["id"], _without_effect(http)
    if not _switch(http, "stream"):
        if "starting_after" in http.query_params:
            raise invalid("starting_after", "starting_after says behind which event to begin: send it with stream=true, or leave it out.")
        return await _told(context, response_id, headers)
    after = _number(http, "starting_after", -1, -1, 1 << 31)
    run = context.responses_live.get(response_id)
    log = context.responses.logs.find(response_id) if run is None else run.log
    if log is None:
        await _record(context, response_id)  # or it is a 404
    events = None if log is None else log.after(after)
    if events is None:
        raise invalid("stream", "The events of this response are not kept: only those of one that runs or ran in the background here are.")
    if run is not None:
        return await _Stream(context, run, after, headers, owner=False).response(http)
    return Response(uncut(events), headers={"Cache-Control": "no-cache", **headers}, media_type="text/event-stream")


async def cancel_response(context: Context, http: Request) -> Response:
    response_id = http.path_params["id"]
    run = context.responses_live.get(response_id)
    if run is not None:
        run.abort()
        await while_connected(http, asyncio.wait({run.over}, timeout=CANCEL_S))
        return await _told(context, response_id)
    record = await _record(context, response_id)
    if not record.background:
        raise ApiError(400, "Cannot cancel a synchronous response.")
    return Response(_ended(record), media_type=_JSON)


async def delete_response(context: Context, http: Request) -> Response:
    response_id = http.path_params["id"]
    if response_id not in context.responses_live:
        await _record(context, response_id)
    context.responses.remove(response_id)
    run = context.responses_live.pop(response_id, None)
    if run is not None:
        run.discard()
    return _json({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(context: Context, http: Request) -> Response:
    record = await _record(context, http.path_params["id"])
    items: list[dict[str, Any]] = msgspec.json.decode(record.items)
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "Invalid value for 'order': supported values are asc, desc.")
    items = items if order == "asc" else items[::-1]
    after = http.query_params.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after", f"No item has the id '{after[:100]}'.")
        items = items[places[0] + 1 :]
    limit = _number(http, "limit", LISTED, 1, LISTED_AT_MOST)
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit})


# --- create ---


async def _with_history(context: Context, body: bytearray) -> bytes:
    """The request behind what the server knows of it. Raises ApiError."""
    history, kept = msgspec.Raw(b"[]"), dict[str, Kept]()
    if any(name in body for name in _NAMES_KEPT):
        asked = await _named(context, body)
        if asked.previous is not None:
            _refuse_running(context, asked.previous, "previous_response_id")
            history = (await _record(context, asked.previous, "previous_response_id")).messages
        size = 0
        for response_id in asked.responses:
            _refuse_elsewhere(context, response_id, "input")
            _refuse_running(context, response_id, "input")
            record = await context.responses.load(response_id)
            if record is None:
                continue  # whose items are missed is told where they stand
            kept[response_id] = Kept(msgspec.Raw(_ended(record)), record.items)
            size += record.size
            if size > MAX_BYTES:
                message = f"the responses that are referred to have more than {MAX_BYTES} bytes. Send the items themselves."
                raise invalid("input", message, "string_above_max_length")
    return msgspec.json.encode(Before(id=context.responses.new_id(), history=history, kept=kept)) + b"\n" + body


def _refuse_running(context: Context, response_id: str, param: str) -> None:
    if response_id in context.responses_live:
        raise invalid(param, f"Response '{response_id}' has not ended yet. Wait for its end before you go on from it.")


async def _named(context: Context, body: bytearray) -> Named:
    """What a request names of what is kept. Raises ApiError."""
    if len(body) > READ_HERE:
        assert context.preparer is not None, "admitted before it was ready"
        plan = await context.preparer.plan("previous", body, "")
        assert isinstance(plan, AnswerPlan)
        return msgspec.json.decode(plan.body, type=Named)
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Named()  # what is wrong with it is found out later
    return named(asked) if isinstance(asked, dict) else Named()


def _start(context: Context, arrival: Arrival, plan: ResponsePlan) -> Answer:
    if plan.background and not context.responses.keeps:
        raise unsupported("background", "this server keeps no responses (--response-store-seconds=0)")
    run = Run(context, arrival, plan)
    if plan.background:
        context.responses_live[run.id] = run
        run.save()
        _keep_up(context, run, arrival.deadline)
    if plan.envelope.stream:
        return _Stream(context, run, -1, run.headers, owner=not plan.background)
    return _InBackground(run) if plan.background else _Whole(run)


def _keep_up(context: Context, run: Run, deadline: Deadline) -> None:
    """At its end a response in the background is found in the store alone. Its deadline is that of the request which began it."""
    in_time = deadline.call(run.expire)

    def ended(_: object) -> None:
        in_time()
        if context.responses_live.pop(run.id, None) is not None and run.log is not None:
            context.responses.logs.keep(run.id, run.log)

    run.over.add_done_callback(ended)


class _Whole:
    """A response in one piece; a client that goes away ends it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def expire(self) -> None:
        self._run.expire()

    async def response(self, http: Request) -> Response:
        run = self._run
        try:
            await while_connected(http, asyncio.wait({run.over}))
        finally:
            run.close()
        if run.error is not None:
            raise run.error
        return Response(run.told(), headers=run.headers, media_type=_JSON)


class _InBackground:
    """A response that goes on by itself."""

    def __init__(self, run: Run) -> None:
        self._told = run.told()
        self._headers = run.headers

    def expire(self) -> None:
        """It has been answered."""

    async def response(self, http: Request) -> Response:
        return Response(self._told, headers=self._headers, media_type=_JSON)


class _Stream:
    """A response in events. `owner`: the client's going ends it."""

    def __init__(self, context: Context, run: Run, after: int, headers: Mapping[str, str], *, owner: bool) -> None:
        self._context = context
        self._run = run
        self._owner = owner
        self._stream = EventStream(run.opening if owner else b"", headers)
        self._stream.on_close = self._close
        run.listen(self._take, None if owner else after)

    def expire(self) -> None:
        if self._owner:
            self._run.expire()

    async def response(self, http: Request) -> Response:
        return await self._stream.begin(http, patient=self._owner and self._run.may_be_refused)

    def _take(self, events: bytes, last: bool) -> None:
        if not last:
            self._stream.push(events)
        elif self._run.error is not None and self._owner:
            fail(self._context, self._stream, self._run.error, events)  # a refusal has a status, as long as nothing was sent
        else:
            self._stream.end(events)

    def _close(self) -> None:
        self._run.leave(self._take)
        if self._owner:
            self._run.close()


# --- what is kept ---


async def _told(context: Context, response_id: str, headers: Mapping[str, str] | None = None) -> Response:
    run = context.responses_live.get(response_id)
    told = _ended(await _record(context, response_id)) if run is None else run.told()
    return Response(told, headers=headers, media_type=_JSON)


class _Status(msgspec.Struct):
    status: str


def _ended(record: Record) -> bytes:
    """A response that does not run any more. It has failed where an earlier life of the server did not end it."""
    told = bytes(record.response)
    if msgspec.json.decode(told, type=_Status).status in ENDED:
        return told
    response = msgspec.json.decode(told)
    response["status"] = "failed"
    response["error"] = {"code": "server_error", "message": "The server that made this response has ended."}
    return msgspec.json.encode(response)


async def _record(context: Context, response_id: str, param: str = "response_id") -> Record:
    """Raises ApiError for a response that this server does not have."""
    _refuse_elsewhere(context, response_id, param)
    record = await context.responses.load(response_id)
    if record is None:
        raise ApiError(404, f"Response with id '{response_id[:100]}' not found.", param=param)
    return record


def _refuse_elsewhere(context: Context, response_id: str, param: str) -> None:
    if context.responses.is_elsewhere(response_id):
        message = (
            f"Response '{response_id}' is not on this server: another one made it, or this one before it was restarted. "
            "Send a client's requests to one server, and have it keep responses in a folder (--response-store-path)."
        )
        raise ApiError(404, message, param=param, code="response_not_on_this_server")


def _number(http: Request, name: str, default: int, low: int, high: int) -> int:
    given = http.query_params.get(name)
    if given is None:
        return default
    try:
        number = int(given)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise invalid(name, f"{name} must be an integer in [{low}, {high}], got '{given[:50]}'.")
    return number


def _switch(http: Request, name: str) -> bool:
    """As clients write it: JavaScript's true, Python's True, a shell's 1. Raises ApiError."""
    given = http.query_params.get(name)
    if given is None:
        return False
    if (value := _SWITCH.get(given.lower())) is None:
        raise invalid(name, f"Invalid value for '{name}': '{given[:50]}'. Supported values are: true, false, 1, 0.")
    return value


def _without_effect(http: Request) -> dict[str, str]:
    """The header that names what a retrieval asks for and does not get: `include[]`, as lists are written, and what nobody knows."""
    names = (name.removesuffix("[]") for name, value in http.query_params.items() if name not in _READ and value not in _NOTHING)
    return ignored(list(dict.fromkeys(name for name in names if NAME.fullmatch(name)))[:MAX_IGNORED])


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type=_JSON)
