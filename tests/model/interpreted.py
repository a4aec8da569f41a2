"""Triton's interpreter, made quick: it computes what it computes without this, and looks up only once what it patches.

For each launch, and for each call from a kernel to another function, it looks through all of `triton.language` for what is to be replaced
while kernels run, which takes as long as the kernels. What it finds is always the same, and within a launch it is replaced already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
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


def hasten() -> None:
    if not isinstance(interpreter._patch_lang, Patching):
        interpreter._patch_lang = Patching(interpreter._patch_lang)
