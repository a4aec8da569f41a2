"""What is written: the lines of output.jsonl and errors.jsonl, and the manifest that says the results are complete."""

from __future__ import annotations

import hashlib
from typing import Final, Literal, TypeVar

import msgspec

from banyan_runtime.batch.lines import Invalid
from banyan_runtime.json_text import uncut
from banyan_runtime.storage.store import Damaged

OUTPUT: Final = "output.jsonl"
ERRORS: Final = "errors.jsonl"
MANIFEST: Final = "manifest.json"
REASON: Final = 300  # characters of what a server said, at most

T = TypeVar("T")

Kind = Literal["output", "error"]
Outcome = Literal["completed", "cancelled", "expired", "failed", "too-many-errors"]


def known(kind: type[T]) -> type[T]:
    """A class decorator: have msgspec look through this kind of document now, while there is one thread. It would at the first decoding,
    and a second thread that decodes meanwhile takes what is half made, which ends the process by SIGSEGV."""
    msgspec.json.Decoder(kind)
    return kind


def decoded(data: bytes, kind: type[T], name: str, remedy: str) -> T:
    """What the object `name` below the output holds. Raises Damaged, with `remedy`, for what no run has written."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(name, f"this is not what a run writes there ({error}); {remedy}") from error


class Usage(msgspec.Struct, rename="camel"):
    """Tokens, summed over lines."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion tokens

    def add(self, other: Usage, sign: int = 1) -> None:
        self.prompt_tokens += sign * other.prompt_tokens
        self.cached_tokens += sign * other.cached_tokens
        self.completion_tokens += sign * other.completion_tokens
        self.total_tokens += sign * other.total_tokens
        self.reasoning_tokens += sign * other.reasoning_tokens


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


class _Reason(msgspec.Struct):
    message: str = ""


class _Told(msgspec.Struct):
    """A server's answer that is an error: OpenAI's envelope, or what others write."""

    error: _Reason | str = ""


class _Line(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_encoder = msgspec.json.Encoder()


def _written(line: _Line) -> bytes:
    return uncut(_encoder.encode(line)) + b"\n"


def record_id(run: str, ordinal: int) -> str:
    """The `id` of a result line: the same for the same line of the same run, whoever writes it."""
    return "batch_req_" + hashlib.blake2b(f"{run}/{ordinal}".encode(), digest_size=16).hexdigest()


def answered(record: str, custom_id: str, status: int, request_id: str, body: bytes, usage: Usage | None) -> Record:
    """The server answered: 2xx goes to the output, everything else to the errors. `body`: one line of JSON, kept but for `uncut`."""
    line = _Line(record, custom_id, _Response(status, request_id, msgspec.Raw(body)), None)
    return Record("output" if 200 <= status < 300 else "error", _written(line), usage)


def unanswered(record: str, custom_id: str, code: str, message: str) -> Record:
    """No usable answer came."""
    return Record("error", _written(_Line(record, custom_id, None, _Error(code, message))))


def invalid(record: str, line: Invalid) -> Record:
    """The line was never sent."""
    error = _Error(line.code, line.message, line.param, line.number)
    return Record("error", _written(_Line(record, line.custom_id, None, error)))


def reason(errors: bytes) -> str | None:
    """Why the first line of errors.jsonl failed, in a few words, of the beginning of that file; None: it does not say."""
    try:
        line = msgspec.json.decode(errors.partition(b"\n")[0], type=_Line)
        if line.response is None:
            return None if line.error is None else f"{line.error.code}: {line.error.message}"[:REASON]
        told = msgspec.json.decode(line.response.body, type=_Told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    words = told.error.message if isinstance(told.error, _Reason) else told.error
    return f"{line.response.status_code}: {words}"[:REASON] if words else f"{line.response.status_code}"


class InputFile(msgspec.Struct, frozen=True):
    uri: str
    etag: str
    bytes: int
    sha256: str


class ResultFile(msgspec.Struct, frozen=True):
    uri: str
    etag: str
    bytes: int
    sha256: str
    lines: int


@known
class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """manifest.json. Written last: where it is, the results are whole."""

    version: int
    run: str
    created_at: str  # RFC 3339, UTC
    endpoint: str
    input: list[InputFile]
    output: ResultFile
    errors: ResultFile
    request_counts: RequestCounts  # lines that were not run count in neither completed nor failed
    usage: Usage
    outcome: Outcome = "completed"
    retry_of: str | None = None  # the run whose failed lines this one ran again
    state: Literal["complete"] = "complete"

    def encode(self) -> bytes:
        return msgspec.json.format(_encoder.encode(self), indent=2) + b"\n"

    @staticmethod
    def decode(data: bytes) -> Manifest:
        return decoded(data, Manifest, MANIFEST, "remove it, or choose another output")


class Publishing(msgspec.Struct, frozen=True, rename="camel"):
    """What stands in the manifest's place while results of an earlier run are replaced."""

    run: str
    nonce: str
    state: Literal["publishing"] = "publishing"

    def encode(self) -> bytes:
        return _encoder.encode(self)


@known
class ManifestHead(msgspec.Struct, frozen=True):
    run: str
    state: str

    @property
    def complete(self) -> bool:
        return self.state == "complete"


def manifest_head(data: bytes) -> ManifestHead | None:
    """Whose manifest this is; None for what is no manifest."""
    try:
        return decoded(data, ManifestHead, MANIFEST, "")
    except Damaged:
        return None


_NOT_RUN: Final = {
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "failed": ("batch_failed", "This request was not executed because the batch failed."),
    "too-many-errors": ("batch_failed", "This request was not executed because too many others failed."),
}


def not_run(record: str, custom_id: str | None, outcome: Outcome, *, line: int | None = None, why: str = "") -> Record:
    """The run ended before the line was executed. One without a custom_id is named by the number of its `line`, as far as that is known;
    `why` it has none is said behind the rest."""
    code, message = _NOT_RUN[outcome]
    error = _Error(code, f"{message} {why}".rstrip(), line=line if custom_id is None else None)
    return Record("error", _written(_Line(record, custom_id, None, error)))
