"""What is kept of a file and of a batch, and how each is shown. Times are Unix seconds.

A document is one small JSON object. That of a file never changes; that of a batch is only written on the condition that it is as
it was read. Both can be read by the next release: unknown fields are ignored, new ones have defaults.
"""

from __future__ import annotations

import re
import secrets
import time
import uuid
from typing import Any, Final, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled", "failed"]
TERMINAL: Final = frozenset({"failed", "completed", "expired", "cancelled"})
ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TIMES: Final = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
_encoder = msgspec.json.Encoder()


def new_id(prefix: str) -> str:
    """An id that nobody can guess; ids made one after the other sort in that order, so a list is paged by them."""
    ticks = time.time_ns() * 1024 // 1_000_000  # milliseconds with 10 bits behind the point
    value = (ticks >> 10 & (1 << 48) - 1) << 80 | 0x7 << 76 | (ticks & 0x3FF) << 66 | 0b10 << 62 | secrets.randbits(62)
    return f"{prefix}{uuid.UUID(int=value)}"


def made_at(identity: str) -> float:
    """When `new_id` made an id, Unix seconds; 0 for any other."""
    try:
        return (uuid.UUID(identity[-36:]).int >> 80) / 1000
    except ValueError:
        return 0.0


class FileDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of the API. Its bytes are the object `content`."""

    id: str
    size: int  # bytes
    created_at: int
    filename: str  # as the client called it; only ever shown
    purpose: str
    content: str
    expires_at: int | None = None

    def public(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> FileDocument:
        return msgspec.json.decode(data, type=FileDocument)


class Problem(msgspec.Struct, frozen=True):
    """Why a batch failed; `line` is 1-based."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines. What was cancelled or expired is in neither `completed` nor `failed`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """Summed over lines, each counted once."""

    input: int = 0
    cached: int = 0
    output: int = 0
    total: int = 0
    reasoning: int = 0  # of the output

    def public(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.total,
        }


class BatchDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One batch, and who looks after it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    input: str  # key of the input's bytes
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None  # seconds
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: list[Problem] = []
    counts: Counts = Counts()
    tokens: Tokens = Tokens()
    model: str | None = None
    output_file_id: str | None = None  # shown once the batch has ended
    error_file_id: str | None = None
    ending: Ending | None = None  # how a batch ends that is finalizing or cancelling
    reserved: tuple[str, str] | None = None  # ids of output and error file, chosen before anything is published
    owner: str | None = None  # the host that looks after it
    nonce: str = ""

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def ended_at(self) -> int | None:
        """None: it has not ended."""
        times = {"completed": self.completed_at, "failed": self.failed_at, "expired": self.expired_at, "cancelled": self.cancelled_at}
        return times.get(self.status)

    def public(self) -> dict[str, Any]:
        errors = [msgspec.structs.asdict(problem) for problem in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: getattr(self, name) for name in _TIMES},
            "request_counts": msgspec.structs.asdict(self.counts),
            "usage": self.tokens.public(),
            "metadata": self.metadata,
        }

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> BatchDocument:
        return msgspec.json.decode(data, type=BatchDocument)
