"""Who we are to S3, and where it is: mounted keys, tokens, web identity, bucket names in host names. And that no error tells secrets."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import traceback
from collections.abc import Callable, Mapping
from email.utils import format_datetime
from pathlib import Path

import pytest

from banyan_runtime.storage.open import open_uri
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_errors import Expired, clean
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Denied, Full, NotFound, ObjectStore, StoreError, Throttled, Unreachable, Unsupported
from tests.support.s3.answering import Answer, Answering, Request, answering
from tests.support.s3.servers import free_port

CANARY = "CANARY0d4f7b"


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials but those of the test."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def opened(endpoint: str, environment: Mapping[str, str]) -> ObjectStore:
    return open_uri("s3://bucket/", {"AWS_ENDPOINT_URL_S3": endpoint} | dict(environment), Patience(0.0)).store


def mount(folder: Path, version: str, token: str | None = None) -> None:
    """As the kubelet does: the files are links through `..data`, which is replaced at once."""
    new = folder / f"..{version}"
    new.mkdir(parents=True)
    secret = {"AWS_ACCESS_KEY_ID": f"AKID-{version}\n", "AWS_SECRET_ACCESS_KEY": f"{CANARY}-{version}"}
    for name, value in (secret | ({"AWS_SESSION_TOKEN": token} if token else {})).items():
        (new / name).write_text(value)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    (folder / "..next").symlink_to(new.name)
    (folder / "..next").replace(folder / "..data")


def test_keys_that_are_rotated_in_a_mounted_secret_are_used_from_the_next_request_on(tmp_path: Path) -> None:
    mount(tmp_path, "old", token="TOKEN")
    with answering() as server:
        store = opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)})
        store.put("x", b"")
        mount(tmp_path, "new")
        (tmp_path / "..old" / "AWS_ACCESS_KEY_ID").unlink()
        store.put("x", b"")
        first, second = server.requests
    assert "Credential=AKID-old/" in first.headers["authorization"]
    assert first.headers["x-amz-security-token"] == "TOKEN"
    assert "Credential=AKID-new/" in second.headers["authorization"]
    assert "x-amz-security-token" not in second.headers


def test_a_token_that_expired_in_a_mounted_secret_is_waited_for(tmp_path: Path) -> None:
    mount(tmp_path, "old", token="OLD")

    def answer(request: Request) -> Answer:
        if request.headers["x-amz-security-token"] == "NEW":
            return Answer()
        mount(tmp_path, "new", token="NEW")
        return s3_error(400, "ExpiredToken")

    with answering(answer) as server:
        environment = {"AWS_ENDPOINT_URL_S3": server.url, "BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}
        open_uri("s3://bucket/", environment).store.put("x", b"")
        assert len(server.requests) == 2


def test_a_token_that_expired_and_that_nobody_renews_is_denied() -> None:
    with answering(lambda _: s3_error(400, "ExpiredToken")) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET", "TOKEN"))
        with pytest.raises(Expired):
            store.put("x", b"")


def test_keys_that_vanish_are_denied_by_the_name_of_their_file(tmp_path: Path) -> None:
    mount(tmp_path, "old")
    with answering() as server:
        store = opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)})
        (tmp_path / "..old" / "AWS_SECRET_ACCESS_KEY").unlink()
        with pytest.raises(Denied, match=f"{tmp_path}/AWS_SECRET_ACCESS_KEY"):
            store.put("x", b"")
    assert server.requests == []


def test_a_session_token_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": CANARY, "AWS_SESSION_TOKEN": "TOKEN"}.items():
        monkeypatch.setenv(name, value)
    with answering() as server:
        opened(server.url, {}).put("x", b"")
    assert server.requests[0].headers["x-amz-security-token"] == "TOKEN"


STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>
<Credentials><AccessKeyId>AKID-STS</AccessKeyId><SecretAccessKey>CANARY</SecretAccessKey><SessionToken>STS-TOKEN</SessionToken>
<Expiration>{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def web_identity(monkeypatch: pytest.MonkeyPatch, sts: str, token: Path) -> None:
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/banyan")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    if sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts)


def test_a_web_identity_is_exchanged_for_a_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("A-WEB-IDENTITY")
    until = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    issued = Answer(body=STS.format(until=until).encode(), headers={"Content-Type": "text/xml"})
    with answering(lambda _: issued) as sts, answering() as server:
        web_identity(monkeypatch, sts.url, tmp_path / "token")
        opened(server.url, {"AWS_REGION": "eu-north-1"}).put("x", b"")
    assert b"WebIdentityToken=A-WEB-IDENTITY" in sts.requests[0].body
    assert "Credential=AKID-STS/" in server.requests[0].headers["authorization"]
    assert "/eu-north-1/s3/" in server.requests[0].headers["authorization"]
    assert server.requests[0].headers["x-amz-security-token"] == "STS-TOKEN"


def test_a_role_is_asked_for_in_the_region_of_the_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("A-WEB-IDENTITY")
    web_identity(monkeypatch, "", tmp_path / "token")
    with answering(lambda _: Answer(502)) as proxy, answering() as server:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(Unreachable):
            # botocore by itself reads AWS_DEFAULT_REGION only
            opened(server.url, {"AWS_REGION": "eu-north-1"}).put("x", b"")
    assert {request.target for request in proxy.requests} == {"sts.eu-north-1.amazonaws.com:443"}


def test_a_web_identity_that_is_refused_or_missing_is_denied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusal = b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code><Message>no such provider</Message></Error></ErrorResponse>"
    with answering(lambda _: Answer(400, refusal, {"Content-Type": "text/xml"})) as sts, answering() as server:
        web_identity(monkeypatch, sts.url, tmp_path / "token")
        with pytest.raises(Denied, match=str(tmp_path / "token")):
            opened(server.url, {}).put("x", b"")
        (tmp_path / "token").write_text(CANARY)
        with pytest.raises(Denied, match="InvalidIdentityToken: no such provider") as error:
            opened(server.url, {}).put("x", b"")
    assert CANARY not in told(error.value)


def test_a_token_service_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("A-WEB-IDENTITY")
    sts = f"http://127.0.0.1:{free_port()}"
    web_identity(monkeypatch, sts, tmp_path / "token")
    with answering() as server, pytest.raises(Unreachable, match=sts):
        opened(server.url, {}).put("x", b"")


@pytest.mark.parametrize(
    ("forced", "host", "path"), [("false", "bucket.s3.test", "/a/x"), ("true", "s3.test", "/bucket/a/x"), ("", "s3.test", "/bucket/a/x")]
)
def test_the_bucket_stands_in_the_host_name_or_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forced: str, host: str, path: str
) -> None:
    mount(tmp_path, "keys")
    with answering() as proxy:  # a proxy sees every host name without any DNS
        monkeypatch.setenv("http_proxy", proxy.url)
        opened("http://s3.test", {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path), "BANYAN_S3_FORCE_PATH_STYLE": forced}).put("a/x", b"")
    (request,) = proxy.requests
    assert (request.headers["host"], request.target) == (host, f"http://{host}{path}")


def s3_error(status: int, code: str, headers: Mapping[str, str] = {}) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>words</Message></Error>".encode(), headers)


HOUR_AGO = {"Date": format_datetime(datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1), usegmt=True)}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        # a name without the time, for each process that collects tests has its own
        pytest.param(s3_error(403, "RequestTimeTooSkewed", HOUR_AGO), Denied, HOUR_AGO["Date"], id="clock"),
        (s3_error(403, "AccessDenied"), Denied, "403 AccessDenied: words"),
        (s3_error(503, "SlowDown"), Throttled, "503 SlowDown"),
        (s3_error(400, "RequestTimeout"), Unreachable, "400 RequestTimeout"),
        (s3_error(500, "InternalError"), Unreachable, "500 InternalError"),
        (s3_error(502, "BadGateway"), Unreachable, "502"),
        (Answer(502, b"<html><body>Bad Gateway</body></html>"), Unreachable, "502"),
        (s3_error(507, "InsufficientStorage"), Full, "507 InsufficientStorage"),
        (s3_error(501, "NotImplemented"), Unsupported, "501 NotImplemented"),
        (s3_error(404, "NoSuchBucket"), NotFound, "s3://bucket/x"),
        (s3_error(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}), StoreError, "eu-west-1"),
    ],
)
def test_what_the_storage_says_is_told_by_kind(tmp_path: Path, answer: Answer, kind: type[StoreError], words: str) -> None:
    mount(tmp_path, "keys")
    with answering(lambda _: answer) as server, pytest.raises(StoreError, match=words) as error:
        opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}).put("x", b"")
    assert isinstance(error.value, kind)


def test_a_wrong_clock_is_seen_where_the_answer_has_no_body(tmp_path: Path) -> None:
    mount(tmp_path, "keys")
    with answering(lambda _: Answer(403, headers=HOUR_AGO)) as server, pytest.raises(Denied, match=HOUR_AGO["Date"]):
        opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}).head("x")


def told(error: BaseException) -> str:
    """All that a log could show of it."""
    return "".join(traceback.format_exception(error))


def _calls(store: ObjectStore) -> list[Callable[[], object]]:
    def multipart() -> None:
        upload = store.upload("x")
        upload.write(bytes(11 << 20))
        upload.complete(if_none_match=True)

    return [
        lambda: store.put("x", b"1"),
        lambda: store.put("x", b"1", if_none_match=True),
        lambda: store.get("x"),
        lambda: store.head("x"),
        lambda: list(store.list("x")),
        lambda: store.delete("x", if_match="t"),
        lambda: store.sweep("x", 0),
        multipart,
    ]


def _failure(call: Callable[[], object]) -> StoreError | None:
    try:
        call()
    except StoreError as error:
        return error
    return None


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize(
    "answer",
    [*(s3_error(status, "Code") for status in (301, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503, 507)), Answer(200, b"<no xml")],
    ids=lambda answer: str(answer.status),
)
def test_no_answer_of_the_storage_makes_us_tell_a_secret(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with answering(lambda _: answer) as server:
        settings = S3Settings(server.url, "us-east-1", True, "AKID", f"{CANARY}-key", f"{CANARY}-token")
        store = S3Store("bucket", settings, Patience(0.0), part_bytes=5 << 20)
        failures = [error for call in _calls(store) if (error := _failure(call)) is not None]
    assert server.requests
    assert failures
    assert CANARY not in "".join(map(told, failures))
    assert CANARY not in caplog.text


def test_no_endpoint_makes_us_tell_its_password(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nowhere = f"127.0.0.1:{free_port()}"
    good = S3Settings(f"http://{nowhere}", "us-east-1", True, "AKID", CANARY)
    for endpoint in (
        f"http://user:{CANARY}@{nowhere}", f"https://user:{CANARY}@{nowhere}/path?query", f"user:{CANARY}@{nowhere}",
        f"ftp://user:{CANARY}@{nowhere}", f"http://user:{CANARY}/@://@{nowhere}", f"http://user:{CANARY}@", f"http://{CANARY}@[::1",
    ):  # fmt: skip
        with pytest.raises(StoreError, match="AWS_ENDPOINT_URL_S3") as error:
            S3Store("bucket", dataclasses.replace(good, endpoint=endpoint), Patience(0.0))
        assert CANARY not in told(error.value)
    for proxy in (f"http://user:{CANARY}@{nowhere}", f"http://user:{CANARY}@bad port", f"http://user:{CANARY}@[::1", f"ftp://u:{CANARY}@x"):
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(StoreError) as error:
            S3Store("bucket", dataclasses.replace(good, endpoint="http://s3.test"), Patience(0.0)).put("x", b"1")
        assert CANARY not in told(error.value)
    assert CANARY not in caplog.text


def test_what_is_passed_on_of_others_words_is_bounded_and_without_passwords() -> None:
    assert clean(f"no\nroute to 'http://user:{CANARY}@host/x' nor https://u:{CANARY}//@h") == "no route to 'http://host/x' nor https://h"
    assert clean(f"Failed to parse: http://user:{CANARY}@host/x") == "Failed to parse: http://host/x"
    assert len(clean("word " * 1000)) <= 500


def test_a_network_that_cuts_answers_makes_us_tell_no_secret() -> None:
    def cut(_: Request) -> Answer:
        return Answer(200, b"short", {"ETag": '"t"', "Content-Length": "99", "Connection": "close"})

    with answering(cut) as server:
        settings = S3Settings(server.url, "us-east-1", True, "AKID", f"{CANARY}-key", f"{CANARY}-token")
        with pytest.raises(Unreachable, match=r"byte 5$") as error:
            S3Store("bucket", settings, Patience(0.0)).get("x")
    assert CANARY not in told(error.value)


def test_the_endpoint_must_be_a_url() -> None:
    with pytest.raises(StoreError, match="minio:9000"):
        S3Store("bucket", S3Settings("minio:9000", "us-east-1", True, "AKID", "SECRET"))


def test_a_server_that_sends_everybody_elsewhere_is_asked_once(tmp_path: Path) -> None:
    """http:// where the server wants https:// looks so."""
    mount(tmp_path, "keys")
    with (
        answering(lambda _: Answer(301, headers={"Location": "https://s3.test/"})) as server,
        pytest.raises(StoreError, match=r"https://s3\.test"),
    ):
        opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)}).put("x", b"")
    assert len(server.requests) == 1


def test_a_whole_answer_of_another_server_is_no_traceback(tmp_path: Path) -> None:
    """A wrong endpoint is often some web server."""
    mount(tmp_path, "keys")

    def page(_: Request) -> Answer:
        return Answer(200, b"<html><body>Welcome to nginx</body></html>", {"Content-Type": "text/html"})

    server: Answering
    with answering(page) as server:
        store = opened(server.url, {"BANYAN_S3_CREDENTIALS_DIR": str(tmp_path)})
        for call in (lambda: store.put("x", b""), lambda: store.head("x"), lambda: list(store.list()), lambda: store.get("x")):
            with pytest.raises(StoreError, match="s3://bucket/"):
                call()
