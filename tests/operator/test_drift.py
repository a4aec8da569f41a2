"""Whether a live object is as we want it, where the API server writes the same in another way."""

from __future__ import annotations

import pytest

from banyan_operator.desired.drift import settled


def test_only_amounts_are_compared_by_what_they_mean():
    """A variable of 1000 is not one of 1k, and no hash is a number, though it may look like one."""
    for names, alike in ((("limits", "cpu"), True), (("requests", "memory"), True), (("emptyDir", "sizeLimit"), True),
                         (("env", "value"), False), (("annotations", "serving.banyan.dev/spec-hash"), False)):  # fmt: skip
        live, wanted = ({"kind": "Deployment", "spec": {names[0]: {names[1]: text}}} for text in ("1k", "1000"))
        assert settled(live, wanted) == alike, names


@pytest.mark.parametrize(
    ("written", "kept"), [(0.5, "500m"), (2.0, "2"), ("100u", "1m"), ("1.0005", "1001m"), ("1.00001Gi", "1073752561419m")]
)
def test_amounts_are_as_the_api_server_keeps_them(written, kept):
    """Unquoted numbers among them, and what it rounds up to thousandths."""
    live, wanted = ({"kind": "Deployment", "spec": {"limits": {"cpu": text}}} for text in (kept, written))
    assert settled(live, wanted)
    assert not settled(live, {"kind": "Deployment", "spec": {"limits": {"cpu": "3"}}})
