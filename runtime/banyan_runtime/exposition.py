"""Cells that cost an addition to count, and the families and pages that prometheus-client makes of them.

Its own Counter and Histogram lock at every observation, take observations one at a time, and cannot take over what the engine
has counted. So the families here are custom collectors over plain cells. Used from the event loop only, so there are no locks.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Final, Literal

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
HOLD_S: Final = 0.001  # a page of 450 series takes 3 to 4 ms to write, and tokens wait behind it
_KINDS: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class Cell:
    """One series of a gauge or counter. Callers add to `value` or set it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """One histogram. `counts[i]` holds what lies in bucket i alone; the text is cumulative."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def replace(self, counts: Sequence[int], total: float) -> None:
        """Take over counts kept elsewhere, of the same buckets."""
        assert len(counts) == len(self.counts)
        self.counts = list(counts)
        self.sum = total


class Family(Collector):
    """One family of series. `constant` labels stand on every series, those called `names` vary."""

    def __init__(self, name: str, help: str, constant: Mapping[str, str], names: Sequence[str]) -> None:
        self.name = name
        self.help = help
        self.constant = constant
        self.names = names

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """The family as it is now; nothing where it has no series yet."""


class CellFamily(Family):
    """A gauge or counter."""

    def __init__(self, kind: Literal["gauge", "counter"], name: str, help: str, constant: Mapping[str, str], names: Sequence[str]) -> None:
        super().__init__(name, help, constant, names)
        self.kind: Final = kind
        self.cells: dict[tuple[str, ...], Cell] = {}

    def cell(self, *values: str) -> Cell:
        """The series of these label values, which exists from now on. The caller bounds the values."""
        if (cell := self.cells.get(values)) is None:
            cell = self.cells[values] = Cell()
        return cell

    def collect(self) -> Iterator[Metric]:
        if self.cells:
            family = _KINDS[self.kind](self.name, self.help, labels=[*self.constant, *self.names])
            for values, cell in self.cells.items():
                family.add_metric([*self.constant.values(), *values], cell.value)
            yield family


class HistogramFamily(Family):
    """Histograms over the same bounds."""

    def __init__(self, name: str, help: str, constant: Mapping[str, str], names: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, help, constant, names)
        self.bounds = bounds
        self._edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.histograms: dict[tuple[str, ...], Histogram] = {}

    def histogram(self, *values: str) -> Histogram:
        """As `CellFamily.cell`."""
        if (histogram := self.histograms.get(values)) is None:
            histogram = self.histograms[values] = Histogram(self.bounds)
        return histogram

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.help, labels=[*self.constant, *self.names])
        for values, histogram in self.histograms.items():
            buckets = list(zip(self._edges, accumulate(histogram.counts), strict=True))
            family.add_metric([*self.constant.values(), *values], buckets, histogram.sum)
        yield family


class Page:
    """Families in the order of their declaration; `constant` labels stand on every series."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self.constant = dict(constant)
        self.families: list[Family] = []

    def open_family(self, name: str, kind: Literal["gauge", "counter"], help: str, *names: str) -> CellFamily:
        """Declare a gauge or counter whose label values are not known in advance."""
        family = CellFamily(kind, name, help, self.constant, names)
        self.families.append(family)
        return family

    def cells(self, name: str, kind: Literal["gauge", "counter"], help: str, /, **labels: Sequence[str]) -> dict[tuple[str, ...], Cell]:
        """Declare a gauge or counter. Every combination of the given label values exists from now on, at 0.

        Returns the cells by their label values, in the order of the keywords.
        """
        family = self.open_family(name, kind, help, *labels)
        return {values: family.cell(*values) for values in product(*labels.values())}

    def cell(self, name: str, kind: Literal["gauge", "counter"], help: str) -> Cell:
        """Declare a gauge or counter without labels of its own."""
        return self.cells(name, kind, help)[()]

    def histograms(self, name: str, help: str, bounds: Sequence[float], /, **labels: Sequence[str]) -> dict[tuple[str, ...], Histogram]:
        """Declare a histogram with these upper bounds; as `cells`."""
        family = HistogramFamily(name, help, self.constant, list(labels), bounds)
        self.families.append(family)
        return {values: family.histogram(*values) for values in product(*labels.values())}

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        return self.histograms(name, help, bounds)[()]

    def text(self) -> bytes:
        """The page in Prometheus' text format, written in one go: 8 us a series."""
        return b"".join(generate_latest(family) for family in self.families)

    async def text_by_turns(self) -> bytes:
        """The page, written in turns of about HOLD_S between which the event loop does what else there is to do."""
        parts = []
        began = time.perf_counter()
        for family in self.families:
            parts.append(generate_latest(family))
            if time.perf_counter() - began > HOLD_S:
                await asyncio.sleep(0)
                began = time.perf_counter()
        return b"".join(parts)


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """How much a series has grown. `counts`: of a histogram, by buckets; then `value` is that of its sum."""

    family: str
    labels: tuple[str, ...]
    value: float
    counts: list[int] = []


class Ledger:
    """What is counted on some pages here and shown on the same pages of another process. Gauges are not: they are no sums."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages
        self._told: dict[tuple[str, tuple[str, ...]], tuple[float, list[int]]] = {}

    def news(self) -> list[Counted]:
        """What has been counted since the last call."""
        found = []
        for key, value, counts in self._series():
            told, told_counts = self._told.get(key, (0.0, []))
            if value != told or counts != told_counts:
                self._told[key] = value, counts
                more = [count - before for count, before in zip(counts, told_counts or [0] * len(counts), strict=True)]
                found.append(Counted(*key, value - told, more))
        return found

    def add(self, news: Sequence[Counted]) -> None:
        """Count here what was counted elsewhere."""
        families = {family.name: family for page in self._pages for family in page.families}
        for counted in news:
            match families.get(counted.family):
                case CellFamily() as family:
                    family.cell(*counted.labels).value += counted.value
                case HistogramFamily() as family:
                    histogram = family.histogram(*counted.labels)
                    counts = [have + more for have, more in zip(histogram.counts, counted.counts, strict=True)]
                    histogram.replace(counts, histogram.sum + counted.value)

    def _series(self) -> Iterator[tuple[tuple[str, tuple[str, ...]], float, list[int]]]:
        for family in (family for page in self._pages for family in page.families):
            match family:
                case CellFamily(kind="counter"):
                    for labels, cell in family.cells.items():
                        yield (family.name, labels), cell.value, []
                case HistogramFamily():
                    for labels, histogram in family.histograms.items():
                        yield (family.name, labels), histogram.sum, list(histogram.counts)
