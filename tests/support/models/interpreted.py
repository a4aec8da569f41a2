"""Triton's interpreter, made quick: it computes what it computes without this, and makes anew less of what is always the same.

For each launch, and for each call from a kernel to another function, it looks through all of `triton.language` for what is to be replaced
while kernels run, which takes as long as the kernels. What it finds is always the same, and within a launch it is replaced already.
Each value gets objects of its own that say its shape, two values that are alike are asked in which type and shape they meet, and each
operation on integers is done again in 64 bits, by a dozen others, for a check whose answer nobody reads.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Modules = frozenset[str]
Change = tuple[object, str, object]


def combined(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For `parametrize`: each value beside each of every other axis, in few combinations. On a GPU, which takes no time for them, all."""
    every = list(itertools.product(*axes))
    if torch.cuda.is_available():
        return every
    left = {pair for values in every for pair in _pairs(values)}
    chosen: list[tuple[Any, ...]] = []
    while left:
        chosen.append(max(every, key=lambda values: len(left & _pairs(values))))
        left -= _pairs(chosen[-1])
    return chosen


def _pairs(values: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    (*numbered,) = enumerate(values)
    return set(itertools.combinations(numbered, 2))


class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """Of one launch: what is replaced for its kernel and for all that this calls."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.patched: list[Modules] = []

    def restore(self) -> None:
        super().restore()
        self.over = True


class Patching:
    """In the place of `interpreter._patch_lang`, which patches those modules of Triton's language that a function's globals hold."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._modules: dict[int, Modules] = {}  # by globals, which a module keeps for good
        self._changes: dict[tuple[Modules, ...], list[Change]] = {}  # by the modules that were patched so far, and those to be patched
        self._scope = Scope()
        self._scope.over = True

    def __call__(self, fn: Any) -> Scope:
        if self._scope.over:
            self._scope = Scope()
        scope, modules = self._scope, self._of(fn.__globals__)
        if modules in scope.patched:
            return scope
        scope.patched.append(modules)
        key = tuple(scope.patched)
        if key not in self._changes:
            found = self._patch(fn)
            self._changes[key] = [(where, name, getattr(where, name)) for where, name, _ in found._changes]
            found.restore()
        for change in self._changes[key]:
            scope.set_attr(*change)
        return scope

    def _of(self, names: dict[str, Any]) -> Modules:
        if id(names) not in self._modules:
            found = (value for value in names.values() if inspect.ismodule(value))
            self._modules[id(names)] = frozenset(module.__name__ for module in found if module in (tl, tl.core))
        return self._modules[id(names)]


class Shapes:
    """In the place of how types of blocks and values are made: what a shape alone decides is made once for each."""

    def __init__(self) -> None:
        self._make_type = tl.core.block_type.__init__
        self._of_types: dict[tuple[object, ...], tuple[Any, int]] = {}  # by shape: as it is told, and how many elements it has
        self._of_values: dict[int, tuple[Any, Any]] = {}  # by a shape of `_of_types`, which stay: the same as constants
        self._of_single = tl.core.tuple([]), tl.constexpr(1)
        self._names: dict[tuple[str, tuple[object, ...]], str] = {}

    def type(self, made: Any, element_ty: Any, shape: Any) -> None:
        """`block_type.__init__`."""
        key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        name = self._names.get((element_ty.name, key))
        if name is None:
            self._make_type(made, element_ty, shape)
            made.shape, made.numel = self._of_types.setdefault(key, (made.shape, made.numel))
            self._names[element_ty.name, key] = made.name
            return
        made.element_ty, made.name = element_ty, name
        made.shape, made.numel = self._of_types[key]

    def value(self, made: Any, handle: Any, type: Any) -> None:
        """`tensor.__init__`."""
        made.handle, made.type, made.dtype = handle, type, type.scalar
        if not type.is_block():
            made.shape, made.numel = self._of_single
            return
        told = self._of_values.get(id(type.shape))
        if told is None:
            sizes = tuple(type.shape)
            told = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
            if (kept := self._of_types.get(sizes)) is not None and kept[0] is type.shape:
                self._of_values[id(type.shape)] = told
        made.shape, made.numel = told


class Stored:
    """In the place of `interpreter._get_np_dtype`."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self._find = find
        self._found: dict[str, Any] = {}  # by the name of an element's type

    def __call__(self, type: Any) -> Any:
        element = type.scalar
        if element.name not in self._found:
            self._found[element.name] = self._find(element)
        return self._found[element.name]


def alike(check: Callable[..., Any]) -> Callable[..., Any]:
    """`TritonSemantic.binary_op_type_checking_impl`: two values of one of these types compute in it, whatever is computed."""
    plain = frozenset(kind.name for kind in (tl.float32, tl.float64, tl.int32, tl.int64, tl.uint32, tl.uint64))

    def checked(semantic: Any, lhs: Any, rhs: Any, *allowed: bool, **asked: bool) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype and lhs.dtype.name in plain:
            return semantic.broadcast_impl_value(lhs, rhs)
        return check(semantic, lhs, rhs, *allowed, **asked)

    return checked


class Meeting:
    """In the place of `TritonSemantic.broadcast_impl_value`: what two shapes become is found once for each two."""

    def __init__(self, broadcast: Callable[..., Any]) -> None:
        self._broadcast = broadcast
        self._known: dict[tuple[int, int], tuple[Any, bool, bool, Any]] = {}  # shape, whether each becomes it; the shapes, which stay

    def __call__(self, semantic: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not (left.is_block() and right.is_block()):
            return (lhs, rhs) if left.is_block() == right.is_block() else self._broadcast(semantic, lhs, rhs)
        shapes = left.shape, right.shape
        if shapes[0] is shapes[1]:
            return lhs, rhs
        key = id(shapes[0]), id(shapes[1])
        if key not in self._known:
            met = self._broadcast(semantic, lhs, rhs)
            if len(shapes[0]) == len(shapes[1]):
                self._known[key] = met[0].type.shape, met[0] is not lhs, met[1] is not rhs, shapes
            return met
        shape, widens, other_widens, _ = self._known[key]
        return self._as(semantic, lhs, shape) if widens else lhs, self._as(semantic, rhs, shape) if other_widens else rhs

    def _as(self, semantic: Any, value: Any, shape: Any) -> Any:
        return semantic.tensor(semantic.builder.create_broadcast(value.handle, shape), tl.block_type(value.type.scalar, shape))


def unheard(check: Callable[..., None]) -> Callable[..., None]:
    """`TritonSemantic.binary_op_sanitize_overflow_impl`, where it can tell somebody: without debugging it throws away what it finds."""

    def checked(semantic: Any, *operation: Any) -> None:
        if semantic.builder.options.debug:
            check(semantic, *operation)

    return checked


def hasten() -> None:
    if isinstance(interpreter._patch_lang, Patching):
        return
    interpreter._patch_lang = Patching(interpreter._patch_lang)
    interpreter._get_np_dtype = Stored(interpreter._get_np_dtype)
    shapes = Shapes()
    tl.core.block_type.__init__ = lambda *args: shapes.type(*args)
    tl.core.tensor.__init__ = lambda *args: shapes.value(*args)
    TritonSemantic.binary_op_type_checking_impl = alike(TritonSemantic.binary_op_type_checking_impl)
    meeting = Meeting(TritonSemantic.broadcast_impl_value)
    TritonSemantic.broadcast_impl_value = lambda *values: meeting(*values)
    TritonSemantic.binary_op_sanitize_overflow_impl = unheard(TritonSemantic.binary_op_sanitize_overflow_impl)
