"""Refusals for what lines share, the key, the path, the model: whether the line, the job or the server is to blame."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

SHARED: Final = frozenset({301, 302, 307, 308, 401, 403, 404, 405})
MOST_MODELS: Final = 1000  # of which it is remembered that they were served
ENOUGH_LINES: Final = 8  # so many lines, all refused this way: the job or the server is wrong, not they


class Verdict(Enum):
    LINE = "line"  # it is the line's own error
    JOB = "job"  # set up wrongly: no line can be answered
    UNKNOWN = "unknown"  # the line is to be tried again


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of the lines before they are sent."""

    lines: int  # at most so many will be sent
    models: frozenset[str] | None = None  # all names that lines ask for, '' for those that name none; None: too many to know
    served_before: bool = False  # an earlier try of this run had lines answered


@dataclass(slots=True)
class _Refused:
    """Since a line was last answered."""

    lines: set[int] = field(default_factory=set)  # no more than are needed to judge
    alone: int = 0  # refusals while nothing else was sent that could have fared better

    def add(self, line: int, *, alone: bool) -> None:
        self.alone += alone
        if len(self.lines) < ENOUGH_LINES:
            self.lines.add(line)


@dataclass(slots=True)
class Refusals:
    """Judges answers with one of SHARED. Before any line was served they tell of a job that cannot work. Later only a model that
    was never served is surely the line's own error: keys, paths and models that worked do not vanish by a line's fault.
    """

    expected: Expected
    served: bool = False
    _shared: _Refused = field(default_factory=_Refused)
    _of_models: _Refused = field(default_factory=_Refused)
    _missing: set[str] = field(default_factory=set)
    _served_models: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.served = self.expected.served_before
        if self.served and self._only_model is not None:
            self._served_models.add(self._only_model)

    @property
    def many_models(self) -> bool:
        """Whether the model of a line that was answered must be told."""
        return self._only_model is None

    @property
    def several(self) -> bool:
        """Whether so many lines were refused since one was answered that it can hardly be for what is in them."""
        return len(self._shared.lines) >= ENOUGH_LINES

    @property
    def _only_model(self) -> str | None:
        models = self.expected.models
        return next(iter(models)) if models is not None and len(models) == 1 else None

    def answered(self, status: int, model: str | None = None) -> None:
        """A line was answered with a status that is none of SHARED. `model`: which it asked for, if there are many."""
        self.served = True
        self._shared, self._of_models = _Refused(), _Refused()
        self._missing.clear()
        model = self._only_model if model is None else model
        if status < 400 and model is not None and len(self._served_models) < MOST_MODELS:
            self._served_models.add(model)

    def refused(self, line: int, model: str | None, *, alone: bool, known: bool = False) -> Verdict:
        """A line was answered with one of SHARED. `model`: the model that the server does not have, if it said that this is the
        reason; `alone`: nothing else was being served; `known`: other lines passed around earlier refusals of this one.
        """
        seen = self._shared if model is None else self._of_models
        if not known:
            seen.add(line, alone=alone)
        if self.served:
            return Verdict.LINE if model is not None and model not in self._served_models else Verdict.UNKNOWN
        models = self.expected.models
        if model is not None and models is not None:
            self._missing.add(model)
        if len(seen.lines) < min(ENOUGH_LINES, self.expected.lines) and seen.alone < ENOUGH_LINES:
            return Verdict.UNKNOWN
        every = model is None or (models is not None and self._missing >= models)
        return Verdict.JOB if every else Verdict.LINE
