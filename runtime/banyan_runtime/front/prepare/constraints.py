"""What a request demands of its output: the many fields that can say so become one `wire.Grammar`, which is compiled here
once, so that one that is wrong or endless never reaches the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from banyan_runtime.front.errors import ApiError, bad_grammar, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.parsing import check_name
from banyan_runtime.grammar import schema
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.limits import MAX_ALTERNATIVES, MAX_REGEX_BYTES, check_count, check_ebnf, check_text
from banyan_runtime.grammar.llguidance import LlguidanceBackend
from banyan_runtime.grammar.structural import read_structural
from banyan_runtime.grammar.trial import Trial
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Constraint, Grammar

TRIAL_CPU_S: Final = 3.0
"""Of computing time, far below what the engine waits for it; then a grammar is given up, with the process that compiles it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A constraint, and whom to blame for it."""

    grammar: Grammar
    param: str  # the client's field
    name: str = ""  # of a response_format's schema
    what: str = "schema"  # that the client wrote

    def refusal(self, reason: str) -> ApiError:
        return bad_grammar(self.param, self.what, self.name, reason)

    def constraint(self, after: int = -1, opens: int = -1, kind: str = "") -> Constraint:
        return Constraint(self.grammar, after, opens, self.param, self.what, self.name, kind)


Guard = Callable[[ApiError], AbstractContextManager[None]]
"""Around the trial of a grammar: it may answer for it with this error, where the trial does not end."""


class Constraints:
    """Grammars, tried. Without a `trial` there are none, for the reason `lacking`."""

    def __init__(self, trial: Trial | None, lacking: str = "this server has no grammar backend") -> None:
        self._trial = trial
        self._lacking = lacking
        self.guard: Guard = lambda refusal: nullcontext()

    @staticmethod
    def load(tokenizer_dir: Path, eos_ids: Iterable[int]) -> Constraints:
        """For the tokenizer in a folder; takes a second or two for a large one."""
        try:
            vocabulary = Vocabulary.load(tokenizer_dir, 0, eos_ids)
            return Constraints(Trial(LlguidanceBackend(vocabulary), vocabulary.size))
        except GrammarError as error:
            return Constraints(None, str(error))

    def of(self, asked: object) -> Constraint | None:
        """What `asked_of` finds, tried. Raises ApiError."""
        found = asked_of(asked)
        if found is None:
            return None
        self.check(found)
        return found.constraint()

    def usable(self, grammar: Grammar) -> bool:
        """Whether `check` takes it."""
        try:
            self.check(Asked(grammar, "tools"))
        except ApiError:
            return False
        return True

    def problem(self, grammar: Grammar) -> str | None:
        """Why `check` does not take it."""
        try:
            if self._trial is not None:
                self._try(self._trial, Asked(grammar, "tools"))
        except GrammarError as error:
            return str(error)
        return None

    def check(self, asked: Asked) -> None:
        """Raises ApiError for a grammar that cannot be used."""
        if self._trial is None:
            raise unsupported(asked.param, self._lacking.rstrip("."))
        try:
            self._try(self._trial, asked)
        except GrammarError as error:
            raise asked.refusal(str(error)) from None

    def _try(self, trial: Trial, asked: Asked) -> None:
        if trial.knows(asked.grammar):
            trial.check(asked.grammar)
            return
        with self.guard(asked.refusal(f"it could not be compiled within {TRIAL_CPU_S:g} s.")):
            trial.check(asked.grammar)


def asked_of(asked: object) -> Asked | None:
    """The grammar that a request's fields ask for, with the field that it came from; None: none. It is checked but not compiled.
    Raises ApiError.

    `asked` has any of `_READERS` as attributes, each as it came in JSON.
    """
    found: list[Asked] = []
    for name, read in _READERS.items():
        value = getattr(asked, name, None)
        if value is None or value is False or value == "":
            continue
        one = read(name, value)
        if one is not None:
            found.append(one)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        message = f"'{first}' and '{second}' exclude each other: an output can have one constraint. Remove one of them."
        raise invalid(second, message, beside=[first])
    return found[0] if found else None


_WORDS: Final = {"json_schema": "schema", "regex": "regex", "choice": "choices", "ebnf": "grammar", "structural_tag": "structural tag"}


def _checked(param: str, kind: str, make: Callable[[], str], *, name: str = "", whitespace: str = "bounded") -> Asked:
    try:
        return Asked(Grammar(kind, make(), whitespace), param, name, _WORDS[kind])
    except GrammarError as error:
        raise bad_grammar(param, _WORDS[kind], name, str(error)) from None


# --- one reader a form ---


def _json_schema(param: str, value: Any, name: str = "", whitespace: str = "bounded") -> Asked:
    """A schema as an object, or as its JSON text."""
    if isinstance(value, str):
        value = _object(param, value, name)
    return _checked(param, "json_schema", lambda: schema.prepare(value), name=name, whitespace=whitespace)


def _object(param: str, text: str, name: str = "") -> Any:
    """What a schema's JSON text says. Raises ApiError."""
    try:
        check_text(text, "the schema")
        return msgspec.json.decode(text)
    except (GrammarError, msgspec.DecodeError, RecursionError) as error:
        raise bad_grammar(param, "schema", name, f"it is not JSON: {error}") from None


