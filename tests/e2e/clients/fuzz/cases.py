"""Requests drawn from an OpenAPI document: what it describes, what is nearly that, and what no client would send."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from tests.e2e.clients.fuzz.values import Json, Raw, Values, write

METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
HEADERS: Final = (
    "X-Request-Id: " + "a" * 500,
    "X-Request-Id: \xe9\x01",
    "Authorization: Bearer",
    "Authorization: Basic \xff",
    "Authorization: Bearer " + "k" * 3000,
    "x-api-key: None",
    "Content-Encoding: gzip",
    "Accept: text/html;q=0.9",
    "Accept-Encoding: gzip, br",
    "Expect: 100-continue",
    "Origin: https://example.com",
    "Origin: null",
    "Host: example.com",
    "traceparent: 00-zz-1-01",
    "Range: bytes=0-1",
    "If-None-Match: *",
    "X-Forwarded-For: 1.2.3.4",
    "Transfer-Encoding: identity",
    "Cookie: " + "a=b; " * 200,
    "anthropic-version: 1",
)
TYPES: Final = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "",
    "a/b/c",
)
PATHS: Final = ("a", "resp_0", "../x", "%00", "%2e%2e%2f", "é", "x" * 3000, "a%2Fb", "tiny", "%ff", "%", " ")
QUERIES: Final = ("a", "1", "-1", "true", "99999999999999999999", "", "%00", "\u00e9", "core,memory", "json", "prometheus", "1e3", "asc")
LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
OFTEN: Final = {"/v1/chat/completions": 6, "/v1/completions": 4, "/v1/responses": 3, "/v1/messages": 3, "/generate": 2}
"""Paths that most can go wrong with: they get so many shares."""
SHORT: Final = 6
"""Tokens that most answers are limited to."""
MOST_CHOICES: Final = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One request as the bytes of its head and body, and when the client turns away: None, "sent", "answered", or "half" of it sent."""

    method: str
    target: str
    head: bytes
    body: bytes
    leaves: str | None = None

    @property
    def bytes(self) -> bytes:
        return self.head + self.body

    def __str__(self) -> str:
        return f"{self.head.decode('latin-1')!r} {self.body[:1500]!r} ({len(self.body)} bytes) leaves={self.leaves}"


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    told: Mapping[str, Any]


