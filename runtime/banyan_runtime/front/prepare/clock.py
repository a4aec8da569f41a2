"""Limits on computing time and memory, for code that a model brings."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from banyan_runtime.front.chat.template import TemplateError
from banyan_runtime.process import PAGE_BYTES

TEMPLATE_CPU_S: Final = 2.0
TEMPLATE_BYTES: Final = 512 << 20  # that a template may take while it is tried


class _OutOfTime(BaseException):
    """Raised in the midst of a template, past its and Jinja's handlers."""


@contextlib.contextmanager
def template_time() -> Iterator[None]:
    """Limit the time that a chat template may compute. For the main thread of a process alone, as signals are.

    Raises TemplateError when it is over. Code in C is not interrupted; who waits for this process must end it then.
    """

    def expire(number: int, at: FrameType | None) -> NoReturn:
        raise _OutOfTime

    signal.signal(signal.SIGPROF, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, TEMPLATE_CPU_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTime:
        raise TemplateError(f"it took more than {TEMPLATE_CPU_S:g} s of computing time.") from None


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """`template_time` for a process that has no limit on its memory: here it has one. Raises TemplateError, MemoryError."""
    with _template_memory(), template_time():
        yield


@contextlib.contextmanager
def _template_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (size + TEMPLATE_BYTES, soft) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
