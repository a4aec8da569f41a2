"""The eight statuses of a batch and the ways from one to the next. Decides only; each function returns the document as it is to
be written, or None where the batch has gone another way meanwhile.

    validating ── in_progress ── finalizing ── completed | expired
        │  └────────────┴── cancelling ── cancelled
        └── failed
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from banyan_runtime.batch.host.documents import BatchDocument, Counts, Ending, Problem, Tokens, new_id
from banyan_runtime.batch.host.refusals import Refusal

Step: TypeAlias = Callable[[BatchDocument], BatchDocument | None]
CANCELLABLE: Final = frozenset({"validating", "in_progress"})


@dataclass(frozen=True, slots=True)
class Published:
    """What a run has left: which of its two files hold anything, how many lines and tokens."""

    output: str | None  # key of the bytes; None: it has no line
    output_bytes: int
    errors: str | None
    errors_bytes: int
    counts: Counts
    tokens: Tokens
    ending: Ending


def claimed(owner: str, seen: BatchDocument) -> Step:
    """`owner` looks after the batch from now on, unless somebody was faster since it was `seen` to be free."""
    return lambda batch: None if batch.ended or batch.nonce != seen.nonce else replace(batch, owner=owner, nonce=_nonce())


def beaten(owner: str, counts: Counts, tokens: Tokens) -> Step:
    """The owner lives, and so far it has got."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.owner != owner or batch.ended:
            return None
        return replace(batch, nonce=_nonce(), counts=replace(counts, total=batch.counts.total), tokens=tokens)

    return step


def released(owner: str) -> Step:
    """Whoever likes may take the batch."""
    return lambda batch: replace(batch, owner=None, nonce=_nonce()) if batch.owner == owner and not batch.ended else None


def validated(total: int, model: str | None, now: int) -> Step:
    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.status != "validating":
            return None
        return replace(batch, status="in_progress", in_progress_at=now, counts=Counts(total=total), model=model, nonce=_nonce())

    return step


def refused(problems: list[Problem], now: int) -> Step:
    """The input is no batch."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.status != "validating":
            return None
        return replace(batch, status="failed", failed_at=now, errors=problems, owner=None, nonce=_nonce())

    return step


def finalizing(ending: Ending, now: int, problems: list[Problem] | None = None) -> Step:
    """No more lines are run; the ids of the files are chosen here, so that a second attempt publishes under the same."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.status != "in_progress":
            return None
        reserved = batch.reserved or (new_id("file-"), new_id("file-"))
        errors = problems or []
        return replace(batch, status="finalizing", finalizing_at=now, ending=ending, reserved=reserved, errors=errors, nonce=_nonce())

    return step


def cancelled(now: int) -> Step:
    """Somebody wants the batch to end. Raises Refusal where it is too late."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.status in ("cancelling", "cancelled"):
            return None
        if batch.status not in CANCELLABLE:
            raise Refusal(400, f"Cannot cancel a batch with status '{batch.status}'.", code="invalid_batch_status")
        reserved = (new_id("file-"), new_id("file-"))
        return replace(batch, status="cancelling", cancelling_at=now, ending="cancelled", reserved=reserved, nonce=_nonce())

    return step


def ended(published: Published | None, now: int) -> Step:
    """The files are there (None: there was nothing to run, or nothing to read), and the batch has ended."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.status not in ("finalizing", "cancelling"):
            return None
        ending = batch.ending or "completed"
        if published is not None and batch.status == "finalizing":
            ending = published.ending  # a run whose last line was done when its window closed is complete
        batch = replace(batch, status=ending, ending=None, owner=None, nonce=_nonce(), **{f"{ending}_at": now})
        if published is None:
            return replace(batch, reserved=None)
        assert batch.reserved is not None, "files are published under ids that were chosen before"
        output, errors = batch.reserved
        return replace(
            batch,
            counts=published.counts,
            tokens=published.tokens,
            output_file_id=output if published.output else None,
            error_file_id=errors if published.errors else None,
            reserved=None,
        )

    return step


def spoiled(problem: Problem, now: int) -> Step:
    """The results cannot be published, and never will be."""

    def step(batch: BatchDocument) -> BatchDocument | None:
        if batch.ended:
            return None
        ending: Ending = "cancelled" if batch.status == "cancelling" else "failed"
        # under the ids that were reserved there are perhaps files already
        kept = replace(batch, status=ending, errors=[problem], ending=None, owner=None, nonce=_nonce())
        return replace(kept, **{f"{ending}_at": now})

    return step


def by(owner: str, step: Step) -> Step:
    """`step`, unless somebody else looks after the batch now."""
    return lambda batch: step(batch) if batch.owner == owner else None


def _nonce() -> str:
    return secrets.token_hex(8)
