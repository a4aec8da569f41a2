"""S3 over a network that loses answers, cuts bodies and throttles: SeaweedFS behind a breaking proxy."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import queue
import threading
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.storage import s3, s3_settings
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.probe import Conditions, probe
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_errors import Expired
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Denied, NotFound, Precondition, Stopped, StoreError, Unreachable, Unsupported
from banyan_runtime.storage.unfenced import UnfencedStore
from tests.support.s3.answering import Answer, Answering, Request, answering
from tests.support.s3.servers import Fault, Proxy, S3Server, free_port

BIG = bytes(range(256)) * (11 << 12)


def test_a_cut_body_is_resumed_where_it_broke(faulty: S3Store, proxy: Proxy) -> None:
    faulty.put("big", BIG)
    proxy.faults = [Fault(lambda head: head.startswith(b"GET"), "truncate", times=3)]
    assert faulty.get("big", start=1000) == BIG[1000:]
    assert proxy.faults[0].times == 0
    resumed = [head for head in proxy.requests if head.startswith(b"GET")][1:]
    assert all(b"If-Match" in head for head in resumed), "a resumed read must name the version it continues"


def test_a_cut_body_is_not_mended_with_another_version(faulty: S3Store, proxy: Proxy, weed: S3Server) -> None:
    faulty.put("big", BIG)
    reads = 0

    def picks(head: bytes) -> bool:
        nonlocal reads
        if not head.startswith(b"GET"):
            return False
        reads += 1
        if reads == 2:  # the first body was cut, now the rest is asked for
            S3Store(faulty.bucket, weed.settings()).put("big", BIG[::-1])
        return reads == 1

    proxy.faults = [Fault(picks, "truncate", times=9)]
    with pytest.raises(Precondition):
        faulty.get("big")
    assert reads == 2


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["lose", "failed"])
@pytest.mark.parametrize("data", [b"small", BIG], ids=["one put", "multipart"])
def test_a_create_whose_answer_was_lost_is_known_as_ones_own(faulty: S3Store, proxy: Proxy, data: bytes, kind: str) -> None:
    proxy.faults = [Fault(_publishes(data), kind, times=2)]
    upload = faulty.upload("x")
    upload.write(data)
    assert upload.complete(if_none_match=True).size == len(data)
    assert proxy.faults[0].times == 0
    assert faulty.get("x") == data
    with pytest.raises(Precondition):
        faulty.put("x", data, if_none_match=True)


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("data", [b"small", BIG], ids=["one put", "multipart"])
def test_a_create_after_a_conflict_is_carried_out_once(faulty: S3Store, proxy: Proxy, data: bytes) -> None:
    proxy.faults = [Fault(_publishes(data), "conflict"), Fault(_publishes(data), "lose"), Fault(_publishes(data), "unavailable")]
    upload = faulty.upload("x")
    upload.write(data)
    upload.complete(if_none_match=True)
    assert [fault.times for fault in proxy.faults] == [0, 0, 0]
    assert faulty.get("x") == data


def test_a_store_that_answers_conflict_for_ever_means_that_the_object_exists(
    faulty: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "CONFLICT_S", 1.0)
    faulty.put("x", b"theirs")
    proxy.faults = [Fault(_publishes(b""), "conflict", times=99)]
    with pytest.raises(Precondition):
        faulty.put("x", b"mine", if_none_match=True)
    proxy.faults = []
    assert faulty.get("x") == b"theirs"


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("data", [b"small", BIG], ids=["one put", "multipart"])
def test_a_refused_create_is_not_judged_while_the_object_cannot_be_read(faulty: S3Store, proxy: Proxy, data: bytes) -> None:
    # the write is applied, its answer lost, and the storage is away when it is asked what is there
    proxy.faults = [Fault(_publishes(data), "lose"), Fault(lambda head: head.startswith(b"HEAD"), "unavailable", times=2)]
    upload = faulty.upload("x")
    upload.write(data)
    upload.complete(if_none_match=True)
    assert [fault.times for fault in proxy.faults] == [0, 0]
    assert faulty.get("x") == data


def test_a_write_that_ran_out_of_patience_can_be_repeated(weed: S3Server, proxy: Proxy, faulty: S3Store) -> None:
    store = S3Store(faulty.bucket, weed.settings(proxy.endpoint), Patience(0.0))
    proxy.faults = [Fault(_publishes(b""), "lose")]
    upload = store.upload("x")
    upload.write(b"data")
    with pytest.raises(Unreachable):
        upload.complete(if_none_match=True)
    assert upload.complete(if_none_match=True).size == 4


def _publishes(data: bytes) -> Callable[[bytes], bool]:
    """Picks the request that makes `data` visible."""
    if data is BIG:
        return lambda head: head.startswith(b"POST") and b"uploadId=" in head
    return lambda head: head.startswith(b"PUT")


def test_a_replacement_whose_answer_was_lost_is_known_as_ones_own(faulty: S3Store, proxy: Proxy) -> None:
    tag = faulty.put("x", b"old").tag
    proxy.faults = [Fault(lambda head: head.startswith(b"PUT"), "lose")]
    written = faulty.put("x", b"new", if_match=tag)
    assert faulty.head("x").tag == written.tag
    assert faulty.get("x") == b"new"


def test_a_delete_whose_answer_was_lost_is_done(faulty: S3Store, proxy: Proxy) -> None:
    tag = faulty.put("x", b"old").tag
    proxy.faults = [Fault(lambda head: head.startswith(b"DELETE"), "lose")]
    faulty.delete("x", if_match=tag)
    assert proxy.faults[0].times == 0
    assert list(faulty.list()) == []


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["unavailable", "failed", "lose"])
def test_every_call_waits_for_the_storage_alike(faulty: S3Store, proxy: Proxy, kind: str) -> None:
    def broken() -> None:
        assert all(fault.times == 0 for fault in proxy.faults)
        proxy.faults = [Fault(lambda head: True, kind, times=2)]

    broken()
    tag = faulty.put("x", b"data").tag
    broken()
    assert faulty.head("x").tag == tag
    broken()
    assert faulty.get("x") == b"data"
    broken()
    assert [info.key for info in faulty.list()] == ["x"]
    upload = faulty.upload("big")
    broken()
    upload.write(BIG)
    broken()
    upload.complete()
    broken()
    faulty.delete("x", if_match=tag)
    upload = faulty.upload("big")
    upload.write(BIG)
    broken()
    upload.abort()
    broken()
    # a lost answer to its beginning leaves an upload without an owner: that is what sweeping is for
    faulty.sweep("", -5)
    assert "Uploads" not in faulty.client.list_multipart_uploads(Bucket=faulty.bucket)
    assert faulty.get("big") == BIG


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_an_answer_that_does_not_come_or_not_to_its_end_is_asked_for_again(
    weed: S3Server, proxy: Proxy, faulty: S3Store, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(s3_settings, "READ_TIMEOUT_S", 1)
    store = S3Store(faulty.bucket, weed.settings(proxy.endpoint))
    faulty.put("x", BIG)
    proxy.faults = [Fault(lambda head: head.startswith(b"GET"), kind)]
    assert store.get("x") == BIG
    assert proxy.faults[0].times == 0


def test_a_hanging_storage_is_told_of_while_the_call_blocks_and_a_stop_ends_the_wait(weed: S3Server, proxy: Proxy, faulty: S3Store) -> None:
    told, stop = queue.Queue[str](), threading.Event()
    store = S3Store(faulty.bucket, weed.settings(proxy.endpoint), Patience(1000, told.put, stop, first_notice_s=0.1))
    proxy.faults = [Fault(lambda head: True, "hang", times=99)]
    outcome = queue.Queue[BaseException | bytes]()

    def read() -> None:
        try:
            outcome.put(store.get("x"))
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=read, daemon=True).start()
    assert proxy.endpoint in told.get(timeout=20)
    assert outcome.empty()
    stop.set()
    proxy.released.set()  # or the network's own time limit, 20 s
    assert isinstance(outcome.get(timeout=20), Stopped)


CREATE, REPLACE, DELETE = (b"PUT", b"if-none-match"), (b"PUT", b"if-match"), (b"DELETE", b"if-match")


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(
    ("careless", "kept"),
    [
        ({CREATE, REPLACE, DELETE}, (False, False)),
        ({CREATE}, (False, False)),
        ({REPLACE}, (False, False)),
        ({DELETE}, (True, False)),
        (set(), (True, True)),
    ],
)
def test_a_storage_that_ignores_conditions_is_found_out(
    moto: S3Server, careless: set[tuple[bytes, bytes]], kept: tuple[bool, bool]
) -> None:
    with contextlib.closing(Proxy(moto.endpoint)) as proxy:  # moto, as it asks for no signatures of what the proxy changes
        proxy.careless = careless
        store = S3Store(f"careless-{uuid.uuid4().hex[:12]}", moto.settings(proxy.endpoint))
        store.client.create_bucket(Bucket=store.bucket)
        assert probe(store, "out/") == Conditions(*kept)
        assert list(store.list()) == []


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("unknown", [{CREATE, REPLACE}, {CREATE}, {REPLACE}])
def test_a_storage_that_does_not_know_conditions_is_written_to_without_them(moto: S3Server, unknown: set[tuple[bytes, bytes]]) -> None:
    with contextlib.closing(Proxy(moto.endpoint)) as proxy:
        proxy.unknown = unknown
        store = S3Store(f"unknown-{uuid.uuid4().hex[:12]}", moto.settings(proxy.endpoint), part_bytes=5 << 20)
        store.client.create_bucket(Bucket=store.bucket)
        assert probe(store, "out/") == Conditions(writes=False, deletes=False)
        assert list(store.list()) == []
        proxy.unknown = {CREATE, REPLACE, (b"POST", b"if-none-match"), (b"POST", b"if-match"), DELETE}
        unfenced = UnfencedStore(store)
        for data in (b"small", bytes(6 << 20)):
            tag = unfenced.put("x", b"1", if_none_match=True).tag
            upload = unfenced.upload("x")
            upload.write(data)
            with pytest.raises(Precondition):
                upload.complete(if_none_match=True)
            with pytest.raises(Precondition):
                unfenced.put("absent", b"", if_match=tag)
            newer = upload.complete(if_match=tag).tag
            for late in (lambda tag=tag: unfenced.put("x", b"2", if_match=tag), lambda tag=tag: unfenced.delete("x", if_match=tag)):
                with pytest.raises(Precondition):
                    late()
            assert unfenced.get("x") == data
            unfenced.delete("x", if_match=newer)
            unfenced.delete("x", if_match=newer)


def test_a_sweep_ends_no_upload_outside_its_prefix_whatever_the_server_lists() -> None:
    uploads = b"".join(
        b"<Upload><Key>%b</Key><UploadId>u</UploadId><Initiated>2020-01-01T00:00:00Z</Initiated></Upload>" % key
        for key in (b"other/x", b"out/x")
    )
    listing = b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>%b</ListMultipartUploadsResult>" % uploads
    with answering(lambda request: Answer(200, listing) if request.method == "GET" else Answer(204, headers={})) as server:
        assert S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET")).sweep("out/", 3600) == 1
    assert [request.target for request in server.requests if request.method == "DELETE"] == ["/bucket/out/x?uploadId=u"]


def test_a_web_page_is_no_storage_without_conditions() -> None:
    with answering(lambda request: Answer(200, b"<html></html>", {"ETag": '"page"', "Content-Type": "text/html"})) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"))
        with pytest.raises(StoreError, match="AWS_ENDPOINT_URL_S3") as caught:
            probe(store, "out/")
        assert type(caught.value) is StoreError


REFUSED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"


def test_of_a_store_that_is_trusted_denied_access_is_an_outage_but_for_what_it_may_deny() -> None:
    """A role may write and not delete, nor list uploads."""
    with answering(lambda _: Answer(403, REFUSED, {"Content-Type": "text/xml"})) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"), Patience(0.3))
        calls: list[Callable[[], object]] = [lambda: store.get("x"), lambda: store.head("x"), lambda: store.put("x", b"")]
        for call in calls:
            with pytest.raises(Denied):
                call()
        store.trust()
        for call in calls:
            with pytest.raises(Unreachable):
                call()
        for optional in (lambda: store.delete("x"), lambda: store.sweep("", 1.0)):
            with pytest.raises(Denied):
                optional()


def store_at(server: Answering, patience_s: float = 0.3) -> S3Store:
    store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"), Patience(patience_s), part_bytes=10)
    store.trust()
    return store


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code></Error>".encode(), {"Content-Type": "text/xml"})


UPLOAD = Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>", {})


def test_of_a_store_that_is_trusted_a_page_that_is_not_there_is_an_outage_where_no_object_is_asked_for() -> None:
    """As what stands before a storage answers while it knows of none behind it."""

    def answer(request: Request) -> Answer:
        return UPLOAD if request.target.endswith("?uploads") and begins else Answer(404, b"404 page not found", {})

    begins = False
    with answering(answer) as server:
        store = store_at(server)
        for read in (lambda: store.get("x"), lambda: store.head("x")):
            with pytest.raises(NotFound):
                read()
        upload = store.upload("x")
        for call in (lambda: list(store.list("")), lambda: upload.write(bytes(30))):
            with pytest.raises(Unreachable):
                call()
        begins = True
        with pytest.raises(Unreachable):
            store.upload("x").write(bytes(30))


@pytest.mark.parametrize("code", ["NoSuchUpload", "InvalidPart"])
def test_an_upload_that_the_storage_has_lost_is_not_sent_to_again(code: str) -> None:
    """Whoever tries again begins another."""

    def answer(request: Request) -> Answer:
        if request.target.endswith("?uploads"):
            return UPLOAD
        lost = request.method == ("PUT" if code == "NoSuchUpload" else "POST")
        return error(404 if code == "NoSuchUpload" else 400, code) if lost else Answer()

    with answering(answer) as server:
        store = store_at(server, 60.0)

        def write() -> None:
            upload = store.upload("x")
            upload.write(bytes(30))
            upload.complete(if_none_match=True)

        with pytest.raises(Unreachable):
            write()
        assert len([request for request in server.requests if request.method in ("PUT", "POST")]) <= 5


@pytest.mark.parametrize("tag", ['"one"', "one", 'W/"one"'])
def test_bytes_of_another_version_are_none_of_what_was_asked_for_even_if_the_storage_passes_them_on(tag: str) -> None:
    with answering(lambda _: Answer(200, b"bytes", {"ETag": tag})) as server:
        store = store_at(server)
        assert store.get("x", if_match='"one"') == b"bytes"
        with pytest.raises(Precondition):
            store.get("x", if_match='"two"')


def test_a_page_in_the_place_of_an_object_is_waited_for() -> None:
    pages = [Answer(200, b"<html>", {}), Answer(200, b"", {}), Answer(200, b"bytes", {"ETag": '"one"'})]
    with answering(lambda _: pages.pop(0)) as server:
        assert store_at(server, 10.0).get("x", if_match='"one"') == b"bytes"


@pytest.mark.parametrize(("start", "told"), [(0, ""), (4, ""), (4, "bytes 0-3/8"), (0, "bytes 4-7/8")])
def test_other_bytes_than_were_asked_for_are_refused(start: int, told: str) -> None:
    headers = {"ETag": '"one"'} | ({"Content-Range": told} if told else {})
    with answering(lambda _: Answer(206 if told else 200, b"12345678"[: 4 if told else 8], headers)) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"))
        with pytest.raises(StoreError, match="Range"):
            store.get("x", start=start, end=start + 4)
        if not told:
            assert store.get("x", start=0, end=8) == b"12345678"  # as some answer who is asked for all of it


def test_what_a_storage_cannot_do_for_a_moment_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [error(501, "NotImplemented"), Answer(200, b"bytes", {"ETag": '"one"'})]
    with answering(lambda _: answers[0] if len(answers) == 1 else answers.pop(0)) as server:
        assert store_at(server, 10.0).get("x") == b"bytes"
        monkeypatch.setattr(s3, "UNSUPPORTED_S", 0.0)
        answers[:] = [error(501, "NotImplemented")]
        with pytest.raises(Unsupported):
            store_at(server, 10.0).put("x", b"", if_none_match=True)


def test_why_a_head_is_bad_is_asked_of_an_answer_with_a_body() -> None:
    with answering(lambda _: error(400, "ExpiredToken")) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"))
        with pytest.raises(Expired):
            store.head("x")


def test_bytes_that_are_not_those_of_the_object_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [b"corrupted", b"the bytes"]

    def answer(_: Request) -> Answer:
        checksum = base64.b64encode(zlib.crc32(b"the bytes").to_bytes(4, "big")).decode()
        return Answer(200, bodies.pop(0), {"ETag": '"t"', "x-amz-checksum-crc32": checksum})

    with answering(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)  # botocore's own, so that it does as with AWS itself
        assert S3Store("bucket", S3Settings(None, "us-east-1", True, "AKID", "SECRET")).get("x") == b"the bytes"
    assert bodies == []


def test_a_storage_that_throttles_for_a_moment_is_waited_for(faulty: S3Store, proxy: Proxy) -> None:
    proxy.faults = [Fault(lambda head: True, "unavailable", times=3)]
    faulty.put("x", b"data")
    proxy.faults = [Fault(lambda head: True, "unavailable", times=2)]
    assert faulty.get("x") == b"data"


def test_a_storage_that_is_not_there_is_unreachable(weed: S3Server) -> None:
    settings = weed.settings(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unreachable):
        S3Store("bucket", settings, Patience(0.2)).head("x")


def test_a_wrong_secret_is_denied_and_never_shown(weed: S3Server, new_bucket: Callable[[S3Settings], S3Store]) -> None:
    bucket = new_bucket(weed.settings()).bucket
    wrong = dataclasses.replace(weed.settings(), secret_key="WRONG-SECRET")
    with pytest.raises(Denied) as denied:
        S3Store(bucket, wrong).put("x", b"")
    assert "WRONG-SECRET" not in str(denied.value)
    assert f"s3://{bucket}/x" in str(denied.value)


def test_a_missing_bucket_is_said_to_be_missing(moto: S3Server) -> None:
    with pytest.raises(NotFound):
        S3Store("no-such-bucket", moto.settings()).put("x", b"")


def test_credentials_come_from_a_mounted_secret(weed: S3Server, new_bucket: Callable[[S3Settings], S3Store], tmp_path: Path) -> None:
    bucket = new_bucket(weed.settings()).bucket
    environment = {"AWS_ENDPOINT_URL_S3": weed.endpoint, "BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text(f"{weed.settings().access_key}\n")
    with pytest.raises(Denied, match="AWS_SECRET_ACCESS_KEY"):
        S3Settings.of(environment)
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text(f"{weed.settings().secret_key}\n")
    S3Store(bucket, S3Settings.of(environment)).put("x", b"1")
