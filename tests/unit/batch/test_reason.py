"""What a run tells of its first failed line."""

from __future__ import annotations

import pytest

from banyan_runtime.batch import records
from banyan_runtime.batch.lines import Invalid


def line(status: int, body: bytes) -> bytes:
    return records.answered("batch_req_1", "a", status, "req_1", body, None).line


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (
            line(404, b'{"error":{"message":"The model \'x\' does not exist.","code":"model_not_found"}}'),
            "404: The model 'x' does not exist.",
        ),
        (line(500, b'{"error":"out of luck"}'), "500: out of luck"),
        (line(503, b"{}"), "503"),
        (line(400, b'{"error":null}'), None),
        (records.unanswered("batch_req_1", "a", "timeout", "No answer came in 10 s.").line, "timeout: No answer came in 10 s."),
        (records.invalid("batch_req_1", Invalid(3, None, "invalid_json", "It is no JSON.", None)).line, "invalid_json: It is no JSON."),
        (line(400, b'{"error":{"message":"' + b"long " * 1000 + b'"}}'), "400: " + ("long " * 1000)[: records.REASON - 5]),
        (line(400, b'{"error":{"message":"long"}}')[:40], None),
        (b"\n", None),
        (b"\xff\xfe\n", None),
        (b"[" * 100_000, None),
    ],
)
def test_it_is_the_first_line_s_reason_in_a_few_words(errors: bytes, reason: str | None) -> None:
    assert records.reason(errors + line(400, b'{"error":{"message":"a later one"}}')) == reason
