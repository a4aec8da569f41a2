"""One line of the input file: cut out of the byte stream, checked, and made into a request.

Nothing here reads or sends. The split holds at most one line of `MAX_LINE_BYTES`; a longer one is counted, not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from banyan_runtime import halves, nesting
from banyan_runtime.json_text import no_number

MAX_LINE_BYTES: Final = 16 << 20
PREFIX_BYTES: Final = 256  # of a prompt, by which lines are put beside each other
RESPONSES: Final = "/v1/responses"  # the one endpoint that knows `background`
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", RESPONSES)
_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n"
_SHOWN: Final = 60  # characters of a wrong value that a message repeats


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank. `number` is 1-based and counts blank lines too, as editors do."""

    number: int
    data: bytes | None  # without line end; None: longer than MAX_LINE_BYTES
    start: int = 0  # offset of its first byte in the object


class LineSplitter:
    """Cuts blocks of bytes into lines; a BOM, `\\r\\n`, blank lines and a missing last newline are all fine."""

    def __init__(self, *, number: int = 1, start: int = 0, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """`number`, `start`: number and offset of the first line that is fed."""
        self._max = max_line_bytes
        self._number = number - 1
        self._start = start  # of the line that is being collected
        self._length = 0  # of it, so far
        self._rest = bytearray()
        self._too_long = False

    def feed(self, block: bytes) -> Iterator[RawLine]:
        """The lines that end in `block`."""
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            self._keep(block[start:end])
            start = end + 1
            yield from self._line()
        self._keep(block[start:])

    def finish(self) -> Iterator[RawLine]:
        """The last line, if the file does not end in a newline."""
        yield from self._line()

    def _keep(self, piece: bytes) -> None:
        self._length += len(piece)
        if len(self._rest) + len(piece) > self._max:
            self._too_long = True
            self._rest.clear()
        if not self._too_long:
            self._rest += piece

    def _line(self) -> Iterator[RawLine]:
        self._number += 1
        data, too_long, start = bytes(self._rest), self._too_long, self._start
        self._rest.clear()
        self._too_long = False
        self._start += self._length + 1
        self._length = 0
        if too_long:
            yield RawLine(self._number, None, start)
            return
        if self._number == 1:
            data = data.removeprefix(_BOM)
        if data := data.strip(_BLANK):
            yield RawLine(self._number, data, start)


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be sent: `body` is the JSON of the HTTP request, byte for byte as in the file unless something is put in."""

    number: int
    custom_id: str
    body: bytes
    prefix: bytes = b""  # how its prompt begins, tools first, as templates print them; lines with a common prompt have a common one
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Invalid:
    """A line that cannot be sent, with OpenAI's code for why."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


class _Envelope(msgspec.Struct):
    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Body(msgspec.Struct):
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    background: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    priority: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_envelope = msgspec.json.Decoder(_Envelope)
_body = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder(msgspec.Raw)  # whether it is JSON at all
_string = msgspec.json.Decoder(str)
_encoder = msgspec.json.Encoder()
_HALF: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LineParser:
    """Makes requests of lines. `endpoint` is one of ENDPOINTS; `model` replaces the model that a line names; `priority` is put into
    bodies that name none.
    """

    endpoint: str
    model: str | None = None
    priority: int | None = None
    force_priority: bool = False  # also into bodies that name one

    def parse(self, raw: RawLine) -> Request | Invalid:
        """The request of one line, or why there is none."""
        if raw.data is None:
            return Invalid(raw.number, None, "invalid_json_line", f"This line is longer than {MAX_LINE_BYTES >> 20} MiB.")
        try:
            raw.data.decode()  # the parser skips over strings unchecked
            envelope = _envelope.decode(raw.data)
        except RecursionError:
            return self._too_deep(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if isinstance(error, msgspec.ValidationError) and (kind := _kind(raw.data)) is not None:
                return Invalid(raw.number, None, "invalid_json_line", f"This line must be a JSON object, got {kind}.")
            return self._unreadable(raw.number, raw.data, error)
        if nesting.too_deep(raw.data):
            return self._too_deep(raw)
        custom_id = _text(envelope.custom_id)
        head = self._head(envelope, custom_id)
        if isinstance(head, tuple):
            return Invalid(raw.number, custom_id, *head)
        assert custom_id is not None
        assert isinstance(envelope.body, msgspec.Raw)
        return Request(raw.number, custom_id, self._amended(envelope.body, head), _prefix(head), self.model or _text(head.model))

    def _unreadable(self, number: int, data: bytes, error: Exception) -> Invalid:
        """Who wrote half a character somewhere is told which request it was."""
        message, custom_id = "This line is not parseable as valid JSON.", None
        if (words := no_number(data, error)) is not None:
            message = f"This line is not parseable as valid JSON: {words}."
        if (loose := halves.read(data)) is not None:
            message = f"This line is not parseable as valid JSON: {halves.WORDS}."
            if isinstance(loose, dict) and isinstance(told := loose.get("custom_id"), str) and not _HALF.search(told):
                custom_id = told
        return Invalid(number, custom_id, "invalid_json_line", message)

    def _too_deep(self, raw: RawLine) -> Invalid:
        return Invalid(raw.number, None, "invalid_json_line", f"This line is nested more than {nesting.MOST} deep.")

    def _head(self, envelope: _Envelope, custom_id: str | None) -> _Body | tuple[str, str, str | None]:
        """What matters of the body, or (code, message, param) of the first thing that is wrong with the line."""
        for name in ("custom_id", "method", "url", "body"):
            if getattr(envelope, name) is msgspec.UNSET:
                return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
        if not custom_id:
            return "invalid_custom_id", f"custom_id must be a string that is not empty, got {_shown(envelope.custom_id)}.", "custom_id"
        if _text(envelope.method) != "POST":
            return "invalid_method", f"method must be 'POST', got {_shown(envelope.method)}.", "method"
        url = _text(envelope.url)
        if url is None or not same_endpoint(url, self.endpoint):
            return "url_mismatch", f"url must be the batch's endpoint, {self.endpoint}, got {_shown(envelope.url)}.", "url"
        return self._body(envelope.body)

    def _body(self, body: msgspec.Raw | msgspec.UnsetType) -> _Body | tuple[str, str, str | None]:
        try:
            head = _body.decode(body if isinstance(body, msgspec.Raw) else b"")
        except (msgspec.MsgspecError, RecursionError):
            return "invalid_body", f"body must be a JSON object, got {_shown(body)}.", "body"
        if _asked(head.stream):
            return "stream_not_supported", "stream must be false or absent: a batch has no one to stream to.", "body.stream"
        if self.endpoint == RESPONSES and _asked(head.background):
            why = "a batch waits for each answer itself, and would write down one that has only begun."
            return "background_not_supported", f"background must be false or absent: {why}", "body.background"
        return head

    def _amended(self, body: msgspec.Raw, head: _Body) -> bytes:
        put: dict[str, object] = {} if self.model is None else {"model": self.model}
        named = isinstance(head.priority, msgspec.Raw) and bytes(head.priority) != b"null"
        if self.priority is not None and (self.force_priority or not named):
            put["priority"] = self.priority
        if not put:
            return bytes(body)
        fields = _fields.decode(body)
        return _encoder.encode(fields | {name: msgspec.Raw(_encoder.encode(value)) for name, value in put.items()})


def _prefix(head: _Body) -> bytes:
    prompt = next((part for part in (head.messages, head.prompt, head.input) if isinstance(part, msgspec.Raw)), b"")
    tools = bytes(head.tools)[:PREFIX_BYTES] if isinstance(head.tools, msgspec.Raw) else b""
    return (tools + bytes(prompt)[:PREFIX_BYTES])[:PREFIX_BYTES]


def same_endpoint(url: str, endpoint: str) -> bool:
    """Whether a line's url means `endpoint`: '/chat/completions', '/v1/chat/completions' and full URLs are all written."""
    try:
        path = urlsplit(url).path
    except ValueError:
        return False
    return path.rstrip("/").removeprefix("/v1") == endpoint.removeprefix("/v1")


def _text(value: msgspec.Raw | msgspec.UnsetType) -> str | None:
    if not isinstance(value, msgspec.Raw):
        return None
    try:
        return _string.decode(value)
    except msgspec.MsgspecError:
        return None


def _asked(switch: msgspec.Raw | msgspec.UnsetType) -> bool:
    return isinstance(switch, msgspec.Raw) and bytes(switch) not in (b"false", b"null")


def _shown(value: msgspec.Raw | msgspec.UnsetType) -> str:
    """A wrong value as a message repeats it: as it was written, or the beginning of that."""
    text = bytes(value)[: 4 * _SHOWN + 4].decode(errors="ignore") if isinstance(value, msgspec.Raw) else ""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _kind(data: bytes) -> str | None:
    """What a line is that is no object; None where it is one, or no JSON."""
    try:
        _anything.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None
    kinds = {b"{": None, b"[": "an array", b'"': "a string", b"n": "null", b"t": "true", b"f": "false"}
    return kinds.get(data[:1], "a number")
