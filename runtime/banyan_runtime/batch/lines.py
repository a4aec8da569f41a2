"""One line of the input file: cut out of the byte stream, checked, and made into a request.

Nothing here reads or sends. The split holds at most one line of `MAX_LINE_BYTES`; a longer one is counted, not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

MAX_LINE_BYTES: Final = 16 << 20
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank. `number` is 1-based and counts blank lines too, as editors do."""

    number: int
    data: bytes | None  # without line end; None: longer than MAX_LINE_BYTES


class LineSplitter:
    """Cuts blocks of bytes into lines; a BOM, `\\r\\n`, blank lines and a missing last newline are all fine."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._number = 0
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
        if len(self._rest) + len(piece) > self._max:
            self._too_long = True
            self._rest.clear()
        if not self._too_long:
            self._rest += piece

    def _line(self) -> Iterator[RawLine]:
        self._number += 1
        data, too_long = bytes(self._rest), self._too_long
        self._rest.clear()
        self._too_long = False
        if too_long:
            yield RawLine(self._number, None)
            return
        if self._number == 1:
            data = data.removeprefix(_BOM)
        if data := data.strip(_BLANK):
            yield RawLine(self._number, data)


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be sent: `body` is the JSON of the HTTP request, byte for byte as in the file unless renamed."""

    number: int
    custom_id: str
    body: bytes


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


_envelope = msgspec.json.Decoder(_Envelope)
_body = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class LineParser:
    """Makes requests of lines. `endpoint` is one of ENDPOINTS; `model` replaces the model that a line names."""

    endpoint: str
    model: str | None = None

    def parse(self, raw: RawLine) -> Request | Invalid:
        """The request of one line, or why there is none."""
        if raw.data is None:
            return Invalid(raw.number, None, "invalid_json_line", f"This line is longer than {MAX_LINE_BYTES >> 20} MiB.")
        try:
            raw.data.decode()  # the parser skips over strings unchecked
            envelope = _envelope.decode(raw.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Invalid(raw.number, None, "invalid_json_line", "This line is not parseable as valid JSON.")
        custom_id = _text(envelope.custom_id)
        problem = self._problem(envelope, custom_id)
        if problem is not None or custom_id is None:
            code, message, param = problem or ("invalid_custom_id", "custom_id must be a string.", "custom_id")
            return Invalid(raw.number, custom_id, code, message, param)
        body = bytes(envelope.body) if isinstance(envelope.body, msgspec.Raw) else b""
        return Request(raw.number, custom_id, self._with_model(body))

    def _problem(self, envelope: _Envelope, custom_id: str | None) -> tuple[str, str, str | None] | None:
        """(code, message, param) of the first thing wrong with an envelope."""
        for name in ("custom_id", "method", "url", "body"):
            if getattr(envelope, name) is msgspec.UNSET:
                return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
        if not custom_id:
            return "invalid_custom_id", "custom_id must be a string that is not empty.", "custom_id"
        if _text(envelope.method) != "POST":
            return "invalid_method", "method must be 'POST'.", "method"
        url = _text(envelope.url)
        if url is None or not same_endpoint(url, self.endpoint):
            return "url_mismatch", f"url must be the batch's endpoint, {self.endpoint}.", "url"
        return self._body_problem(envelope.body)

    def _body_problem(self, body: msgspec.Raw | msgspec.UnsetType) -> tuple[str, str, str | None] | None:
        try:
            head = _body.decode(body if isinstance(body, msgspec.Raw) else b"")
        except (msgspec.MsgspecError, RecursionError):
            return "invalid_body", "body must be a JSON object.", "body"
        if isinstance(head.stream, msgspec.Raw) and bytes(head.stream) not in (b"false", b"null"):
            return "stream_not_supported", "stream must be false or absent: a batch has no one to stream to.", "body.stream"
        return None

    def _with_model(self, body: bytes) -> bytes:
        if self.model is None:
            return body
        fields = _fields.decode(body)
        fields["model"] = msgspec.Raw(_encoder.encode(self.model))
        return _encoder.encode(fields)


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
