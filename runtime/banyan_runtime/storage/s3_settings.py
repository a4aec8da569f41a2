"""How to reach S3: endpoint, region, certificates and credentials, from the environment and a mounted Secret."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import boto3.session
import botocore.config
import botocore.credentials
import botocore.session

from banyan_runtime.storage.s3_errors import origin
from banyan_runtime.storage.store import Denied, StoreError

CONNECT_TIMEOUT_S: Final = 5
READ_TIMEOUT_S: Final = 20  # without a byte; whoever hangs longer is asked again on another connection
_KEYS: Final = "the S3 credentials Secret needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach S3. Credentials given here win over boto3's own chain, and those in files over others."""

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    threads: int = 16
    credentials_dir: str | None = None
    ca_bundle: str | None = None

    @staticmethod
    def of(environment: Mapping[str, str]) -> S3Settings:
        """From AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, AWS_CA_BUNDLE, BANYAN_S3_FORCE_PATH_STYLE
        and BANYAN_S3_CREDENTIALS_DIR. Raises Denied if that folder lacks a key.
        """
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
        forced = environment.get("BANYAN_S3_FORCE_PATH_STYLE", "").lower()
        folder = environment.get("BANYAN_S3_CREDENTIALS_DIR") or None
        if folder:
            MountedCredentials(folder).get_frozen_credentials()
        return S3Settings(
            endpoint=endpoint,
            region=region or ("us-east-1" if endpoint else None),  # signing needs one; most servers take this
            path_style=forced in ("1", "true", "yes") or (endpoint is not None and forced not in ("0", "false", "no")),
            credentials_dir=folder,
            ca_bundle=environment.get("AWS_CA_BUNDLE") or None,
        )

    def client(self) -> Any:
        """A boto3 client; safe to share between threads. It tries once: `Patience` does the rest.

        Raises StoreError for an endpoint that is no URL or holds credentials, and for a bad AWS_CA_BUNDLE.
        """
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if self.ca_bundle is not None:
            _check_bundle(self.ca_bundle)
        session = botocore.session.get_session()
        timeouts: Any = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        session.set_default_client_config(botocore.config.Config(**timeouts, retries={"mode": "standard", "total_max_attempts": 3}))
        if self.credentials_dir is not None:
            session.get_component("credential_provider").providers.insert(0, _Provider(self.credentials_dir))
        checksums: Any = {}
        if self.endpoint is not None:
            checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
        client = boto3.session.Session(botocore_session=session).client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            verify=self.ca_bundle,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token,
            config=botocore.config.Config(
                **timeouts,
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=self.threads + 4,
                s3={"addressing_style": "path" if self.path_style else "virtual"},
                **checksums,
            ),
        )
        if self.endpoint is not None:
            # after a redirect the client asks for the bucket's region, and after a redirect of that again, without end
            nothing: Any = (SimpleNamespace(status_code=200), {"ResponseMetadata": {"HTTPHeaders": {}}})
            client.meta.events.register("before-call.s3.HeadBucket", lambda **_: nothing)
        return client


class MountedCredentials(botocore.credentials.Credentials):  # type: ignore[misc]
    """The files of a mounted Secret, read for each request: they change while a run goes on, when somebody rotates the keys."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        super().__init__("", "")  # botocore asks get_frozen_credentials whenever it signs

    def get_frozen_credentials(self) -> Any:
        """Raises Denied if a key is missing."""
        # the kubelet replaces all files at once, by letting this link point to another folder
        folder = (self._folder / "..data").resolve() if (self._folder / "..data").exists() else self._folder
        try:
            return self._read(folder)
        except Denied:
            if folder.exists():
                raise
            return self._read(self._folder)  # replaced just now

    def _read(self, folder: Path) -> Any:
        return botocore.credentials.ReadOnlyCredentials(
            self._secret(folder, "AWS_ACCESS_KEY_ID"),
            self._secret(folder, "AWS_SECRET_ACCESS_KEY"),
            self._secret(folder, "AWS_SESSION_TOKEN", required=False),
        )

    def _secret(self, folder: Path, name: str, *, required: bool = True) -> str | None:
        try:
            value = (folder / name).read_text().strip()
        except FileNotFoundError:
            value = ""
        except (OSError, ValueError) as error:
            raise Denied(str(self._folder / name), f"the file can't be read ({type(error).__name__}); {_KEYS}") from None
        if not value and required:
            raise Denied(str(self._folder / name), f"the file is missing or empty; {_KEYS}")
        return value or None


class _Provider(botocore.credentials.CredentialProvider):  # type: ignore[misc]
    METHOD = "banyan-mounted-secret"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def load(self) -> MountedCredentials:
        return MountedCredentials(self._folder)


def _check_endpoint(endpoint: str) -> None:
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("http", "https") or not rest:
        raise StoreError(origin(endpoint), "the S3 endpoint (AWS_ENDPOINT_URL_S3) must be http://HOST:PORT or https://HOST:PORT")
    if "@" in rest:
        raise StoreError(
            origin(endpoint),
            "the S3 endpoint (AWS_ENDPOINT_URL_S3) must not hold credentials; use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )


def _check_bundle(path: str) -> None:
    remedy = "AWS_CA_BUNDLE must name a file of certificates in PEM form"
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise StoreError(path, f"holds no valid certificates; {remedy}") from None
    except OSError as error:
        raise StoreError(path, f"{(error.strerror or str(error)).lower()}; {remedy}") from None
