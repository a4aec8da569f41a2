"""The small objects of a run: read as they were written, by this release and the next."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from banyan_runtime.batch.documents import Completes, InputObject, Keys, Owner, Part, Plan, Shard, State, Stop
from banyan_runtime.batch.records import Manifest, Publishing, RequestCounts, ResultFile, Usage, manifest_head
from banyan_runtime.storage.store import Damaged

INPUT = InputObject("in.jsonl", "s3://bucket/in.jsonl", '"tag"', 300)
PART = Part("p", 10, "0-1", 1, 1, Usage(completion_tokens=4), ordered=False)
DOCUMENTS = [
    Owner("run", "n", "digest", "holder", "2026-01-01T00:00:00Z", True, True, ["earlier"], True),
    Plan(
        "run", "n", "d", "/v1/embeddings", [INPUT], [Shard(0, 0, 9, 1, 0, 3, 3, "2", "0")], ["m"], False, Completes("r", INPUT, 1, Usage())
    ),
    State(3, "pod", 1, "n", 9, [PART], PART, None),
    State(4, None, None, "n", 10, [PART], None, "frozen"),
    Stop("expired", "n"),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_a_document_is_read_as_it_was_written(document: Owner | Plan | State | Stop) -> None:
    assert type(document).decode(document.encode()) == document


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_what_the_next_release_adds_is_passed_over(document: Owner | Plan | State | Stop) -> None:
    told = json.loads(document.encode()) | {"addedLater": {"a": [1]}}
    assert type(document).decode(json.dumps(told).encode()) == document


def test_a_stop_says_why_in_words_that_are_known() -> None:
    with pytest.raises(Damaged, match="reason"):
        Stop.decode(b'{"reason": "tired", "nonce": "n"}')


def test_counts_of_a_shard_are_those_of_its_parts_and_of_its_journal() -> None:
    state = State(parts=[Part("a", 5, "0-2", 2, 1, Usage(completion_tokens=3))], open=Part("b", 0, "", 1, 0, Usage(completion_tokens=5)))
    assert (state.completed, state.failed, state.usage.completion_tokens) == (3, 1, 8)
    assert [part.key for part in state.all_parts] == ["a", "b"]
    assert state.parts[0].usage.completion_tokens == 3, "summing must not change what is summed"


def test_a_plan_counts_the_lines_of_all_shards() -> None:
    assert Plan("r", "n", "", "", [], [Shard(0, 0, 9, 1, 0, 3, 3), Shard(0, 9, 20, 4, 3, 4, 7)]).total == 7


def test_keys_of_one_run_lie_below_its_own_folder_and_no_two_parts_share_one() -> None:
    keys, other = Keys("r1"), Keys("r10")
    mine = [keys.plan, keys.stop, *(keys.state(shard) for shard in range(3))]
    mine += [keys.part(shard, epoch, seq, nonce) for shard in (0, 1) for epoch in (1, 11) for seq in (1, 11) for nonce in "ab"]
    assert len(set(mine)) == len(mine)
    assert all(key.startswith(keys.folder) and not key.startswith(other.folder) for key in mine)
    assert sorted([keys.state(10), keys.state(9)]) == [keys.state(9), keys.state(10)]


def test_only_a_manifest_that_says_so_is_complete() -> None:
    file = ResultFile("u", "t", 1, "s", 1)
    manifest = Manifest(1, "r", "", "", [], file, file, RequestCounts(1, 1, 0), Usage())
    complete, placed = manifest_head(manifest.encode()), manifest_head(Publishing("r", "n").encode())
    assert complete is not None
    assert (complete.run, complete.complete) == ("r", True)
    assert placed is not None
    assert (placed.run, placed.complete) == ("r", False)
    for other in (b"mine\n", b"[]", b'{"run": "r"}'):
        assert manifest_head(other) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"nonce": "\xff", "run": 1}', b"[" * 100_000])
@pytest.mark.parametrize("kind", [Owner, Plan, State, Stop, Manifest])
def test_what_no_run_wrote_is_damage_and_no_bug(kind: type[Owner | Plan | State | Stop | Manifest], data: bytes) -> None:
    with pytest.raises(Damaged):
        kind.decode(data)


def test_the_plan_of_another_run_is_refused() -> None:
    plan = DOCUMENTS[1]
    assert Plan.decode(plan.encode(), "run") == plan
    with pytest.raises(Damaged, match=r"\.banyan/other/plan\.json"):
        Plan.decode(plan.encode(), "other")


FIRST_DECODING = """
import sys
from banyan_runtime.batch.documents import Owner, Plan, State, Stop
from banyan_runtime.batch.records import Manifest, manifest_head
from banyan_runtime.storage.store import Damaged

called = []
sys.setprofile(lambda frame, event, arg: called.append(frame.f_code.co_filename))
for decode in (Owner.decode, Plan.decode, State.decode, Stop.decode, Manifest.decode, manifest_head):
    try:
        decode(b'{"parts": [{"key": "a"}]}')
    except Damaged:
        pass
sys.setprofile(None)
assert any("records.py" in name for name in called)
print(*(name for name in called if "msgspec" in name or "typing" in name))
"""


def test_nothing_is_left_to_find_out_about_a_document_when_threads_decode_it() -> None:
    """Two threads that make msgspec look through the same class take the process down."""
    done = subprocess.run([sys.executable, "-c", FIRST_DECODING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
