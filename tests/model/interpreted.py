"""Triton's interpreter, made quick: it computes what it computes without this, and makes anew less of what is always the same.

For each launch, and for each call from a kernel to another function, it looks through all of `triton.language` for what is to be replaced
while kernels run, which takes as long as the kernels. What it finds is always the same, and within a launch it is replaced already.
Each value gets objects of its own that say its shape, and each operation on integers is done again in 64 bits, by a dozen others, for a
check whose answer nobody reads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Modules = frozenset[str]
Change = tuple[object, str, object]


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
        self._of_values: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by shape: the same as constants
        self._names: dict[tuple[str, tuple[object, ...]], str] = {}

    def type(self, made: Any, element_ty: Any, shape: Any) -> None:
        """`block_type.__init__`."""
        key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        name = self._names.get((element_ty.name, key))
        if name is None:
            self._make_type(made, element_ty, shape)
            self._of_types[key] = made.shape, made.numel
            self._names[element_ty.name, key] = made.name
            return
        made.element_ty, made.name = element_ty, name
        made.shape, made.numel = self._of_types[key]

    def value(self, made: Any, handle: Any, type: Any) -> None:
        """`tensor.__init__`."""
        made.handle, made.type, made.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        told = self._of_values.get(key)
        if told is None:
            told = self._of_values[key] = tl.core.tuple([tl.constexpr(size) for size in key]), tl.constexpr(math.prod(key))
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
    TritonSemantic.binary_op_sanitize_overflow_impl = unheard(TritonSemantic.binary_op_sanitize_overflow_impl)
