"""S3 over TLS with a certificate of one's own: where botocore by default sends what many servers store as if it were data."""

from __future__ import annotations

import dataclasses
import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from banyan_runtime.storage.open import open_uri
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import StoreError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with key and certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "banyan test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


class Recorder(http.server.ThreadingHTTPServer):
    """Accepts every PUT and keeps its headers and the bytes of its body."""

    puts: list[tuple[dict[str, str], bytes]]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def do_PUT(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", "0")))
        self.server.puts.append((headers, body))
        self.send_response(200)
        self.send_header("ETag", '"tag"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def recorder(certificate: Path) -> Iterator[Recorder]:
    server = Recorder(("127.0.0.1", 0), _Handler)
    server.puts = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def settings(recorder: Recorder) -> S3Settings:
    return S3Settings(f"https://127.0.0.1:{recorder.server_address[1]}", "us-east-1", True, "AKID", "SECRET")


def test_a_body_goes_to_a_compatible_server_as_it_is(recorder: Recorder, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    S3Store("bucket", settings(recorder)).put("x", b"the data", if_none_match=True)
    ((headers, body),) = recorder.puts
    assert body == b"the data"
    assert "aws-chunked" not in headers.get("content-encoding", "")
    assert "x-amz-trailer" not in headers
    assert headers["if-none-match"] == "*"


def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with pytest.raises(StoreError, match="AWS_CA_BUNDLE"):
        S3Store("bucket", settings(recorder)).put("x", b"the data")
    assert recorder.puts == []


def test_the_bundle_of_the_environment_is_trusted(recorder: Recorder, certificate: Path) -> None:
    environment = {
        "AWS_ENDPOINT_URL_S3": f"https://127.0.0.1:{recorder.server_address[1]}",
        "AWS_CA_BUNDLE": str(certificate),
        "BANYAN_S3_CREDENTIALS_DIR": str(certificate.parent),
    }
    (certificate.parent / "AWS_ACCESS_KEY_ID").write_text("AKID")
    (certificate.parent / "AWS_SECRET_ACCESS_KEY").write_text("SECRET")
    where = open_uri("s3://bucket/x", environment)
    where.store.put(where.key, b"the data")
    assert [body for _, body in recorder.puts] == [b"the data"]


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("text", [None, "", "no certificate"], ids=["missing", "empty", "of other content"])
def test_a_bad_bundle_is_named_before_anything_is_sent(recorder: Recorder, tmp_path: Path, text: str | None) -> None:
    bundle = tmp_path / "ca.pem"
    if text is not None:
        bundle.write_text(text)
    with pytest.raises(StoreError, match=rf"{bundle}.*AWS_CA_BUNDLE"):
        S3Store("bucket", dataclasses.replace(settings(recorder), ca_bundle=str(bundle)))
