"""Limits on computing time, for code that a model brings."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

from banyan_runtime.front.chat.template import TemplateError

TEMPLATE_CPU_S: Final = 2.0


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
