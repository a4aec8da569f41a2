"""Runs as processes, in a folder or in S3, and what must hold of their results whatever happened."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

from banyan_runtime.batch.documents import State
from banyan_runtime.batch.entries import decode
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.store import NotFound
from tests.component.batch.driver import Child, Fault, start
from tests.support.s3.servers import Proxy, S3Server
from tests.support.server.scripted import ScriptedServer, line, scripted_server  # noqa: F401

ALL = "BANYAN_ALL_FAULTS" in os.environ or "BANYAN_KILL_POINTS" in os.environ  # make test-batch-faults
IN_FLIGHT = 4
QUICK = ["--max-backoff", "0.01", "--server-timeout", "20", "--storage-timeout", "20", "--max-concurrency", str(IN_FLIGHT)]

IN_BOTH = pytest.mark.parametrize("bench", ["folder", "s3"], indirect=True)

T = TypeVar("T")


class Bench:
    """One input and one output, and the runs between them."""

    def __init__(self, place: Location, folder: Path, server: ScriptedServer, environment: dict[str, str]) -> None:
        self.place = place
        self.folder = folder
        self.server = server
        self.environment = environment
        self.children: list[Child] = []
        self.ids: list[str | None] = []
        self._numbers = itertools.count()

    @property
    def in_s3(self) -> bool:
        return isinstance(self.place.store, S3Store)

    @property
    def output(self) -> Location:
        return self.place.child("out/")

    def give(self, lines: list[str] | bytes | int, name: str = "in.jsonl") -> None:
        """Write the input: lines, bytes, or so many lines whose prompts are their custom_ids."""
        if isinstance(lines, int):
            lines = [line(f"id-{i}", f"line {i}") for i in range(lines)]
        data = lines if isinstance(lines, bytes) else "".join(text + "\n" for text in lines).encode()
        self.ids = [_custom_id(text) for text in data.decode("utf-8-sig").splitlines() if text.strip()]
        where = self.place.child(name)
        where.store.put(where.key, data)

    def given(self) -> bytes:
        """The input as it is."""
        where = self.place.child("in.jsonl")
        return where.store.get(where.key)

    def known(self) -> list[str]:
        """What a message must tell of the input as it is, by which it is found again."""
        data, where = self.given(), self.place.child("in.jsonl")
        etag = [where.store.head(where.key).tag.strip('"')] if self.in_s3 else []
        return [str(len(data)), *etag, hashlib.sha256(data).hexdigest()]

    def start(self, *arguments: str, fault: Fault | None = None, **environment: str) -> Child:
        where = ["--input", self.place.child("in.jsonl").uri, "--output", self.output.uri, "--server", self.server.url]
        if "--retry-failed" in arguments:
            where = where[2:]
        folder = self.folder / f"run-{next(self._numbers)}"
        child = start([*where, *QUICK, *arguments], folder, self.environment | environment, fault)
        self.children.append(child)
        return child

    def run(self, *arguments: str, exit_code: int = 0, fault: Fault | None = None, **environment: str) -> Child:
        child = self.start(*arguments, fault=fault, **environment)
        code = child.wait()
        assert code == exit_code, f"exit {code}, not {exit_code}:\n{child.said}"
        return child

    def read(self, name: str) -> bytes | None:
        where = self.output.child(name)
        try:
            return where.store.get(where.key)
        except NotFound:
            return None

    def keys(self) -> list[str]:
        """Everything below the output but what runs keep for themselves."""
        keys = (info.key.removeprefix(self.output.key) for info in self.output.store.list(self.output.key))
        return sorted(key for key in keys if not key.startswith(".banyan/"))

    @property
    def results(self) -> dict[str, bytes | None]:
        return {name: self.read(name) for name in ("output.jsonl", "errors.jsonl", "manifest.json")}

    def entries(self, name: str) -> list[dict[str, Any]]:
        data = self.read(name)
        assert data is not None, f"no {name}"
        assert not data or data.endswith(b"\n")
        return [json.loads(text) for text in data.decode().split("\n")[:-1]]

    def check(self) -> dict[str, Any]:
        """Assert all that must hold of published results; returns the manifest."""
        output, errors = self.entries("output.jsonl"), self.entries("errors.jsonl")
        assert len(output) + len(errors) == len(self.ids)
        ids = [entry["id"] for entry in output + errors]
        assert len(set(ids)) == len(ids), "a line has two outcomes"
        order: dict[str | None, list[int]] = {}
        for number, custom_id in enumerate(self.ids):
            order.setdefault(custom_id, []).append(number)
        for entries in (output, errors):
            at = -1
            for entry in entries:
                following = [number for number in order[entry["custom_id"]] if number > at]
                assert following, f"{entry['custom_id']} stands too late, or twice"
                at = following[0]
        good = [entry["custom_id"] for entry in output]
        assert len(set(good)) == len(good)
        for entry in output:
            said = entry["response"]["body"]["choices"][0]["message"]["content"]
            assert said.startswith("You said: "), said
        data = self.read("manifest.json")
        assert data is not None
        manifest: dict[str, Any] = json.loads(data)
        assert manifest["state"] == "complete"
        assert manifest["requestCounts"]["total"] == len(self.ids)
        assert manifest["requestCounts"]["completed"] == len(output)
        for kind, entries in (("output", output), ("errors", errors)):
            there = self.read(f"{kind}.jsonl")
            assert there is not None
            told = manifest[kind]
            assert (told["bytes"], told["lines"]) == (len(there), len(entries))
            assert told["sha256"] == hashlib.sha256(there).hexdigest()
            where = self.output.child(f"{kind}.jsonl")
            assert told["etag"] == where.store.head(where.key).tag
        return manifest

    @property
    def owner(self) -> str:
        """The run that has the output."""
        data = self.read(".banyan/owner.json")
        assert data is not None
        return str(json.loads(data)["run"])

    @property
    def states(self) -> list[State]:
        """Of the shards of an unfinished run."""
        store = self.output.store
        return [State.decode(store.get(info.key)) for info in list(store.list(self.output.child(".banyan/").key)) if "/shards/" in info.key]

    @property
    def recorded(self) -> set[str]:
        """custom_ids of the lines that an unfinished run has recorded: what shards' states name, as far as it is whole."""
        store, found = self.output.store, set()
        for state in self.states:
            for part in state.all_parts:
                with contextlib.suppress(NotFound):
                    for record in store.get(self.output.child(part.key).key).splitlines(keepends=True):
                        if (entry := decode(record)) is None:
                            break
                        found.add(json.loads(bytes(entry.line))["custom_id"])
        return found

    @property
    def repeated(self) -> int:
        """Requests beyond the first for each line."""
        return sum(count - 1 for count in self.server.tries.values())

    def eventually(self, seen: Callable[[], bool], limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not seen():
            assert time.monotonic() < deadline, "\n".join(child.said for child in self.children)
            time.sleep(0.01)

    def close(self) -> None:
        for child in self.children:
            if child.running:
                child.process.kill()
            child.process.join()


def _custom_id(text: str) -> str | None:
    try:
        custom_id = json.loads(text)["custom_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return custom_id if isinstance(custom_id, str) else None


@pytest.fixture
def folder_bench(server: ScriptedServer, tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "data").mkdir()
    bench = Bench(Location(LocalStore(tmp_path / "data"), ""), tmp_path / "runs", server, {})
    yield bench
    bench.close()


def s3_bench(weed: S3Server, server: ScriptedServer, folder: Path) -> Bench:
    store = S3Store(f"faults-{uuid.uuid4().hex[:12]}", weed.settings())
    store.client.create_bucket(Bucket=store.bucket)
    return Bench(Location(store, ""), folder, server, weed.environment())


@pytest.fixture
def bucket_bench(weed: S3Server, server: ScriptedServer, tmp_path: Path) -> Iterator[Bench]:
    bench = s3_bench(weed, server, tmp_path / "runs")
    yield bench
    bench.close()


@pytest.fixture
def proxied(weed: S3Server, server: ScriptedServer, tmp_path: Path) -> Iterator[tuple[Bench, Proxy]]:
    """A run whose processes reach S3 through a proxy that breaks things; the test itself reaches it directly."""
    bench, proxy = s3_bench(weed, server, tmp_path / "runs"), Proxy(weed.endpoint)
    bench.environment = bench.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}
    yield bench, proxy
    bench.close()
    proxy.close()


def places(points: Sequence[T], in_s3: Sequence[T], gate: Sequence[T], gate_in_s3: Sequence[T] = ()) -> list[ParameterSet]:
    """Parameters for `bench` and one more: all `points` in a folder, in S3 those that stand for all, unless all are asked for.
    The gate runs `gate` of them in a folder, and `gate_in_s3` in S3.
    """
    cases = [("folder", point, point in gate) for point in points]
    cases += [("s3", point, point in gate_in_s3) for point in (points if ALL else in_s3)]
    return [pytest.param(place, point, marks=() if quick else pytest.mark.long) for place, point, quick in cases]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.long)])  # IN_BOTH: the gate runs a test in S3 as well
def bench(request: pytest.FixtureRequest) -> Bench:
    found: Bench = request.getfixturevalue("folder_bench" if request.param == "folder" else "bucket_bench")
    return found
