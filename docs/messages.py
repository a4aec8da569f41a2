"""Writes docs/messages.md, the catalogue of messages: `python docs/messages.py`; with `--check` it only tells if that is out of date.

It parses the sources of both packages and imports none of them. A message is the text of a call to a *speaker*: an exception class of
the product, a class or call of the tables below, or a function annotated to return such a class. A text that is made elsewhere (a
local variable, a constant, a function that returns it) is followed there. If a sentence is missing, raise it as a typed exception, or
add its call to the tables.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path, PurePath
from typing import Final

PACKAGES: Final = ("operator/banyan_operator", "runtime/banyan_runtime")
PAGE: Final = "docs/messages.md"
HEAD: Final = """\
# Messages

What Banyan says when something is wrong or has happened: errors, refusals, conditions, events, and log lines from warnings on. In a text
`{name}` is a value, `{one / other}` one of several texts, `[text]` a text that is not always there. Written by `make messages`.
"""
CARRIERS: Final = {
    "Because": "condition", "Diagnosis": "condition", "Finding": "condition", "Stop": "condition", "_Exit": "condition", "Event": "event",
    "Problem": "problem", "Rule": "problem", "Transition": "problem", "Failed": "answer", "Invalid": "batch line", "NoAnswer": "batch line",
    "_Error": "batch line",
}  # fmt: skip
"""Classes that are no exceptions and bear a text that a user reads, and what the catalogue calls them."""
CALLS: Final = {
    "log.warning": "log", "log.error": "log", "log.exception": "log", "log.log": "log", "trouble": "log", "say": "output",
    "print": "stderr", "sys.exit": "stderr", "error": "usage", "ArgumentTypeError": "usage", "PydanticCustomError": "problem",
    "ValueError": "part",
}  # fmt: skip
"""Calls to others that say a text, by their last name or two, and what the catalogue calls them."""
SECOND: Final = frozenset({"log.log", "PydanticCustomError"})
"""Of these, those whose text is the second argument."""
TABLES: Final = ("arguments.REFUSED", "grammar.keywords._FORMS", "batch.source._OTHERS")
"""Constants that hold parts of messages."""
VALUE_ERRORS: Final = ("api.quantity", "cluster.options", "front.keys", "hub.files")
"""Modules whose ValueErrors reach a user, within another message; those of others are assertions."""
PASSING: Final = frozenset({"_ended", "_fail", "_refuse"})
"""Functions that pass a text on to a speaker and return something else."""
INTERNAL: Final = frozenset({"ChannelError", "UnsupportedStep", "_Ended"})
"""Exceptions that no user reads: they pass between our own processes, or are assertions."""
FIELDS: Final = ("status", "type", "code", "param", "field", "reason", "exit_code")
SAME: Final = frozenset({"capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "repr", "rstrip", "str", "strip"})
"""Functions and methods that leave a text what it is."""
DEPTH: Final = 4  # calls that a text is followed through
WORDS: Final = re.compile(r"[A-Za-z']{2,}[,:;.)]? [A-Za-z('{]*[A-Za-z]{2,}")  # what has these is a message
VALUE: Final = re.compile(r"\{[^{}/]*\}")
CODE: Final = re.compile(r"[a-z]+(_[a-z]+)+|unsupported|([A-Z][a-z]+){2,}")
SAYING: Final = (ast.Call, ast.Tuple, ast.Dict, ast.FunctionDef, ast.AsyncFunctionDef)
LEAVES: Final = (ast.Name, ast.Constant)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Module:
    """One file: what it defines, where its imports lead, and the nodes that may say something, with the function and class around."""

    name: str
    path: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    defined: dict[str, ast.AST] = field(default_factory=dict)
    nodes: list[tuple[ast.AST, Function | None, ast.ClassDef | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.defined[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.defined[name] = value
        self._walk(self.tree, None, None)

    def _walk(self, node: ast.AST, function: Function | None, owner: ast.ClassDef | None) -> None:
        if isinstance(node, SAYING):
            self.nodes.append((node, function, owner))
        if isinstance(node, ast.ImportFrom):
            self.imports |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, Function):
            self.defined.setdefault(node.name, node)
            function = node
        elif isinstance(node, ast.ClassDef):
            self.defined.setdefault(node.name, node)
            owner = node
        for name in node._fields:
            value = getattr(node, name)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child._fields and not isinstance(child, LEAVES):
                    self._walk(child, function, owner)


@dataclass(frozen=True, eq=False)
class Scope:
    """Where an expression stands. `known`: texts of the function's parameters; `seen`: local names that are being looked up."""

    module: Module
    function: Function | None = None
    owner: ast.ClassDef | None = None
    known: Mapping[str, list[str]] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    depth: int = 0


