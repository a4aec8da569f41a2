"""Files, through a real server and the real client."""

from __future__ import annotations

import http.client
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import httpx2 as httpx
import openai
import psutil
import pytest
from openai.types import FileObject

from tests.component.server.test_event_loop import LIMIT_MS
from tests.support.server.process import MODEL, ServerProcess, StartServer


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def host_of(server: ServerProcess) -> psutil.Process:
    found = server.eventually(lambda: server._child("banyan_runtime.batch.host.process"), "the batch host")
    assert isinstance(found, psutil.Process)
    return found


def form(*parts: tuple[str, str | None, bytes], boundary: str = "cut") -> tuple[bytes, dict[str, str]]:
    """A multipart body of (name, filename, data), in this order."""
    body = b""
    for name, filename, data in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def upload(server: ServerProcess, *parts: tuple[str, str | None, bytes]) -> httpx.Response:
    body, headers = form(*parts)
    return server.http.post(server.url + "/v1/files", content=body, headers=headers)


def files_in(storage: Path) -> list[Path]:
    """All that lies where files are kept, unfinished ones too."""
    return sorted((storage / "files").rglob("*"))


def test_a_file_is_uploaded_shown_read_and_deleted(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 5000
    made = client.files.create(file=("../etc/passwd", data), purpose="user_data")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
        "file", len(data), "../etc/passwd", "user_data", "processed",
    )  # fmt: skip
    assert made.expires_at is None
    assert abs(made.created_at - time.time()) < 60
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_the_bytes_of_a_deleted_file_are_gone_from_storage(client: openai.OpenAI, storage: Path) -> None:
    made = client.files.create(file=b"secret", purpose="user_data")
    assert list(storage.rglob(f"{made.id}*"))
    client.files.delete(made.id)
    assert not list(storage.rglob(f"{made.id}*"))


def test_the_file_may_come_before_its_purpose(server: ServerProcess) -> None:
    answer = upload(server, ("file", "a.jsonl", b"{}\n"), ("purpose", None, b"batch"))
    assert answer.status_code == 200
    assert answer.json()["purpose"] == "batch"
    assert answer.json()["expires_at"] == answer.json()["created_at"] + 30 * 86400


