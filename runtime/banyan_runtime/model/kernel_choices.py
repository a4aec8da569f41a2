"""Which kernel computes each product of a decode step: a shipped table of what was measured, by shape class.

A shape class is a product's shape and a number of rows. A class without an entry takes the default kernel.
The entries are whole decode steps: a kernel that is faster alone can make a step slower, because kernels begin while others end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of the shape classes. A class holds for its rows and for fewer, down to the class before."""
DEVICE: Final = "H200"  # part of the name of the device that the table was measured on

Kernel = Literal["default", "tiles", "staged"]
"""`default`: `kernels/products.py` for few rows, else torch. `tiles` and `staged`: the kernels of those names."""


class Product(NamedTuple):
    """The shape of a product of rows with a matrix."""

    outputs: int
    width: int
    gated: bool  # as `Mlp.gated`

    @property
    def bytes(self) -> int:
        """Bytes of the weight, in 16 bits."""
        return 2 * self.outputs * self.width * (2 if self.gated else 1)

    def __str__(self) -> str:
        return f"{self.outputs}x{self.width}{' gated' if self.gated else ''}"


class Entry(NamedTuple):
    product: Product
    rows: tuple[int, ...]  # of ROWS
    kernel: Kernel
    source: str  # file in benchmarks/results
    line: str  # how the line in that file begins


_SECOND: Final = "2026-11-26-h200-second-ways.txt"
_FIFTH: Final = "2026-11-27-h200-fifth-ways.txt"
_QWEN: Final = (Product(1152, 896, False), Product(896, 896, False), Product(4864, 896, True), Product(896, 4864, False))
_LLAMA: Final = (Product(6144, 4096, False), Product(4096, 4096, False), Product(14336, 4096, True), Product(4096, 14336, False))
TABLE: Final = (
    # Qwen2.5-0.5B: qkv, out, gate and up, down
    Entry(_QWEN[0], (1, 2), "default", _FIFTH, "0.5b        L gate_up staged 4, qkv 4 "),
    Entry(_QWEN[0], (4, 8, 16), "tiles", _SECOND, "0.5b tiles bring 0 "),
    Entry(_QWEN[0], (64,), "tiles", _SECOND, "0.5b tiles  "),
    Entry(_QWEN[0], (256,), "tiles", _SECOND, "0.5b tiles of 64 rows, qkv out late "),
    Entry(_QWEN[1], (1,), "staged", _FIFTH, "0.5b        L gate_up staged 4, out 4 "),
    Entry(_QWEN[1], (2,), "default", _FIFTH, "0.5b        L gate_up staged 4, out 4 "),
    Entry(_QWEN[1], (4, 8, 16), "tiles", _SECOND, "0.5b tiles bring 0 "),
    Entry(_QWEN[1], (64,), "tiles", _SECOND, "0.5b tiles  "),
    Entry(_QWEN[1], (256,), "tiles", _SECOND, "0.5b tiles of 64 rows, qkv out late "),
    Entry(_QWEN[2], (1,), "staged", _FIFTH, "0.5b        L gate_up staged 4  "),
    Entry(_QWEN[2], (2,), "default", _FIFTH, "0.5b        L gate_up staged 4  "),
    Entry(_QWEN[2], (4, 8, 16), "tiles", _SECOND, "0.5b tiles bring 0 "),
    Entry(_QWEN[2], (64,), "tiles", _SECOND, "0.5b tiles gate_up bring 0 "),
    Entry(_QWEN[2], (256,), "default", _SECOND, "0.5b tiles of 128 gate_up (128, 8, 3) "),
    Entry(_QWEN[3], (16,), "default", _SECOND, "0.5b 4w, down of 32, 8 splits "),
    Entry(_QWEN[3], (64,), "default", _SECOND, "0.5b tiles of 64 x 64: down in 8 "),
    Entry(_QWEN[3], (256,), "default", _SECOND, "0.5b tiles of 64 x 64: down in 4 "),
    # Llama-3.1-8B, likewise
    Entry(_LLAMA[0], (16, 64), "default", _SECOND, "8b qkv 64x128 "),
    Entry(_LLAMA[1], (16, 64), "default", _SECOND, "8b tiles out bring 0 "),
    Entry(_LLAMA[2], (16, 64), "tiles", _SECOND, "8b gate_up 64x128 4w 4s "),
    Entry(_LLAMA[3], (16, 64), "default", _SECOND, "8b tiles down bring 0 "),
)
"""A kernel other than the default one makes the whole step at least 1 % shorter in the line that is named. Some lines change several
products at once, and tiles were cut a little otherwise then."""


def class_of(rows: int) -> int | None:
    """The shape class of so many rows, as a number of ROWS; None: there is no class for so many."""
    at = bisect_left(ROWS, rows)
    return ROWS[at] if at < len(ROWS) else None


Offers = Callable[[int], Sequence[Kernel]]
"""The kernels that can compute a layer's product of so many rows."""


class KernelChoices:
    """The kernel of each shape class of one model, on one device."""

    def __init__(self, device_name: str) -> None:
        table = TABLE if DEVICE in device_name else ()
        self._table = {(entry.product, rows): entry.kernel for entry in table for rows in entry.rows}
        self._layers: dict[Product, list[Offers]] = {}
        self.measured: dict[tuple[Product, int], Kernel] = {}  # by product and rows of the class

    def add(self, product: Product, offers: Offers) -> None:
        """Add a layer."""
        self._layers.setdefault(product, []).append(offers)
        for rows in ROWS:
            kernel = self._table.get((product, rows))
            if kernel is not None and kernel in offers(rows):
                self.measured[product, rows] = kernel

    @property
    def products(self) -> list[Product]:
        """The products that every block has: a product that occurs once in a step is not worth a choice."""
        return [product for product, layers in self._layers.items() if len(layers) > 1]

    def offers(self, product: Product, rows: int) -> Sequence[Kernel]:
        """The kernels that can compute a product of so many rows."""
        return self._layers[product][0](rows)

    def kernel(self, product: Product, rows: int) -> Kernel:
        """The kernel of a product of so many rows."""
        size = class_of(rows)
        return "default" if size is None else self.measured.get((product, size), "default")

    def line(self) -> str:
        """The kernel of every shape class, and whether it was measured, for the log."""
        return "; ".join(f"{product}: {self._line(product)}" for product in self.products)

    def _line(self, product: Product) -> str:
        groups: dict[str, list[int]] = {}
        for rows in ROWS:
            groups.setdefault(self.measured.get((product, rows), "default (unmeasured)"), []).append(rows)
        return ", ".join(f"{kernel} {' '.join(map(str, rows))}" for kernel, rows in groups.items())