@dataclass(frozen=True, order=True)
class Message:
    """One row of the catalogue."""

    path: str
    speaker: str
    fields: str
    text: str


class Sources:
    """All modules of some packages, and what they say."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.modules: dict[str, Module] = {}
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                name = ".".join(path.relative_to((root / package).parent).with_suffix("").parts).removesuffix(".__init__")
                self.modules[name] = Module(name, path.relative_to(root).as_posix(), ast.parse(path.read_text()))
        self.find = cache(self._find)

    def messages(self) -> list[Message]:
        """Every message, sorted. What a function returns that tells why not (`-> str | None`) is one, unless it is part of another."""
        found: set[Message] = set()
        reasons: set[Message] = set()
        for module in self.modules.values():
            for name, node in module.defined.items():
                if f"{module.name}.{name}".endswith(TABLES):
                    reasons |= {Message(module.path, "part", "", text) for text in self._parts(node, Scope(module))}
            for node, function, owner in module.nodes:
                scope = Scope(module, function, owner)
                if isinstance(node, Function):
                    if node.returns is not None and ast.unparse(node.returns) == "str | None":
                        texts = [text for value in _returned(node) for text in self.texts(value, Scope(module, node))]
                        reasons |= {Message(module.path, "part", "", text) for text in texts}
                else:
                    said = self._of_call(node, scope) if isinstance(node, ast.Call) else self._of_pair(node, scope)
                    found |= {replace(one, path=module.path) for one in said}
        everything = "\n".join(one.text for one in found)
        known = found | {one for one in reasons if one.text not in everything}
        return sorted(one for one in known if WORDS.search(one.text) and "{%" not in one.text)

    # --- who says it ---

    def _of_pair(self, node: ast.AST, scope: Scope) -> Iterator[Message]:
        """A code and its text in a tuple, or as a key and a tuple."""
        pairs: list[tuple[ast.expr | None, list[ast.expr]]] = []
        if isinstance(node, ast.Tuple) and len(node.elts) < 4:
            pairs = [(code, [text]) for code, text in zip(node.elts, node.elts[1:], strict=False)]
        elif isinstance(node, ast.Dict):
            pairs = [(key, one.elts) for key, one in zip(node.keys, node.values, strict=True) if isinstance(one, ast.Tuple)]
        for code, texts in pairs:
            if isinstance(code, ast.Constant) and isinstance(code.value, str) and CODE.fullmatch(code.value):
                for one in texts:
                    yield from (Message("", "refusal", f"code={code.value}", text) for text in self.texts(one, scope))

    def _of_call(self, call: ast.Call, scope: Scope) -> Iterator[Message]:
        dotted = _dotted(call.func)
        short = ".".join(dotted.split(".")[-2:]) if "." in dotted else dotted
        short = short if short in CALLS else dotted.rpartition(".")[2].lstrip("_")
        label = CALLS.get(short)
        home, target = self.find(dotted, scope.module)
        if dotted == "super.__init__" and scope.owner is not None and scope.owner.bases and self.speaks(scope.module, scope.owner):
            home, target = self.find(_dotted(scope.owner.bases[0]), scope.module)
            line = [scope.owner, *self._line(home, target)] if isinstance(target, ast.ClassDef) else [scope.owner]
            yield from self._of_class(line, _parameters(line[1:]), call, scope)
        elif isinstance(target, ast.ClassDef) and self.speaks(home, target):
            line = list(self._line(home, target))
            yield from self._of_class(line, _parameters(line), call, scope)
        elif isinstance(target, Function) and self._passes(home, target):
            yield from self._of_function(home, target, call, scope)
        elif short == "ValueError" and not scope.module.name.endswith(VALUE_ERRORS):
            return
        elif label is not None and len(call.args) > (at := short in SECOND):
            if short != "print" or any(_dotted(one.value) == "sys.stderr" for one in call.keywords):
                values = [_name(one) for one in call.args[at + 1 :]]
                for text in self.texts(call.args[at], scope):
                    yield Message("", label, "", _printf(text, values) if label == "log" else text)
        else:
            said = [text for one in call.keywords if one.arg == "message" for text in self.texts(one.value, scope)]
            yield from (Message("", "message", "", text) for text in said)

    def _of_class(self, line: list[ast.ClassDef], parameters: list[str], call: ast.Call, scope: Scope) -> Iterator[Message]:
        given = self._given(parameters, call, scope)
        fields = {name: given[name] for name in FIELDS if name in given}
        for statement in (one for node in line for one in node.body):
            match statement:
                case ast.Assign(targets=[ast.Name(id="code" | "exit_code" as name)], value=ast.Constant(value=word)):
                    fields.setdefault(name, [str(word)])
        shown = [f"{name}={_one(texts)}" for name, texts in fields.items() if not all(VALUE.fullmatch(text) or not text for text in texts)]
        hints = given.get("hint") or [""]
        texts = [f"{text}; {hint}" if hint else text for text in given.get("message") or () for hint in hints]
        for text in texts or [text for name, texts in given.items() if name not in FIELDS for text in texts]:
            yield Message("", CARRIERS.get(line[0].name, line[0].name), ", ".join(shown), text)

    def _of_function(self, home: Module, node: Function, call: ast.Call, scope: Scope) -> Iterator[Message]:
        given = self._given(_arguments(node), call, scope)
        worded = [text for texts in given.values() for text in texts if WORDS.search(text)]
        if worded and scope.depth < DEPTH:
            inner = Scope(home, node, known=self._defaults(home, node) | given, depth=scope.depth + 1)
            made = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            found = [said for one in made for said in self._of_call(one, inner) if any(text in said.text for text in worded)]
            yield from found or (Message("", "message", "", text) for text in worded)

    def speaks(self, home: Module, node: ast.ClassDef) -> bool:
        """Whether a class is one of CARRIERS or an exception."""
        for base in node.bases:
            where, found = self.find(_dotted(base), home)
            inherits = self.speaks(where, found) if isinstance(found, ast.ClassDef) else _dotted(base).endswith(("Error", "Exception"))
            if inherits and node.name not in INTERNAL:
                return True
        return node.name in CARRIERS

    def _passes(self, home: Module, node: Function) -> bool:
        made = ast.unparse(node.returns).removesuffix(" | None") if node.returns is not None else ""
        where, found = self.find(made, home)
        return node.name in PASSING or (isinstance(found, ast.ClassDef) and self.speaks(where, found))

    def _line(self, home: Module, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class and those that it is derived from."""
        yield node
        for base in node.bases:
            where, found = self.find(_dotted(base), home)
            if isinstance(found, ast.ClassDef):
                yield from self._line(where, found)

    def _find(self, dotted: str, module: Module) -> tuple[Module, ast.AST | None]:
        """What a name leads to, and the module of that."""
        base, _, name = dotted.rpartition(".")
        here = module.imports.get(name, f"{module.name}.{name}") if base in ("", "self", "cls") else f"{module.imports.get(base)}.{name}"
        source, _, name = here.rpartition(".")
        home = self.modules.get(source, module)
        if home is not module and name in home.imports:
            return self._find(name, home)
        return home, home.defined.get(name) if source in self.modules else None

    # --- what it says ---

    def _given(self, names: list[str], call: ast.Call, scope: Scope) -> dict[str, list[str]]:
        pairs = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords if one.arg)]
        return {name: self.texts(one, scope) for name, one in pairs if not isinstance(one, ast.Starred)}

    def _defaults(self, home: Module, node: Function) -> dict[str, list[str]]:
        pairs = [*zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)]
        pairs += [(name, value) for name, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value is not None]
        return {name.arg: self.texts(value, Scope(home)) for name, value in pairs}

    def texts(self, node: ast.expr, scope: Scope) -> list[str]:
        """The texts that an expression may have; what is not literal in them is `{name}`."""
        match node:
            case ast.Constant(value=value):
                return ["" if value is None else str(value)]
            case ast.JoinedStr(values=parts):
                return ["".join(_one(self.texts(one, scope)) for one in parts)]
            case ast.FormattedValue(value=inner) | ast.Await(value=inner) | ast.NamedExpr(value=inner):
                return self.texts(inner, scope)
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) | ast.Call(func=ast.Name(id=name), args=[inner]) if name in SAME:
                return self.texts(inner, scope)
            case ast.Subscript(value=inner, slice=ast.Slice()):
                return self.texts(inner, scope)
            case ast.IfExp(test=ast.Name(id=name), body=inner) if scope.known.get(name) and all(scope.known[name]):
                return self.texts(inner, scope)
            case ast.IfExp(test=ast.Name(id=name), orelse=inner) if name in scope.known and not any(scope.known[name]):
                return self.texts(inner, scope)
            case ast.IfExp(body=inner, orelse=other):
                return [*self.texts(inner, scope), *self.texts(other, scope)]
            case ast.BoolOp(op=ast.Or(), values=values):
                return [text for one in values for text in self.texts(one, scope)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                joined = _one(self.texts(left, scope)) + _one(self.texts(right, scope))
                if _literal(joined):
                    return [joined]
            case ast.Name(id=name) if name in scope.known:
                return scope.known[name]
            case ast.Name(id=name):
                found = self._local(name, node.lineno, scope) or self._constant(name, scope)
                if any(map(_literal, found)):
                    return found
            case ast.Subscript(value=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get")):
                if found := self._constant(name, scope):
                    return found
            case ast.Call(func=func) if scope.depth < DEPTH:
                home, made = self.find(_dotted(func), scope.module)
                if isinstance(made, Function):
                    known = self._defaults(home, made) | self._given(_arguments(made), node, scope)
                    inside = Scope(home, made, known=known, depth=scope.depth + 1)
                    found = [text for value in _returned(made) for text in self.texts(value, inside)]
                    if any(WORDS.search(text) for text in found):
                        return found
        return ["{" + _name(node) + "}"]

    def _local(self, name: str, line: int, scope: Scope) -> list[str]:
        """Texts that a name of the function may have in a line."""
        if scope.function is None or name in scope.seen:
            return []
        found: list[str] = []
        for how, value in _reaching(scope.function.body, name, line, []):
            texts = self.texts(value, replace(scope, seen=scope.seen | {name}))
            found = [*found, *texts] if how == "=" else [before + _one([""] * (how == "?") + texts) for before in found]
        return found

    def _constant(self, name: str, scope: Scope) -> list[str]:
        """The text of a constant, or the texts in a dict."""
        match self.find(name, scope.module):
            case (home, ast.Constant(value=str()) | ast.JoinedStr() as value):
                return self.texts(value, Scope(home))
            case (home, ast.Dict(values=values)):
                texts = [text for one in values if not isinstance(one, ast.Dict) for text in self.texts(one, Scope(home))]
                return texts if any(WORDS.search(text) for text in texts) else []
        return []

    def _parts(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        """Each text of a table."""
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Name):
            yield from self.texts(node, scope)
        elif not (isinstance(node, ast.Call) and _dotted(node.func) == "re.compile"):
            for one in ast.iter_child_nodes(node):
                yield from self._parts(one, scope)


def _returned(node: Function) -> list[ast.expr]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]


def _reaching(block: list[ast.stmt], name: str, line: int, found: list[tuple[str, ast.expr]]) -> list[tuple[str, ast.expr]]:
    """What a block puts into `name` ('=') or adds to it ('+', '?' in a branch) before a line. `found`: the same of what comes before."""
    for statement in block:
        if statement.lineno > line:
            break
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name and (statement.end_lineno or 0) < line:
                found = [("=", value)]
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                found = [("=", value) for target, value in zip(targets, values, strict=False) if _dotted(target) == name] or found
            case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                found = [*found, ("+", value)]
            case ast.If(test=test) | ast.While(test=test):
                walrus = [one for one in ast.walk(test) if isinstance(one, ast.NamedExpr) and one.target.id == name]
                found = [("=", one.value) for one in walrus] or found
        before = found
        inner = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
        inner += [one.body for part in ("handlers", "cases") for one in getattr(statement, part, [])]
        for branch in inner if not isinstance(statement, Function | ast.ClassDef) else ():
            made = _reaching(branch, name, line, before)
            if branch and branch[0].lineno <= line <= (branch[-1].end_lineno or 0):
                return made
            if branch and not isinstance(branch[-1], ast.Return | ast.Raise | ast.Continue):
                found = [*found, *(("?" if how == "+" else how, value) for how, value in made if (how, value) not in found)]
    return found


def _arguments(node: Function) -> list[str]:
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]