def test_an_expiry_is_shown_and_both_its_keys_are_needed(client: openai.OpenAI, server: ServerProcess) -> None:
    made = client.files.create(file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    for field, value in (("expires_after[seconds]", b"3600"), ("expires_after[anchor]", b"created_at"), ("expires_after[seconds]", b"1")):
        refused = upload(server, ("purpose", None, b"user_data"), (field, None, value), ("file", "a", b"x"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")
    refused = upload(server, ("purpose", None, b"user_data"), ("expires_after", None, b"3600 s"), ("file", "a", b"x"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([("file", "a", b"x")], "purpose"),
        ([("purpose", None, b"fun"), ("file", "a", b"x")], "purpose"),
        ([("purpose", None, b"batch")], "file"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(server: ServerProcess, parts: list[tuple[str, str | None, bytes]], param: str) -> None:
    refused = upload(server, *parts)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_what_is_no_form_is_refused(server: ServerProcess) -> None:
    body, headers = form(("purpose", None, b"batch"), ("file", "a", b"x"))
    assert server.http.post(server.url + "/v1/files", json={}).status_code == 400
    cut = server.http.post(server.url + "/v1/files", content=body[:-30], headers=headers)
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "malformed_request")


def test_an_upload_that_is_cut_off_leaves_nothing_behind(server: ServerProcess, storage: Path) -> None:
    assert upload(server, ("purpose", None, b"user_data"), ("file", "a", b"x")).status_code == 200  # the folders are there
    before, known = files_in(storage), server.log
    body, headers = form(("purpose", None, b"user_data"), ("file", "a", b"x" * (2 << 20)))
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/files")
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders(body[: 3 << 19])
    server.eventually(lambda: files_in(storage) != before, "the upload's temporary file")
    connection.close()
    server.eventually(lambda: files_in(storage) == before, "an empty storage")
    assert server.get("/v1/files").status_code == 200
    quiet(server, known)


def quiet(server: ServerProcess, known: str) -> None:
    """Fails where the log has told of a failure since it was `known`."""
    assert "Traceback" not in server.log[len(known) :]
    assert "ERROR" not in server.log[len(known) :]


FILE_PART = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\nx\r\n'
PURPOSE_PART = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'


@pytest.mark.parametrize(
    "body",
    [
        PURPOSE_PART + FILE_PART % b"a\0b" + b"--cut--\r\n",
        PURPOSE_PART + FILE_PART % (b"a" * 10_000) + b"--cut--\r\n",
        b"--cut\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\nx\r\n--cut--\r\n",
        b"--cut\r\n" + b"X-More: a\r\n" * 10_000 + b"\r\nx\r\n--cut--\r\n",
        b"--cut\r\n" + b"a" * (1 << 20),
        PURPOSE_PART + FILE_PART % b"a" + b"--cut--\r\n" + b"a" * (2 << 20),
        b'--cut\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n' + b"u" * 40 + b"\r\n--cut--\r\n",
    ],
    ids=["NUL in a name", "long name", "long header", "endless headers", "header without an end", "junk behind the end", "charset"],
)
def test_a_malformed_form_is_the_clients_mistake_and_no_failure_in_the_log(server: ServerProcess, body: bytes) -> None:
    known = server.log
    refused = server.http.post(server.url + "/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=cut"})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    quiet(server, known)


def test_a_path_that_is_as_long_as_a_head_may_be_is_not_found(server: ServerProcess) -> None:
    known = server.log
    answer = server.get("/v1/files/" + "x" * 9000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "id")
    quiet(server, known)


def test_a_method_that_a_path_lacks_is_told_all_that_it_has(server: ServerProcess) -> None:
    for path, methods in (("/v1/files", "GET, POST"), ("/v1/files/file-x", "DELETE, GET"), ("/v1/batches", "GET, POST")):
        answer = server.http.request("OPTIONS", server.url + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_ranges_of_a_file_are_sent(client: openai.OpenAI, server: ServerProcess) -> None:
    made = client.files.create(file=b"0123456789", purpose="user_data")
    url = f"{server.url}/v1/files/{made.id}/content"

    def get(wanted: str | None) -> httpx.Response:
        return server.http.get(url, headers={} if wanted is None else {"Range": wanted})

    assert (get(None).status_code, get(None).content, get(None).headers["content-length"]) == (200, b"0123456789", "10")
    for wanted, sent in (("bytes=2-4", b"234"), ("bytes=7-", b"789"), ("bytes=-3", b"789"), ("bytes=8-99", b"89")):
        answer = get(wanted)
        assert (answer.status_code, answer.content) == (206, sent)
        assert answer.headers["content-range"].endswith("/10")
    assert (get("bytes=10-").status_code, get("bytes=10-").headers["content-range"]) == (416, "bytes */10")
    assert get("lines=1-2").status_code == 200


def test_an_empty_file_is_a_file(client: openai.OpenAI) -> None:
    made = client.files.create(file=("empty.jsonl", b""), purpose="batch")
    assert made.bytes == 0
    assert client.files.content(made.id).read() == b""


@pytest.mark.parametrize("identity", ["..%2F..%2Fetc%2Fpasswd", "a.b", "x" * 129, "%00", "file-unknown"])
def test_an_id_that_no_file_has_is_not_found(server: ServerProcess, identity: str) -> None:
    for path in (f"/v1/files/{identity}", f"/v1/files/{identity}/content"):
        answer = server.http.get(server.url + path)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        if "%2F" not in identity:  # which makes another path of it
            assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("id", None)


def test_a_list_is_paged_by_purpose_and_order(client: openai.OpenAI, server: ServerProcess) -> None:
    made = [client.files.create(file=(f"{i}", b"x"), purpose="batch" if i % 2 else "user_data") for i in range(7)]
    ids = [file.id for file in made]

    def ours(listed: Iterable[FileObject]) -> list[str]:
        return [file.id for file in listed if file.id in ids]

    assert ours(client.files.list(limit=3)) == ids[::-1]  # the client asks for page after page
    assert ours(client.files.list(limit=20, order="asc")) == ids
    assert ours(client.files.list(purpose="batch")) == ids[1::2][::-1]
    page = client.files.list(limit=3, after=ids[5])
    assert ([file.id for file in page.data], page.has_more) == (ids[2:5][::-1], True)
    raw = server.get("/v1/files?limit=3").json()
    assert (raw["object"], raw["first_id"], raw["last_id"], raw["has_more"]) == ("list", ids[6], ids[4], True)
    for query in ("limit=0", "limit=10001", "limit=x", "order=up"):
        assert server.get(f"/v1/files?{query}").status_code == 400
    page = client.files.list(limit=3, order="asc", after=ids[6])
    assert (page.data, page.has_more) == ([], False), "nothing is newer"


def test_while_the_host_is_down_the_server_serves_and_files_come_back(server: ServerProcess, client: openai.OpenAI) -> None:
    made = client.files.create(file=b"kept", purpose="user_data")

    def killed() -> httpx.Response | None:
        """The 503 while there is no host. A new one is soon started, and then killed as well."""
        if (host := server._child("banyan_runtime.batch.host.process")) is not None:
            host.kill()
            host.wait()
        answer = server.get("/v1/files")
        return answer if answer.status_code == 503 else None

    away = server.eventually(killed, "a 503")
    assert away is not None
    assert away.headers["retry-after"]
    assert away.json()["error"]["code"] == "unavailable"
    assert client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2).choices
    server.eventually(lambda: server.get("/v1/files").status_code == 200, "a new host")
    assert client.files.content(made.id).read() == b"kept"


@pytest.mark.long
def test_the_host_goes_with_its_server_however_that_ends(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--file-storage-path", str(tmp_path)).ready()
    host = host_of(server)
    server.process.kill()
    server.process.wait()
    host.wait(10)
    assert not host.is_running()


@pytest.mark.long
def test_without_a_path_files_are_kept_in_the_cache_and_the_first_request_starts_the_host(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(environment={"BANYAN_CACHE": str(tmp_path)}).ready()
    assert server._child("banyan_runtime.batch.host.process") is None
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    made = client.files.create(file=b"x", purpose="user_data")
    (folder,) = (tmp_path / "storage").iterdir()
    assert folder.name.startswith(MODEL + "-")
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert (folder / "files" / made.id).read_bytes() == b"x"


@pytest.mark.long
def test_a_storage_that_cannot_be_used_is_told_and_the_server_serves(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = start_server("--file-storage-path", f"file://{tmp_path}/file").ready()  # a folder by its path would be looked at first
    server.eventually(
        lambda: any(line.startswith(("WARNING", "ERROR")) and "--file-storage-path" in line for line in server.lines),
        "why there are no files",
    )
    assert server.get("/v1/files").status_code == 503
    assert server.get("/readyz").status_code == 200


@pytest.fixture(scope="module")
def movable(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServerProcess, Path]:
    """A server of its own, for its storage is taken away, and that storage."""
    storage = tmp_path_factory.mktemp("storage") / "kept"
    return start_server("--file-storage-path", str(storage)).ready(), storage


@pytest.mark.long
@pytest.mark.parametrize("in_its_place", ["nothing", "an empty folder"])
def test_a_storage_that_vanishes_is_an_error_until_it_is_back_and_never_empty(
    movable: tuple[ServerProcess, Path], in_its_place: str
) -> None:
    server, storage = movable
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    if (elsewhere := storage.with_name("elsewhere")).exists():  # an earlier try failed
        shutil.rmtree(storage, ignore_errors=True)
        elsewhere.rename(storage)
        server.eventually(lambda: server.get("/v1/files").status_code == 200, "the storage is back")
    made = client.files.create(file=b"kept", purpose="user_data")
    storage.rename(elsewhere)
    if in_its_place == "an empty folder":
        storage.mkdir()
    paths = (f"/v1/files/{made.id}", f"/v1/files/{made.id}/content", "/v1/files", "/v1/batches")
    for killed in (True, False):
        for answer in (*map(server.get, paths), upload(server, ("purpose", None, b"user_data"), ("file", "x", b"x"))):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        host = host_of(server)
        if killed:
            host.kill()
        host.wait(20)  # the one that follows finds no storage, and ends by itself
    if in_its_place == "an empty folder":
        assert list(storage.iterdir()) == []
        storage.rmdir()
    assert not storage.exists()
    elsewhere.rename(storage)
    server.eventually(lambda: server.get("/v1/files").status_code == 200, "the storage is back")
    assert client.files.content(made.id).read() == b"kept"


@pytest.mark.long  # milliseconds of the event loop are counted, and a busy machine adds some
def test_a_large_upload_stalls_nobody_and_is_never_held_in_memory(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "turns"
    environment = {"PROBE_LOG": str(log)}
    server = start_server(
        "--file-storage-path", str(tmp_path / "kept"), environment=environment, program=("-m", "tests.support.server.probed")
    ).ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    client.files.create(file=b"x", purpose="user_data")
    told = len(log.read_text().split())
    processes = [psutil.Process(server.process.pid), host_of(server)]
    before = [process.memory_info().rss for process in processes]
    size = 200 << 20
    (tmp_path / "big").write_bytes(b"x" * size)
    with (tmp_path / "big").open("rb") as file:
        made = client.files.create(file=file, purpose="batch")
    assert made.bytes == size
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert max(grown) < 64 << 20, grown
    with client.files.with_streaming_response.content(made.id) as answer:
        assert sum(len(piece) for piece in answer.iter_bytes(1 << 20)) == size
    turns = [float(turn) for turn in log.read_text().split()[told:]]
    assert max(turns, default=0.0) < LIMIT_MS, "what the event loop computed at a time, in ms"
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert max(grown) < 64 << 20, grown