def _json_object(param: str, whitespace: str = "bounded") -> Asked:
    return Asked(Grammar("json_object", "", whitespace), param)


def _regex(param: str, value: Any) -> Asked:
    def make() -> str:
        text = _string(param, value)
        check_text(text, "the regex", MAX_REGEX_BYTES)
        return text

    return _checked(param, "regex", make)


def _ebnf(param: str, value: Any) -> Asked:
    def make() -> str:
        text = _string(param, value)
        check_ebnf(text, "the grammar")
        return text

    return _checked(param, "ebnf", make)


def _choice(param: str, value: Any) -> Asked:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid_type(param, "expected an array of strings.")

    def make() -> str:
        if not value:
            raise GrammarError("there is nothing to choose from.")
        check_count(len(value), "alternatives", MAX_ALTERNATIVES)
        for item in value:
            check_text(item, "a choice")
        text = msgspec.json.encode(list(dict.fromkeys(value))).decode()
        check_text(text, "the list of choices")
        return text

    return _checked(param, "choice", make)


def _structural_tag(param: str, value: Any) -> Asked:
    if not isinstance(value, str | dict):
        raise invalid_type(param, "expected an object.")
    return _checked(param, "structural_tag", lambda: read_structural(value))


def _string(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid_type(param, "expected a string.")
    return value


def _response_format(param: str, value: Any) -> Asked | None:
    if not isinstance(value, dict):
        raise invalid_type(param, "expected an object.")
    kind = value.get("type")
    if kind is None:
        raise missing(f"{param}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's and Together's form. An empty schema says no more than that it is an object.
        described = value.get("schema")
        return _json_object(param) if described in (None, {}) else _json_schema(param, described)
    if kind == "structural_tag":
        return _structural_tag(param, value)
    if kind != "json_schema":
        message = (
            f"Invalid value for '{param}.type': {str(kind)[:64]!r}. Supported values are: text, json_object, json_schema, structural_tag."
        )
        raise invalid(f"{param}.type", message)
    described = value.get("json_schema")
    if described is None:
        raise missing(f"{param}.json_schema")
    if not isinstance(described, dict):
        raise invalid_type(f"{param}.json_schema", "expected an object.")
    name = described.get("name")
    if not isinstance(name, str | None):
        raise invalid_type(f"{param}.json_schema.name", "expected a string.")
    if name is not None:
        check_name(f"{param}.json_schema.name", name)
    if not isinstance(described.get("strict"), bool | None):
        raise invalid_type(f"{param}.json_schema.strict", "expected a boolean.")
    if described.get("schema") is None:
        raise missing(f"{param}.json_schema.schema")
    return _json_schema(param, described["schema"], name or "")


_OUTPUTS: Final[Mapping[str, Callable[[str, Any], Asked]]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}


def _structured_outputs(param: str, value: Any) -> Asked | None:
    """vLLM's object: one constraint, and how to write JSON."""
    if not isinstance(value, dict):
        raise invalid_type(param, "expected an object.")
    if value.get("whitespace_pattern") is not None:
        raise unsupported(f"{param}.whitespace_pattern", "the blanks between the parts of JSON are bounded")
    if value.get("disable_additional_properties") and isinstance(value.get("json"), dict | str):
        value = {**value, "json": _closed(f"{param}.json", value["json"])}
    found = [_OUTPUTS[name](f"{param}.{name}", given) for name in _OUTPUTS if (given := value.get(name)) is not None]
    if value.get("json_object"):
        found.append(_json_object(f"{param}.json_object"))
    if len(found) > 1:
        raise invalid(param, f"'{found[0].param}' and '{found[1].param}' exclude each other: an output can have one constraint.")
    if not found:
        return None
    one = found[0]
    if value.get("disable_any_whitespace"):
        one = dataclasses.replace(one, grammar=msgspec.structs.replace(one.grammar, whitespace="none"))
    return one


def _closed(param: str, given: dict[str, Any] | str) -> Any:
    """The schema, in which no object has properties beside those that it names. Raises ApiError."""
    value = _object(param, given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        return value
    _checked(param, "json_schema", lambda: schema.prepare(value))  # before anything else looks at all of it
    closed = msgspec.json.decode(msgspec.json.encode(value))
    for _, part in schema.parts(closed):
        if part.get("type") == "object" or "properties" in part:
            part.setdefault("additionalProperties", False)
    return closed


_READERS: Final[Mapping[str, Callable[[str, Any], Asked | None]]] = {
    "response_format": _response_format,
    "regex": _regex,
    "ebnf": _ebnf,
    "json_schema": _json_schema,
    "structural_tag": _structural_tag,
    "structured_outputs": _structured_outputs,
}
"""The fields of a request that may hold a constraint. Where a request has several that do, it is refused."""
