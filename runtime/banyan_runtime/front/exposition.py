"""Prometheus text, version 0.0.4, from families whose line prefixes are built once.

Rendering 500 series costs a string join; counting costs one addition to a cell the caller keeps. Used from the event loop
only, so there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def escape(value: str) -> str:
    """A label value as the text format wants it."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def number(value: float) -> str:
    """A sample's value: integers without a fraction, all else with full precision."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def labelled(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels.items()) + "}"


class Cell:
    """One series of a gauge or counter. Callers add to `value` or set it."""

    __slots__ = ("prefix", "value")

    def __init__(self, prefix: str, value: float = 0) -> None:
        self.prefix = prefix
        self.value = value

    def write(self, lines: list[str]) -> None:
        lines.append(self.prefix + number(self.value))


class Histogram:
    """One histogram's series. `counts[i]` holds what lies in bucket i alone; the text is cumulative."""

    __slots__ = ("bounds", "bucket_prefixes", "count_prefix", "counts", "sum", "sum_prefix")

    def __init__(self, name: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        edges = [repr(bound) for bound in self.bounds] + ["+Inf"]
        self.bucket_prefixes = [f"{name}_bucket{labelled({**labels, 'le': edge})} " for edge in edges]
        self.sum_prefix = f"{name}_sum{labelled(labels)} "
        self.count_prefix = f"{name}_count{labelled(labels)} "
        self.counts = [0] * len(edges)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def replace(self, counts: Sequence[int], total: float) -> None:
        """Take over counts kept elsewhere, of the same buckets."""
        assert len(counts) == len(self.counts)
        self.counts = list(counts)
        self.sum = total

    def write(self, lines: list[str]) -> None:
        running = 0
        for prefix, count in zip(self.bucket_prefixes, self.counts, strict=True):
            running += count
            lines.append(f"{prefix}{running}")
        lines.append(self.sum_prefix + number(self.sum))
        lines.append(f"{self.count_prefix}{running}")


class Exposition:
    """All families of a process, in the order of their declaration; `constant` labels stand on every series."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self.constant = dict(constant)
        self._families: list[tuple[str, list[Cell] | list[Histogram]]] = []

    def cells(self, name: str, kind: Literal["gauge", "counter"], help: str, /, **labels: Sequence[str]) -> dict[tuple[str, ...], Cell]:
        """Declare a gauge or counter. Every combination of the given label values exists from now on, at 0.

        Returns the cells by their label values, in the order of the keywords.
        """
        cells = {
            values: Cell(name + labelled(self.constant | dict(zip(labels, values, strict=True))) + " ")
            for values in product(*labels.values())
        }
        self._families.append((self._head(name, kind, help), list(cells.values())))
        return cells

    def cell(self, name: str, kind: Literal["gauge", "counter"], help: str) -> Cell:
        """Declare a gauge or counter without labels of its own."""
        return self.cells(name, kind, help)[()]

    def open_family(self, name: str, kind: Literal["gauge", "counter"], help: str) -> OpenFamily:
        """Declare a family whose label sets are not known in advance."""
        cells: list[Cell] = []
        self._families.append((self._head(name, kind, help), cells))
        return OpenFamily(name, self.constant, cells)

    def histograms(self, name: str, help: str, bounds: Sequence[float], /, **labels: Sequence[str]) -> dict[tuple[str, ...], Histogram]:
        """Declare a histogram with these upper bounds; as `cells`."""
        histograms = {
            values: Histogram(name, self.constant | dict(zip(labels, values, strict=True)), bounds) for values in product(*labels.values())
        }
        self._families.append((self._head(name, "histogram", help), list(histograms.values())))
        return histograms

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        return self.histograms(name, help, bounds)[()]

    def beginning(self) -> Exposition:
        """A page of the families declared so far, over the same series."""
        page = Exposition(self.constant)
        page._families = list(self._families)
        return page

    def render(self) -> bytes:
        lines: list[str] = []
        for head, series in self._families:
            if series:
                lines.append(head)
                for one in series:
                    one.write(lines)
        lines.append("")
        return "\n".join(lines).encode()

    @staticmethod
    def _head(name: str, kind: str, help: str) -> str:
        return f"# HELP {name} {help}\n# TYPE {name} {kind}"


class OpenFamily:
    """Series that appear when they are first needed. The caller bounds the label values."""

    def __init__(self, name: str, constant: Mapping[str, str], cells: list[Cell]) -> None:
        self._name = name
        self._constant = constant
        self._cells = cells
        self._by_labels: dict[tuple[str, ...], Cell] = {}

    def cell(self, names: Iterable[str], values: tuple[str, ...]) -> Cell:
        if (cell := self._by_labels.get(values)) is None:
            cell = Cell(self._name + labelled({**self._constant, **dict(zip(names, values, strict=True))}) + " ")
            self._by_labels[values] = cell
            self._cells.append(cell)
        return cell
