"""A whole run, as the command makes it, against a real HTTP server that misbehaves on demand."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.server.scripted import ScriptedServer, completion, line
from tests.unit.batch.conftest import Results

Run = Callable[..., Results]


def test_every_line_is_answered_in_input_order(run: Run, server: ScriptedServer) -> None:
    server.delay_s = 0.005
    results = run([line(f"id-{i}", f"slow {0.05 if i % 7 == 0 else 0}  number {i}") for i in range(200)], "--max-concurrency", "16")
    assert results.exit_code == 0
    assert [entry["custom_id"] for entry in results.output] == [f"id-{i}" for i in range(200)]
    assert results.errors == []
    first = results.output[0]
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"] == "req-1"
    assert first["response"]["body"]["choices"][0]["message"]["content"].startswith("You said: slow")
    assert first["error"] is None
    assert first["id"].startswith("batch_req_")
    assert len({entry["id"] for entry in results.output}) == 200
    assert 1 < server.peak <= 16


def test_the_manifest_and_the_last_words_tell_what_was_done(run: Run) -> None:
    results = run([line("a", "hello"), line("b", "status 400"), line("c", "hello")])
    counts = {"total": 3, "completed": 2, "failed": 1}
    usage = {"promptTokens": 10, "cachedTokens": 4, "completionTokens": 6, "totalTokens": 16, "reasoningTokens": 0}
    manifest = results.manifest
    assert (manifest["requestCounts"], manifest["usage"]) == (counts, usage)
    for key, name in (("output", "output.jsonl"), ("errors", "errors.jsonl")):
        data = (results.folder / name).read_bytes()
        told = manifest[key]
        assert (told["bytes"], told["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert results.words[key] == told["uri"] == f"file://{results.folder}/{name}"
    assert (results.words["code"], results.words["requestCounts"], results.words["usage"]) == ("succeeded", counts, usage)
    assert sorted(path.name for path in results.folder.iterdir()) == [
        ".banyan",
        "errors.jsonl",
        "manifest.json",
        "output.jsonl",
    ]


def test_a_refused_line_keeps_the_servers_own_words_and_leaves_the_others_alone(run: Run) -> None:
    results = run([line("good", "hello"), line("bad", "status 400"), line("page", "page")])
    assert [entry["custom_id"] for entry in results.output] == ["good"]
    bad = results.error("bad")
    assert bad["error"] is None
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["message"] == "scripted 400"
    assert "bad gateway" in results.error("page")["response"]["body"]["error"]["message"]  # the page's own words


def test_a_pretty_printed_answer_still_fits_on_one_line(run: Run) -> None:
    results = run([line("a", "pretty")])
    assert results.output[0]["response"]["body"] == {"id": "x", "spaced": [1, 2]}
    assert results.output[0]["response"]["request_id"] == "x"


def test_no_line_of_the_results_has_a_character_but_line_ends_at_which_clients_cut_lines(run: Run, server: ScriptedServer) -> None:
    async def cutting(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
        return web.Response(
            text='{"id": "a\u2028b\u2029c\u0085d"}', status=400 if prompt == "bad" else 200, content_type="application/json"
        )

    server.handler = cutting
    results = run([line("good\u2028", "hello"), line("bad\u0085", "bad"), line("unsent\u2029", "x", method="GET\u2028")])
    assert [entry["custom_id"] for entry in results.output] == ["good\u2028"]
    assert [entry["custom_id"] for entry in results.errors] == ["bad\u0085", "unsent\u2029"]
    assert results.output[0]["response"]["body"] == results.errors[0]["response"]["body"] == {"id": "a\u2028b\u2029c\u0085d"}
    for name, count in (("output.jsonl", 1), ("errors.jsonl", 2)):
        assert len((results.folder / name).read_text("utf-8").splitlines()) == count


def test_passing_trouble_is_tried_again(run: Run, server: ScriptedServer) -> None:
    troubles = ["status 500 twice", "status 502 once", "status 429 twice", "status 503 once", "cut once", "nonsense once", "hello"]
    results = run([line(trouble, trouble) for trouble in troubles])
    assert [entry["custom_id"] for entry in results.output] == troubles
    assert server.tries["status 500 twice"] == 3
    assert server.tries["hello"] == 1


def test_lasting_trouble_becomes_an_error_line_after_the_attempts_are_used_up(run: Run, server: ScriptedServer) -> None:
    results = run([line(p, p) for p in ("hello", "status 500", "cut", "nonsense")], "--max-attempts", "3")
    assert [entry["custom_id"] for entry in results.output] == ["hello"]
    assert results.error("status 500")["response"]["status_code"] == 500
    assert results.error("cut")["response"] is None
    assert results.error("cut")["error"]["code"] == "server_error"
    assert results.error("nonsense")["error"]["code"] == "server_error"
    assert server.tries["status 500"] == server.tries["cut"] == 3


def test_a_line_that_takes_too_long_fails_alone(run: Run) -> None:
    results = run([line("slow", "slow 30"), line("good", "hello")], "--request-timeout", "1", "--max-attempts", "1")
    assert [entry["custom_id"] for entry in results.output] == ["good"]
    assert results.error("slow")["error"]["code"] == "server_error"


def test_a_busy_server_gets_fewer_requests_and_every_line_is_answered(run: Run, server: ScriptedServer) -> None:
    server.limit, server.delay_s = 4, 0.01
    results = run([line(str(i), f"number {i}") for i in range(150)], "--max-attempts", "2")
    assert len(results.output) == 150
    assert sum(server.tries.values()) < 150 * 4


def test_lines_that_cannot_be_sent_are_noted_with_code_and_line_number(run: Run, server: ScriptedServer) -> None:
    good = json.loads(line("x", "hello"))
    lines = [
        line("a", "hello"),
        "{not json",
        "[1]",
        "",
        line("a", "again"),
        line("", "empty id"),
        json.dumps({key: value for key, value in good.items() if key != "body"} | {"custom_id": "nobody"}),
        line("get", "x", method="GET"),
        line("url", "x", url="/v1/embeddings"),
        line("stream", "x", body={"messages": [], "stream": True}),
        line("list", "x", body=[1]),
        line("b", "hello"),
    ]
    results = run(lines)
    assert results.exit_code == 0
    assert [entry["custom_id"] for entry in results.output] == ["a", "b"]
    assert [(entry["custom_id"], entry["error"]["code"], entry["error"]["line"]) for entry in results.errors] == [
        (None, "invalid_json_line", 2),
        (None, "invalid_json_line", 3),
        ("a", "duplicate_custom_id", 5),
        ("", "invalid_custom_id", 6),
        ("nobody", "missing_required_parameter", 7),
        ("get", "invalid_method", 8),
        ("url", "url_mismatch", 9),
        ("stream", "stream_not_supported", 10),
        ("list", "invalid_body", 11),
    ]
    assert sum(server.tries.values()) == 2
    assert results.words["requestCounts"] == {"total": 11, "completed": 2, "failed": 9}


@pytest.mark.parametrize("second", ["{broken", line("a", "same id")], ids=["not JSON", "duplicate"])
def test_a_strict_run_sends_nothing_if_a_line_is_bad(run: Run, server: ScriptedServer, second: str) -> None:
    results = run([line("a", "hello"), second], "--on-invalid-line", "fail")
    assert results.exit_code == 65
    assert results.words["code"] == "invalid_line"
    assert "line 2" in results.words["message"]
    assert not server.tries
    assert not (results.folder / "output.jsonl").exists()


def test_byte_order_mark_windows_line_ends_blank_lines_and_no_last_newline_are_fine(run: Run) -> None:
    text = "\ufeff" + line("ä", "hello") + "\r\n\r\n   \n" + line("b", "hello")
    results = run(text.encode())
    assert [entry["custom_id"] for entry in results.output] == ["ä", "b"]


def test_lines_with_a_short_or_a_whole_url_are_accepted(run: Run) -> None:
    lines = [line(f"request-{i}", "hello", url="/chat/completions") for i in (1, 2)]
    lines.append(line("request-3", "hello", url="https://api.openai.com/v1/chat/completions"))
    assert len(run(lines).output) == 3


def test_a_folder_of_plain_and_gzipped_files_is_read_in_name_order(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "2.jsonl").write_text(line("c", "hello") + "\n")
    packed = gzip.compress((line("a", "hello") + "\n").encode()) + gzip.compress((line("b", "hello") + "\n").encode())
    (folder / "1.jsonl.gz").write_bytes(packed)
    (folder / "notes.txt").write_text("no requests")
    results = run([], "--input", str(folder))
    assert [entry["custom_id"] for entry in results.output] == ["a", "b", "c"]
    (folder / "1.jsonl.gz").write_bytes(packed + bytes(1000))
    assert run([], "--input", str(folder), "--overwrite").exit_code == 0, "some pad what they write"
    for damaged in (packed[:-10], packed + b"no gzip"):
        (folder / "1.jsonl.gz").write_bytes(damaged)
        refused = run([], "--input", str(folder), "--overwrite")
        assert refused.words["code"] == "input_invalid"
        assert f"file://{folder}/1.jsonl.gz" in refused.words["message"]


def test_a_model_name_and_a_key_are_sent_with_every_line(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    server.api_key, server.model = "sk-secret", "other"
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    results = run(
        [line("a", "hello", body={"model": "theirs", "messages": [{"content": "hi"}], "seed": 1e3})],
        "--model",
        "other",
        "--api-key-file",
        str(key),
    )
    assert len(results.output) == 1
    assert server.bodies == [{"model": "other", "messages": [{"content": "hi"}], "seed": 1e3}]


def test_a_wrong_key_ends_the_run_instead_of_writing_an_error_for_each_line(run: Run, server: ScriptedServer) -> None:
    server.api_key = "sk-secret"
    results = run([line(str(i), "hello") for i in range(500)])
    assert (results.exit_code, results.words["code"]) == (77, "api_key_denied")
    assert not (results.folder / "errors.jsonl").exists()


def test_an_output_that_cannot_be_written_is_named_as_it_was_given(run: Run) -> None:
    results = run([line("a", "hello")], "--output", "/proc/nowhere/")
    assert (results.exit_code, results.words["code"]) == (64, "output_not_found")
    assert (results.words["field"], results.words["value"]) == ("--output", "file:///proc/nowhere")


def test_a_process_that_only_publishes_shows_the_counts_of_the_run(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(line("a", "hello") + "\n" + line("b", "hello") + "\n")
    for phase in ("plan", "work", "merge"):
        capfd.readouterr()
        assert run([], "--input", str(lines), "--run-id", "job", "--phase", phase).exit_code == 0
    assert "phase=done done=2/2 ok=2 err=0" in "".join(capfd.readouterr())


def test_who_joins_a_run_with_another_endpoint_or_input_is_refused(run: Run, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "in.jsonl").write_text(line(folder, "hello") + "\n")
    (tmp_path / "other.jsonl").write_text(line("c", "hello") + "\n")
    first = ["--input", str(tmp_path / "one/in.jsonl"), "--run-id", "job"]
    planned = run([], *first, "--phase", "plan")
    assert planned.exit_code == 0
    owner = planned.folder / ".banyan/owner.json"
    before = owner.read_bytes()
    others = (
        ("--endpoint", "/v1/embeddings", "/v1/chat/completions"),
        ("--input", str(tmp_path / "two/in.jsonl"), "one/in.jsonl"),
        ("--input", str(tmp_path / "two"), "one/in.jsonl"),
        ("--input", str(tmp_path / "other.jsonl"), "one/in.jsonl"),
    )
    for option, given, begun in others:
        for phase in ("all", "work", "merge"):
            refused = run([], *first, option, given, "--phase", phase)
            assert (refused.exit_code, refused.words["code"]) == (64, "invalid_flag")
            assert (refused.words["field"], begun in refused.words["message"]) == (option, True)
            assert given in refused.words["value"]
            assert owner.read_bytes() == before, "it is whose it was"
    assert [entry["custom_id"] for entry in run([], *first).output] == ["one"]
    refused = run([], *first, "--endpoint", "/v1/embeddings")
    assert (refused.exit_code, refused.words["code"]) == (64, "invalid_flag")


@pytest.mark.parametrize("inputs", ["in.jsonl", ""])
def test_a_run_is_joined_by_another_way_to_the_same_input(run: Run, tmp_path: Path, inputs: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/in.jsonl").write_text(line("a", "hello") + "\n")
    (tmp_path / "there").symlink_to(tmp_path / "here")
    assert run([], "--input", f"{tmp_path}/here/{inputs}", "--run-id", "job", "--phase", "plan").exit_code == 0
    assert [entry["custom_id"] for entry in run([], "--input", f"{tmp_path}/there/{inputs}", "--run-id", "job").output] == ["a"]


def test_a_file_of_a_folder_is_not_the_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"in/{name}.jsonl").write_text(line(name, "hello") + "\n")
    assert run([], "--input", f"{tmp_path}/in/", "--run-id", "job", "--phase", "plan").exit_code == 0
    assert run([], "--input", f"{tmp_path}/in/a.jsonl", "--run-id", "job").words["code"] == "invalid_flag"


def test_a_model_that_is_not_served_ends_the_run(run: Run, server: ScriptedServer) -> None:
    results = run([line("a", "hello"), line("b", "hello")], "--model", "absent")
    assert (results.exit_code, results.words["code"]) == (64, "model_not_found")
    assert "absent" in results.words["message"]


def test_one_line_with_a_wrong_model_is_that_lines_trouble(run: Run) -> None:
    wrong = line("wrong", "x", body={"model": "absent", "messages": [{"content": "hi"}]})
    results = run([wrong, *(line(str(i), "hello") for i in range(20))])
    assert results.exit_code == 0
    assert results.error("wrong")["response"]["status_code"] == 404


def test_lines_that_wait_for_another_try_keep_no_other_line_from_being_sent(run: Run, server: ScriptedServer) -> None:
    lines = [line("first", "hello"), line("bad", "status 500 once"), *(line(str(n), f"later {n}") for n in range(20))]
    assert run(lines, "--max-concurrency", "1", "--max-backoff", "1").exit_code == 0
    sent = [one["messages"][0]["content"] for one in server.bodies]
    bad = [place for place, prompt in enumerate(sent) if prompt.startswith("status")]
    assert len(bad) == 2
    assert bad[1] > bad[0] + 1


def test_results_of_another_run_are_not_overwritten_unasked(run: Run, server: ScriptedServer) -> None:
    assert run([line("a", "first")]).exit_code == 0
    again = run([line("a", "second")])
    assert (again.exit_code, again.words["code"]) == (65, "output_exists")
    assert "You said: first" in (again.folder / "output.jsonl").read_text()
    assert server.tries["second"] == 0
    forced = run([line("a", "second")], "--overwrite")
    assert forced.exit_code == 0
    assert "You said: second" in (forced.folder / "output.jsonl").read_text()


def test_a_run_that_published_already_succeeds_again_without_work(run: Run, server: ScriptedServer) -> None:
    assert run([line("a", "hello")], "--run-id", "job-1").exit_code == 0
    again = run([line("a", "hello")], "--run-id", "job-1")
    assert (again.exit_code, again.words["code"]) == (0, "succeeded")
    assert again.words["requestCounts"] == {"total": 1, "completed": 1, "failed": 0}
    assert server.tries["hello"] == 1


def test_results_whose_manifest_was_removed_are_in_the_way_and_named(run: Run) -> None:
    first = run([line("a", "first")], "--run-id", "one")
    (first.folder / "manifest.json").unlink()
    second = run([line("a", "second")])
    assert (second.exit_code, second.words["code"]) == (65, "output_exists")
    assert "one" in second.words["message"]
    assert "You said: first" in (second.folder / "output.jsonl").read_text()


def test_where_results_were_removed_as_a_whole_the_same_command_runs_again(run: Run) -> None:
    first = run([line("a", "first")])
    for name in ("output.jsonl", "errors.jsonl", "manifest.json"):
        (first.folder / name).unlink()
    assert run([line("a", "first")]).output[0]["custom_id"] == "a"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["--input", "/nowhere/in.jsonl"], 65, "input_not_found"),
        (["--input", "ftp://host/x"], 64, "invalid_flag"),
        (["--output", "pvc://claim/x"], 64, "invalid_flag"),
        (["--output", __file__], 64, "invalid_flag"),
        (["--server", "localhost:8000"], 64, "invalid_flag"),
        (["--max-concurrency", "0"], 64, "invalid_flag"),
        (["--endpoint", "/v1/other"], 64, "invalid_flag"),
        (["--api-key-file", "/nowhere"], 64, "invalid_flag"),
        (["--no-such-flag"], 64, "invalid_flag"),
        (["--server-timeout", "1", "--server", "http://127.0.0.1:9"], 75, "server_not_ready"),
    ],
)
def test_a_job_that_cannot_work_says_why_with_its_exit_code(run: Run, arguments: list[str], exit_code: int, code: str) -> None:
    results = run([line("a", "hello")], *arguments)
    assert (results.exit_code, results.words["code"]) == (exit_code, code)
    assert not (results.folder / "output.jsonl").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(line("a", "hello").encode()), ".gz"),
        (lzma.compress(line("a", "hello").encode()), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "zstd"),
        (b"PK\x03\x04" + bytes(20), "zip"),
        (line("a", "hello").encode("utf-16"), "UTF-16 "),
        (line("a", "hello").encode("utf-16-le"), "UTF-16LE"),
        (b"\xfe\xff" + line("a", "hello").encode("utf-16-be"), "UTF-16 "),
    ],
)
def test_an_input_that_is_something_else_is_called_by_its_name(
    run: Run, server: ScriptedServer, tmp_path: Path, data: bytes, said: str
) -> None:
    """It was told of each of its lines that it is no JSON, in a run that was complete."""
    results = run(data)
    assert (results.exit_code, results.words["code"]) == (65, "input_invalid")
    assert said in results.words["message"]
    assert not server.tries
    if data.startswith(b"\xff\xfe"):
        packed = tmp_path / "other.jsonl.gz"
        packed.write_bytes(gzip.compress(data))
        assert said in run([], "--input", str(packed)).words["message"]


def test_an_input_that_was_packed_twice_is_not_told_to_bear_the_name_that_it_has(run: Run, tmp_path: Path) -> None:
    twice = tmp_path / "in.jsonl.gz"
    twice.write_bytes(gzip.compress(gzip.compress(line("a", "hello").encode())))
    results = run([], "--input", str(twice))
    assert (results.exit_code, results.words["code"]) == (65, "input_invalid")
    assert f"file://{twice}" in results.words["message"]


def test_an_empty_input_is_refused(run: Run) -> None:
    assert run(b"\n\n").words["code"] == "input_invalid"
    assert run(b"").exit_code == 65


def test_a_server_that_goes_away_for_good_ends_the_run_without_results(run: Run, server: ScriptedServer) -> None:
    results = run([line(str(i), "status 503 always") for i in range(20)], "--server-timeout", "1")
    assert (results.exit_code, results.words["code"]) == (69, "server_gone")
    assert [path.name for path in results.folder.iterdir()] == [".banyan"]


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_line_ends_in_exactly_one_file(run: Run, server: ScriptedServer, seed: int) -> None:
    chance = random.Random(seed)
    lasting = ["hello", "status 400", "status 500", "cut", "page", "slow 0.02"]
    passing = ["status 500 once", "cut once", "nonsense once", "status 503 twice"]
    lines = [line(f"id-{i}", chance.choice(lasting + passing)) for i in range(300)]
    for i in chance.sample(range(300), 20):
        lines[i] = "{broken"
    server.limit = 20
    results = run(lines, "--max-attempts", "3")
    assert results.exit_code == 0
    ids = {entry["id"] for entry in results.output + results.errors}
    assert len(ids) == len(results.output) + len(results.errors) == 300
    named = [entry["custom_id"] for entry in results.output + results.errors if entry["custom_id"] is not None]
    assert sorted(named) == sorted(json.loads(text)["custom_id"] for text in lines if text != "{broken")
    for entries in (results.output, results.errors):
        numbers = [int(entry["custom_id"][3:]) for entry in entries if entry["custom_id"]]
        assert numbers == sorted(numbers), "input order"
    assert results.manifest["requestCounts"] == {"total": 300, "completed": len(results.output), "failed": len(results.errors)}


@pytest.mark.long
def test_an_input_that_changes_during_the_run_is_noticed(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [line(str(i), "x" * 20_000) for i in range(1500)]  # the window ends at line 1024, 12 MB before the end

    changed = False

    async def change(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.Response:
        nonlocal changed
        if not changed:
            changed = True
            source.write_bytes(source.read_bytes() + b"\n")
        return completion("ok")

    server.handler = change
    results = run(lines)
    assert (results.exit_code, results.words["code"]) == (65, "input_changed")
    assert not (results.folder / "manifest.json").exists()
