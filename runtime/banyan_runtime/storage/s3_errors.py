"""What S3, the network and botocore say, as the store's own errors: where the storage is, what it said, and what helps."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import re
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import botocore.exceptions

from banyan_runtime.storage.store import Denied, Full, NotFound, Precondition, StoreError, Throttled, Unreachable, Unsupported

MAX_SKEW_S: Final = 15 * 60  # S3 refuses requests whose time is further from its own
MAX_SAID: Final = 500  # characters of a server's message that are passed on

_THROTTLED: Final = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_TRANSIENT: Final = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "IDPCommunicationError"}
_LOST_PARTS: Final = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall"}
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_DENIED: Final = {
    "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidIdentityToken",
    "AllAccessDisabled", "AccountProblem",
}  # fmt: skip


class OutOfRange(StoreError):
    """The range begins at or behind the object's end."""


class NoSuchKey(NotFound):
    """The bucket is there, the object is not."""


class NoSuchUpload(NotFound):
    """The multipart upload was completed, or ended by somebody, or parts of it are not there."""


class Expired(Denied):
    """The session token was good once."""


class Conflict(StoreError):
    """409: another conditional write of the key was under way; the answer says nothing about ours."""


@contextlib.contextmanager
def translated(uri: str, endpoint: str | None) -> Iterator[None]:
    """Turn botocore's errors about `uri` into the store's own."""
    storage = f"the storage at {origin(endpoint)}" if endpoint else "the storage"
    try:
        yield
    except botocore.exceptions.ClientError as error:
        if "Assume" in error.operation_name:
            storage = "the token service (STS)"
        _raise(uri, storage, error)
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        secret = "name a Secret with them in spec.s3.credentialsSecretRef (in local mode given with --secret NAME=DIR)"
        raise Denied(uri, f"no S3 credentials found; set {keys}, or for a BatchJob {secret}") from error
    except botocore.exceptions.ParamValidationError as error:
        raise StoreError(uri, f"not a valid bucket or key ({clean(str(error).splitlines()[-1].strip())})") from None
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
        asked = error.kwargs.get("endpoint_url")
        if asked and endpoint and _host(asked) != _host(endpoint) and not _host(asked).endswith("." + _host(endpoint)):
            storage = f"the service at {origin(asked)}"  # that of the credentials
        cause = _root(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            said = f"{storage} shows a certificate that nobody here vouches for ({clean(cause.verify_message)})"
            raise StoreError(uri, f"{said}; name the file of its CA in AWS_CA_BUNDLE (spec.s3.caConfigMapRef)") from None
        # the cause's own text may repeat a URL; from None, so that no traceback shows it either
        raise Unreachable(uri, f"{storage} did not answer ({_cause(error, cause)})", reason=_short(error, cause)) from None
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreError(uri, f"{storage} is set up wrongly ({clean(str(error))})") from None
    except OSError as error:
        # the chain's own files: a web identity token that is not there
        name = f"{error.filename}: " if error.filename else ""
        raise Denied(uri, f"the credentials can't be read ({name}{(error.strerror or str(error)).lower()})") from error


def origin(endpoint: str) -> str:
    """Scheme, host and port alone: a URL can carry a password."""
    scheme, separator, rest = endpoint.rpartition("@")[0].partition("://") if "@" in endpoint else endpoint.partition("://")
    if not separator:
        scheme, rest = "", endpoint
    # a password may hold any character: only what follows the last '@' is surely none
    host = re.split("[/?#]", endpoint.rpartition("@")[2] if "@" in endpoint else rest)[0]
    return f"{scheme}://{host}" if re.fullmatch("https?", scheme) else host


def clean(text: str) -> str:
    """One line of bounded length without a URL's user and password."""
    return re.sub(r"//\S*@", "//", " ".join(text.split()))[:MAX_SAID]


def tag_of(answer: Mapping[str, Any], uri: str) -> str:
    """The object's ETag. StoreError if there is none: some web server says OK to everything."""
    if not (tag := str(answer.get("ETag", ""))):
        raise StoreError(uri, "the answer is not that of an S3 server; check the endpoint (AWS_ENDPOINT_URL_S3)")
    return tag


def server_time(answer: Mapping[str, Any]) -> datetime.datetime | None:
    """The server's clock when it answered; None if it does not say."""
    try:
        return email.utils.parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(datetime.UTC)
    except (KeyError, ValueError):
        return None


def _host(url: str) -> str:
    return origin(url).rpartition("://")[2].lower()


def _root(error: BaseException) -> BaseException:
    """What the network said below all that wrapped it: refused, no such host, a certificate."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def _cause(error: BaseException, root: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {clean(str(root))}" if str(root) and root is not error else name


def _short(error: BaseException, root: BaseException) -> str:
    """For a progress display: 'connection refused'."""
    if isinstance(root, OSError) and root.strerror:
        return clean(root.strerror).lower()
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__.removesuffix("Error")).lower()
    return f"no answer, {words}"


def _raise(uri: str, storage: str, error: botocore.exceptions.ClientError) -> NoReturn:
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    code = clean(str(error.response.get("Error", {}).get("Code", "")))  # HEAD has no body: then it is the status
    message = clean(str(error.response.get("Error", {}).get("Message", "")).strip().rstrip("."))
    said = (f"{status} {code}" if code != str(status) else code).strip() + (f": {message}" if message and message != code else "")
    if code == "NoSuchBucket":
        raise NotFound(uri, f"there is no such bucket in {storage}") from error
    if code == "RequestTimeTooSkewed" or (status == 403 and _skewed(error.response)):
        date = clean(str(metadata.get("HTTPHeaders", {}).get("date", "unknown")))
        raise Denied(uri, f"this machine's clock is wrong: that of {storage} says {date}") from error
    if code in _THROTTLED or status == 429:
        raise Throttled(uri, f"{storage} asks for fewer requests ({said})", reason=f"{status} {code}") from error
    if code in _EXPIRED:
        raise Expired(uri, f"access denied by {storage} ({said}); renew the session token", reason="the session token expired") from error
    if code in _DENIED or status in (401, 403):
        raise Denied(uri, f"access denied by {storage} ({said}); check the credentials and the bucket's policy") from error
    if status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
        headers = metadata.get("HTTPHeaders", {})
        if "x-amz-bucket-region" not in headers and "location" in headers:
            raise StoreError(uri, f"{storage} sends us to {origin(headers['location'])} ({said}); is that the right endpoint?") from error
        region = clean(headers.get("x-amz-bucket-region", "another one"))
        raise StoreError(uri, f"the bucket is in another region ({region}); set AWS_REGION") from error
    if code == "NoSuchUpload":
        raise NoSuchUpload(uri, "the upload was ended by somebody else, or by the storage's own rules") from error
    if code in _LOST_PARTS:
        raise NoSuchUpload(uri, f"{storage} does not find the parts that were sent to it ({said})") from error
    if status == 404:
        no_bucket = " or no such bucket" if code == str(status) else ""  # of HEAD nobody knows which
        raise NoSuchKey(uri, f"there is no such object{no_bucket}") from error
    if status == 409:
        raise Conflict(uri, f"another write is under way ({said})") from error
    if status == 412:
        raise Precondition(uri, "the object changed, or exists already") from error
    if status == 416:
        raise OutOfRange(uri, "beyond the object's end") from error
    if status == 507 or code == "XMinioStorageFull":
        raise Full(uri, f"{storage} has no room left ({said})", reason="it has no room left") from error
    if status == 501 or code == "NotImplemented":
        raise Unsupported(uri, f"{storage} can't do that ({said}); conditional writes and multipart uploads are needed") from error
    if status >= 500 or code in _TRANSIENT:
        raise Unreachable(uri, f"{storage} failed ({said})", reason=f"{status} {code}" if code != str(status) else code) from error
    raise StoreError(uri, f"{storage} refused ({said})") from error


def _skewed(answer: Mapping[str, Any]) -> bool:
    theirs = server_time(answer)
    return theirs is not None and abs((datetime.datetime.now(datetime.UTC) - theirs).total_seconds()) > MAX_SKEW_S
