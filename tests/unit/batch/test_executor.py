"""What the protocol's calls meet in a storage that is like none."""

from __future__ import annotations

import pytest

from banyan_runtime.batch import protocol
from banyan_runtime.batch.executor import MOST_READS, Executor
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import Unreachable
from tests.support.s3.answering import Answer, answering


def test_an_object_whose_tag_is_another_for_who_reads_it_is_not_asked_for_without_end() -> None:
    """As behind a proxy that packs what is read, and marks its tag."""
    with answering(lambda request: Answer(200, b"{}", {"ETag": '"one"' if request.method == "HEAD" else '"one-gzip"'})) as server:
        store = S3Store("bucket", S3Settings(server.url, "us-east-1", True, "AKID", "SECRET"))
        with pytest.raises(Unreachable):
            Executor(Location(store, ""), Patience(1.0)).run(protocol.read("x"))
        assert len(server.requests) == 2 * MOST_READS