class Cases:
    """An endless row of cases; the same for the same seed, but for the ids in `known`, which answers brought."""

    def __init__(self, document: Mapping[str, Any], seed: int, known: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self.known = known
        self.values = Values(self.random, document["components"]["schemas"])
        every = [Operation(method.upper(), path, told) for path, of in document["paths"].items() for method, told in of.items()]
        self.with_body = [operation for operation in every if "requestBody" in operation.told for _ in range(OFTEN.get(operation.path, 1))]
        self.without = [operation for operation in every if "requestBody" not in operation.told]

    def next(self) -> Case:
        draw = self.random
        operation = draw.choice(self.with_body if draw.random() < 0.8 else self.without)
        method = draw.choice(METHODS) if draw.random() < 0.05 else operation.method
        target = self._target(operation)
        kind, body = self._body(operation)
        if draw.random() < 0.04:
            kind = draw.choice(TYPES)
        headers = ["Host: server", *draw.sample(HEADERS, draw.choice((0,) * 8 + (1, 3)))]
        if kind:
            headers.append(f"Content-Type: {kind}")
        if draw.random() < 0.01:
            headers += [f"X-Extra-{number}: {'v' * draw.choice((1, 200))}" for number in range(300)]
        if draw.random() < 0.05:
            headers.append("Transfer-Encoding: chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part) + b"0\r\n\r\n"
        elif body or method not in ("GET", "HEAD"):
            headers.append(f"Content-Length: {len(body)}")
        leaves = draw.choice(("sent", "answered", "half")) if draw.random() < 0.05 else None
        head = "\r\n".join((f"{method} {target} HTTP/1.1", *headers, "", "")).encode("latin-1", "replace")
        return Case(method, target, head, body, leaves)

    def _target(self, operation: Operation) -> str:
        draw = self.random
        path, query = operation.path, []
        for parameter in operation.told.get("parameters", ()):
            name = parameter["name"]
            if parameter["in"] == "path":
                of = quote(draw.choice(self.known)) if self.known and draw.random() < 0.6 else draw.choice(PATHS)
                path = path.replace("{" + name + "}", quote(of, safe="%/.") if draw.random() < 0.9 else of.replace(" ", "%20"))
            elif parameter["in"] == "query" and draw.random() < 0.4:
                query.append(f"{name}={quote(draw.choice(QUERIES), safe='%')}")
        if draw.random() < 0.03:
            path += draw.choice(("/", "//", "/x", "?", ";a", "%00", "/../../metrics", "#"))
        return path + ("?" + "&".join(query) if query else "")

    def _body(self, operation: Operation) -> tuple[str, bytes]:
        draw = self.random
        content = operation.told.get("requestBody", {}).get("content", {})
        if not content:
            return ("application/json", write(self.values.odd()).encode()) if draw.random() < 0.1 else ("", b"")
        ((kind, of),) = content.items()
        if kind == "multipart/form-data":
            return self._form(of["schema"])
        value = self._bounded(self._changed(self.values.fitting(of["schema"])))
        text = write(self.values.odd() if draw.random() < 0.03 else value).encode()
        return kind, self._broken(text) if draw.random() < 0.05 else text

    def _changed(self, value: Json) -> Json:
        """With some field, at some depth, replaced, added or taken away."""
        draw = self.random
        while draw.random() < 0.35:
            at = value
            while isinstance(at, dict) and at:
                name = draw.choice(list(at))
                if isinstance(at[name], dict | list) and at[name] and draw.random() < 0.5:
                    at[name] = at = at[name].copy()  # the row of likely values stays as it is
                    continue
                action = draw.randrange(4)
                if action == 0:
                    del at[name]
                elif action == 1:
                    at[draw.choice(("colour", "__class__", "n", "rid", "stream", "seed", "priority"))] = self.values.odd()
                else:
                    at[name] = self.values.odd()
                break
            if isinstance(at, list) and at:
                at[draw.randrange(len(at))] = self.values.odd()
        return value

    def _bounded(self, body: Json) -> Json:
        """Most requests are kept short, and few are many: what the server may be asked at length is a matter of patience, not of sense."""
        if not isinstance(body, dict) or self.random.random() < 0.01:
            return body
        asked = body.get("sampling_params") if "sampling_params" in body else body
        for options in asked if isinstance(asked, list) else (asked,):
            if not isinstance(options, dict):
                continue
            for name in (*LENGTHS, "min_tokens"):
                if not isinstance(options.get(name), int) or options[name] <= SHORT or self.random.random() < 0.7:
                    continue
                options[name] = SHORT
            if not any(options.get(name) for name in LENGTHS) and self.random.random() < 0.95:
                options[self.random.choice(LENGTHS)] = SHORT
                options.setdefault("max_tokens", SHORT)
                options.setdefault("max_output_tokens" if "input" in body else "max_tokens", SHORT)
            for name in ("n", "best_of"):
                if isinstance(options.get(name), int) and MOST_CHOICES < options[name] <= 128:
                    options[name] = MOST_CHOICES
        if body.get("abort_all") is True:  # would end the requests of the other connections
            body["abort_all"] = False
        return body

    def _broken(self, text: bytes) -> bytes:
        """Bytes that are no JSON, or no text."""
        draw, at = self.random, self.random.randrange(len(text) + 1)
        return draw.choice(
            (
                b"",
                text[:at],
                text + text,
                b"\xef\xbb\xbf" + text,
                text[:at] + b"\xff\xfe" + text[at:],
                text.decode().encode("utf-16"),
                b"\x1f\x8b" + text,
            )
        )

    def _form(self, schema: Mapping[str, Any]) -> tuple[str, bytes]:
        draw = self.random
        line = write(
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": [], "max_tokens": 2}}
        )
        parts = []
        for name in schema["properties"]:
            if draw.random() < 0.1:
                continue
            file = f'; filename="{draw.choice(("a.jsonl", "", "../x", "x" * 300))}"' if name == "file" else ""
            text = (
                draw.choice((line + "\n", line, "", "{", "\x00" * 100, write(self.values.odd())))
                if file
                else draw.choice(("batch", "batch", "", "x"))
            )
            parts.append(f'--cut\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n{text}\r\n')
        body = ("".join(parts) + draw.choice(("--cut--\r\n", "--cut--\r\n", "--cut--\r\n", "", "--cu"))).encode()
        return draw.choice(
            ("multipart/form-data; boundary=cut",) * 6 + ("multipart/form-data; boundary=", "multipart/form-data; boundary=other")
        ), body


__all__ = ["Case", "Cases", "Raw"]