def _parameters(line: list[ast.ClassDef]) -> list[str]:
    """What a class is made of: the parameters of its constructor, or its fields."""
    for node in line:
        made = [_arguments(one) for one in node.body if isinstance(one, Function) and one.name == "__init__"]
        if found := made[0] if made else [_dotted(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]:
            return found
    return ["message"]


def _literal(text: str) -> bool:
    return re.search(r"[^\W\d]|[:;,(]", VALUE.sub("", text)) is not None


def _printf(text: str, values: list[str]) -> str:
    rest = iter(values)
    return re.sub(r"%[-+.\d]*[sdfgrx]", lambda _: "{" + next(rest, "…") + "}", text).replace("%%", "%")


def _one(texts: list[str]) -> str:
    """Several texts as one."""
    known = list(dict.fromkeys(text for text in texts if text))
    if all(VALUE.fullmatch(text) for text in known):
        return "".join(known[:1])
    if len(known) == 1:
        return f"[{known[0]}]" if "" in texts else known[0]
    return "{" + " / ".join(text[1:-1] if VALUE.fullmatch(text) else text for text in known) + "}"


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case ast.Call(func=ast.Name(id="super")):
            return "super"
    return "?"


def _name(node: ast.AST) -> str:
    """A readable name for the value of an expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            return f"number of {_name(inner)}"
        case ast.Call(func=ast.Name(id="map"), args=[_, inner]) | ast.GeneratorExp(generators=[ast.comprehension(iter=inner)]):
            return _name(inner)
        case ast.Call(args=[ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call() | ast.GeneratorExp() as inner]):
            return _name(inner)
        case ast.Call(func=ast.Attribute(value=inner), args=[]) | ast.IfExp(body=inner):
            return _name(inner)
    return next((_name(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr) and not isinstance(one, ast.Constant)), "…")


def _folder(message: Message) -> str:
    return PurePath(message.path).parent.as_posix()


def page(messages: list[Message]) -> str:
    """The catalogue as Markdown: a table for each folder, a row for each message."""
    parts = [HEAD]
    for folder, rows in groupby(sorted(messages, key=lambda one: (_folder(one), one)), _folder):
        parts.append(f"\n## {folder}\n\n| Module | Kind | Code and fields | Text |\n|---|---|---|---|\n")
        for row in rows:
            text = row.text.replace("|", "\\|").replace("\n", "\\n")
            fence, blank = ("``", " ") if "`" in text else ("`", "")
            module = "/".join(PurePath(row.path).parts[2:])
            parts.append(f"| {module} | {row.speaker} | {row.fields} | {fence}{blank}{text}{blank}{fence} |\n")
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/messages.md from the sources.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is out of date")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the repository [this one]")
    options = parser.parse_args()
    gc.disable()  # the trees live until the end, so collecting garbage only costs time
    wanted, path = page(Sources(options.root).messages()), options.root / PAGE
    if not options.check:
        path.write_text(wanted)
        return 0
    there = path.read_text() if path.exists() else ""
    changes = list(difflib.unified_diff(there.splitlines(), wanted.splitlines(), PAGE, "the sources", n=0, lineterm=""))
    if changes:
        print("\n".join([*changes[:30], f"{PAGE} is out of date: make messages"]))
    return 1 if changes else 0


if __name__ == "__main__":
    raise SystemExit(main())
