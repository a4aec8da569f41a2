"""A server with the API of the Hugging Face hub, on the loopback, with faults; and a small model for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "x" * 34


@dataclass
class Fault:
    """What happens to the first `times` downloads of `name`: a status with headers, or what `change` makes of the body (cut bodies
    keep the length that was announced)."""

    name: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[bytes], bytes] | None = None
    times: int = 1


@dataclass
class Asked:
    """A request, and how many bytes of its body were sent."""

    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


class Mirror:
    """Serves `files` as the one commit of ORG/tiny. Large files live on a second host, to which the first redirects."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.commit = dict(files), COMMIT
        self.token: str | None = None  # asked for where it is set
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.ranges = True
        self.stop_at: dict[str, int] = {}  # a body goes no further than this until `go` is set
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.hosts = [_Host(self, "hub"), _Host(self, "store")]
        self.endpoint, self.store = (f"http://127.0.0.1:{host.server_address[1]}" for host in self.hosts)
        for host in self.hosts:
            threading.Thread(target=host.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.go.set()
        for host in self.hosts:
            host.shutdown()
            host.server_close()

    def sent(self, name: str) -> int:
        """Bytes of a file that were sent in all."""
        return sum(asked.sent for asked in self.asked if asked.path.endswith(f"/{name}"))

    def large(self, name: str) -> bool:
        return name.endswith(".safetensors")

    def etag(self, name: str) -> str:
        """The sha256 of a large file, the git blob's SHA-1 of another."""
        content = self.files[name]
        if self.large(name):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    def listing(self) -> bytes:
        """The answer of /api/models/ORG/NAME/revision/REVISION?blobs=true."""
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "b" * 40}
            if self.large(name):
                entry["lfs"] = {"sha256": self.etag(name), "size": len(content), "pointerSize": 134}
            else:
                entry["blobId"] = self.etag(name)
            siblings.append(entry)
        return json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": siblings}).encode()

    def tree(self) -> bytes:
        """The answer of /api/models/ORG/NAME/tree/COMMIT."""
        entries = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": self.etag(name)}
            if self.large(name):
                entry |= {"oid": "b" * 40, "lfs": {"oid": self.etag(name), "size": len(content), "pointerSize": 134}}
            entries.append(entry)
        return json.dumps(entries).encode()


class _Host(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, mirror: Mirror, role: str) -> None:
        self.mirror, self.role = mirror, role
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: _Host
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        mirror = self.server.mirror
        asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()})
        path = unquote(self.path.partition("?")[0])
        resolved = path.removeprefix(f"/org/tiny/resolve/{self.server.mirror.commit}/")
        name = path.rpartition("/")[2] if resolved == path else resolved  # files may lie in folders
        with mirror.lock:
            mirror.asked.append(asked)
            fault = None
            if self.command == "GET" and (self.server.role == "store" or not mirror.large(name)):
                fault = next((each for each in mirror.faults if each.name == name and each.times > 0), None)
                if fault:
                    fault.times -= 1
        if fault is not None and fault.status:
            return self._answer(asked, fault.status, b"", fault.headers)
        if self.server.role == "hub":
            if mirror.token is not None and asked.headers.get("authorization") != f"Bearer {mirror.token}":
                return self._answer(asked, 401, b"", {"X-Error-Code": "GatedRepo"})
            if found := re.fullmatch(r"/api/models/org/tiny/revision/([^?]+)\?blobs=true", self.path):
                if unquote(found[1]) not in ("main", "v1", mirror.commit):
                    return self._answer(asked, 404, b"", {"X-Error-Code": "RevisionNotFound"})
                return self._answer(asked, 200, mirror.listing(), {})
            if self.path.startswith(f"/api/models/org/tiny/tree/{mirror.commit}"):
                return self._answer(asked, 200, mirror.tree(), {})
            if not self.path.startswith(f"/org/tiny/resolve/{mirror.commit}/") or name not in mirror.files:
                return self._answer(asked, 404, b"", {"X-Error-Code": "RepoNotFound"})
            told = {"X-Repo-Commit": mirror.commit, "ETag": f'"{mirror.etag(name)}"'}
            if mirror.large(name):
                linked = {"X-Linked-Etag": f'"{mirror.etag(name)}"', "X-Linked-Size": str(len(mirror.files[name]))}
                return self._answer(asked, 302, b"", told | linked | {"Location": f"{mirror.store}/{mirror.commit}/{name}"})
            if self.command == "HEAD":
                return self._answer(asked, 200, mirror.files[name], told)
        content = mirror.files[name]
        wanted = re.fullmatch(r"bytes=(\d+)-", asked.headers.get("range", ""))
        if wanted and mirror.ranges:
            start = int(wanted[1])
            place = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            return self._answer(asked, 206, content[start:], place, fault, start)
        return self._answer(asked, 200, content, {}, fault)

    def _answer(self, asked: Asked, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None, start: int = 0) -> None:
        mirror = self.server.mirror
        asked.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = body if fault is None or fault.change is None else fault.change(body)
        stop = mirror.stop_at.get(asked.path.rpartition("/")[2])
        for at in range(0, len(sent), 1 << 16):
            if stop is not None and start + at >= stop:
                mirror.go.wait(60)
            piece = sent[at : at + (1 << 16)]
            self.wfile.write(piece)
            asked.sent += len(piece)
        if len(sent) < len(body):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Mirror]:
    mirror = Mirror(files)
    try:
        yield mirror
    finally:
        mirror.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, and beside them what a repository also holds and serving does not need."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    more = {"README.md": b"words", "pytorch_model.bin": b"\x80pickle", "modeling_tiny.py": b"import os", "consolidated.safetensors": b"x"}
    return found | more | {"onnx/config.json": b"{}", "original/params.json": b"{}"}
