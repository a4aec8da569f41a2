"""What is written: the lines of output.jsonl and errors.jsonl, and the manifest that says the results are complete."""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from banyan_runtime.batch.lines import Invalid

OUTPUT: Final = "output.jsonl"
ERRORS: Final = "errors.jsonl"
MANIFEST: Final = "manifest.json"

Kind = Literal["output", "error"]


class Usage(msgspec.Struct, rename="camel"):
    """Tokens, summed over lines."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.total_tokens += other.total_tokens


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Record(msgspec.Struct, frozen=True):
    """The outcome of one input line: where it goes, the line itself (with newline), and what it used."""

    kind: Kind
    line: bytes
    usage: Usage | None = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _Line(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_encoder = msgspec.json.Encoder()


def record_id(run: str, ordinal: int) -> str:
    """The `id` of a result line: the same for the same line of the same run, whoever writes it."""
    return "batch_req_" + hashlib.blake2b(f"{run}/{ordinal}".encode(), digest_size=16).hexdigest()


def answered(record: str, custom_id: str, status: int, request_id: str, body: bytes, usage: Usage | None) -> Record:
    """The server answered: 2xx goes to the output, everything else to the errors. `body` is one line of JSON, kept as it is."""
    line = _Line(record, custom_id, _Response(status, request_id, msgspec.Raw(body)), None)
    return Record("output" if 200 <= status < 300 else "error", _encoder.encode(line) + b"\n", usage)


def unanswered(record: str, custom_id: str, code: str, message: str) -> Record:
    """No usable answer came."""
    return Record("error", _encoder.encode(_Line(record, custom_id, None, _Error(code, message))) + b"\n")


def invalid(record: str, line: Invalid) -> Record:
    """The line was never sent."""
    error = _Error(line.code, line.message, line.param, line.number)
    return Record("error", _encoder.encode(_Line(record, line.custom_id, None, error)) + b"\n")


class InputFile(msgspec.Struct, frozen=True):
    uri: str
    etag: str
    bytes: int


class ResultFile(msgspec.Struct, frozen=True):
    uri: str
    etag: str
    bytes: int
    sha256: str
    lines: int


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """manifest.json. Written last: where it is, the results are whole."""

    version: int
    run: str
    created_at: str  # RFC 3339, UTC
    endpoint: str
    input: list[InputFile]
    output: ResultFile
    errors: ResultFile
    request_counts: RequestCounts
    usage: Usage

    def encode(self) -> bytes:
        return msgspec.json.format(_encoder.encode(self), indent=2) + b"\n"

    @staticmethod
    def decode(data: bytes) -> Manifest:
        return msgspec.json.decode(data, type=Manifest)
