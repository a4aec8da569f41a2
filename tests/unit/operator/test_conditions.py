"""Of conditions that could say the same at length, one says it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from banyan_operator.observed.conditions import SHORT, Finding, conditions, no, said_once, whole

LONG = "long " * 20
MESSAGES = st.lists(st.sampled_from(("short.", LONG, "x" * (SHORT + 1))), min_size=1, max_size=3).map(" ".join)


@given(
    st.dictionaries(st.sampled_from(("Ready", "Available", "Degraded", "Progressing")), MESSAGES), st.permutations(("Ready", "Degraded"))
)
def test_every_message_can_be_put_together_again_from_what_is_said_once(messages, first):
    found: dict[str, Finding] = {kind: no(f"Because{kind}", text) for kind, text in messages.items()}
    status = {"conditions": [one.dump() for one in conditions({}, said_once(found, first), 1, 0.0)]}
    for one in status["conditions"]:
        assert whole(status, one["message"]) == messages[one["type"]]
    whole_ones = [one["message"] for one in status["conditions"] if len(one["message"]) > SHORT and "see condition" not in one["message"]]
    for text in whole_ones:
        assert [text in one["message"] for one in status["conditions"]].count(True) == 1
