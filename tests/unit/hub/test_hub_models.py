"""hf:// models from a mirror that breaks: what arrives is whole, checked, and only what serving needs."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.errors import AccessError, ConfigError, ModelError, SourceUnreachable, UnavailableError
from banyan_runtime.hub import download, remote, resolve
from banyan_runtime.hub.huggingface import token
from banyan_runtime.hub.inspect import inspect
from tests.support.models.mirror import COMMIT, TOKEN, Fault, Mirror

WEIGHTS = "model.safetensors"
SERVED = {"config.json", "generation_config.json", "chat_template.jinja", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def same(folder: Path, original: Path) -> bool:
    return all((folder / name).read_bytes() == (original / name).read_bytes() for name in SERVED)


def test_a_hub_model_is_fetched_with_what_serving_needs_and_nothing_else(mirror: Mirror, tiny_chat: Path) -> None:
    heard: list[tuple[str, int, str]] = []
    folder = resolve("hf://org/tiny", progress=lambda *told: heard.append(told))
    assert visible(folder) == SERVED
    assert same(folder, tiny_chat)
    assert inspect(folder).files == 1
    assert ("downloading", 100, "Downloading hf://org/tiny") in heard
    assert {path.name for path in folder.parent.iterdir()} == {COMMIT, f".{COMMIT}.lease", ".last.main"}


def test_a_model_that_is_here_costs_one_question_and_a_pinned_one_none(mirror: Mirror) -> None:
    first = resolve("hf://org/tiny")
    mirror.asked.clear()
    assert resolve("hf://org/tiny") == first
    assert [asked.path for asked in mirror.asked] == ["/api/models/org/tiny/revision/main?blobs=true"]
    mirror.asked.clear()
    assert resolve(f"hf://org/tiny@{COMMIT}") == resolve("hf://org/tiny", None, lambda *_: None, COMMIT) == first
    assert mirror.asked == []


def test_a_branch_that_moved_is_fetched_beside_the_version_before(mirror: Mirror) -> None:
    first = resolve("hf://org/tiny")
    mirror.commit = "f" * 40
    mirror.files["config.json"] += b"\n"
    second = resolve("hf://org/tiny")
    assert second != first
    assert (second / "config.json").read_bytes() == (first / "config.json").read_bytes() + b"\n"


@pytest.mark.parametrize(
    ("fault", "most_sent"),
    [
        (Fault(WEIGHTS, change=lambda body: body[: len(body) * 3 // 4], times=3), 1.9),
        (Fault(WEIGHTS, 503, times=2), 1.0),
        (Fault(WEIGHTS, 403), 1.0),  # the address that the hub gave has run out: it gives another
        (Fault(WEIGHTS, 429, {"Retry-After": "1"}), 1.0),
        (Fault(WEIGHTS, change=lambda body: body[:-9] + bytes(9)), 2.0),
        (Fault("config.json", change=lambda body: body.replace(b"4", b"5")), 1.0),
        (Fault("tokenizer.json", 500), 1.0),
    ],
    ids=["cut", "503", "expired-address", "429", "wrong-bytes", "wrong-small-file", "500"],
)
def test_what_goes_wrong_on_the_way_is_mended_by_another_try(mirror: Mirror, tiny_chat: Path, fault: Fault, most_sent: float) -> None:
    mirror.faults.append(fault)
    assert same(resolve("hf://org/tiny"), tiny_chat)
    assert fault.times == 0
    assert mirror.sent(WEIGHTS) <= most_sent * len(mirror.files[WEIGHTS])


def test_a_cut_body_goes_on_where_it_broke_off(mirror: Mirror) -> None:
    mirror.faults.append(Fault(WEIGHTS, change=lambda body: body[: len(body) * 3 // 4]))
    resolve("hf://org/tiny")
    ranges = [asked.headers.get("range") for asked in mirror.asked if asked.path == f"/{COMMIT}/{WEIGHTS}"]
    assert ranges == [None, f"bytes={len(mirror.files[WEIGHTS]) * 3 // 4}-"]


def test_a_mirror_that_takes_no_ranges_still_ends_with_the_whole_model(mirror: Mirror, tiny_chat: Path) -> None:
    mirror.ranges = False
    mirror.faults.append(Fault(WEIGHTS, change=lambda body: body[: len(body) * 3 // 4]))
    assert same(resolve("hf://org/tiny"), tiny_chat)


def test_bytes_that_are_wrong_each_time_are_refused_and_not_kept(mirror: Mirror, tiny_chat: Path) -> None:
    mirror.faults.append(Fault(WEIGHTS, change=lambda body: body[:-9] + bytes(9), times=2))
    with pytest.raises(ModelError, match=r"hf://org/tiny: .*sha256.*model\.safetensors.* [0-9a-f]{64}.* [0-9a-f]{64}"):
        resolve("hf://org/tiny")
    mirror.asked.clear()
    assert same(resolve("hf://org/tiny"), tiny_chat)
    assert [asked.headers.get("range") for asked in mirror.asked if asked.path == f"/{COMMIT}/{WEIGHTS}"] == [None]


def test_the_token_goes_to_the_hub_alone_and_into_no_message(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.token = TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with pytest.raises(AccessError, match=r"hf://org/tiny: .* 401 \(GatedRepo\).* HF_TOKEN .*HF_TOKEN_PATH"):
        resolve("hf://org/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN[:-1])
    with pytest.raises(AccessError, match="HF_TOKEN") as error:
        resolve("hf://org/tiny")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    mirror.faults.append(Fault(WEIGHTS, 503))
    with caplog.at_level(logging.DEBUG):
        resolve("hf://org/tiny")
    assert {asked.headers.get("authorization") for asked in mirror.asked if asked.path.startswith(f"/{COMMIT}/")} == {None}
    assert TOKEN[:-1] not in caplog.text + str(error.value)


@pytest.mark.parametrize("value", ["two words", "tökén", "line\nbreak"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        token({"HF_TOKEN": value})
    assert value not in str(error.value)


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        (
            "hf://org/tiny@nosuch",
            ModelError,
            r"hf://org/tiny@nosuch: .*404 \(RevisionNotFound\)",
        ),
        ("hf://org/other", ModelError, r"hf://org/other: .*404 "),
        ("hf://org/../x", ConfigError, "hf://ORG/NAME"),
        ("hf://user:secret@host", ConfigError, "hf://ORG/NAME"),
        ("s3://key:secret@bucket/x", ConfigError, "s3://BUCKET/PREFIX"),
        ("s3://bucket/../x", ConfigError, "s3://"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(mirror: Mirror, address: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as raised:
        resolve(address)
    assert "secret" not in str(raised.value)


def test_two_revisions_of_one_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"v1.*v2"):
        resolve("hf://org/tiny@v1", None, lambda *_: None, "v2")


@pytest.mark.parametrize(("gone", "told"), [("config.json", r"config\.json"), (WEIGHTS, r"\*\.safetensors")])
def test_a_repository_that_cannot_be_served_is_refused_before_anything_is_fetched(mirror: Mirror, gone: str, told: str) -> None:
    del mirror.files[gone]
    mirror.files.pop("consolidated.safetensors")
    with pytest.raises(ModelError, match=told):
        resolve("hf://org/tiny")
    assert len(mirror.asked) == 1


def test_without_the_hub_the_version_that_is_here_is_served(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "ASK_WITH_COPY_S", 0.1)
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    folder = resolve("hf://org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve("hf://org/tiny") == folder
    assert COMMIT[:12] in caplog.text, "the version"
    with pytest.raises(UnavailableError, match=r"^hf://.*: http://127\.0\.0\.1:9: "):
        resolve("hf://org/tiny@v1")


def test_who_is_waited_for_and_what_to_look_at_is_told_at_once_and_with_each_reason(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first question can take a minute by itself, where packets vanish."""
    monkeypatch.setattr(remote, "ASK_S", 1.0)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    heard: list[tuple[str, int, str]] = []
    with pytest.raises(SourceUnreachable, match=r"^hf://org/tiny: http://127\.0\.0\.1:9: .*HTTPS_PROXY.*HF_ENDPOINT"):
        resolve("hf://org/tiny", progress=lambda *told: heard.append(told))
    assert len(heard) == 2
    for phase, percent, detail in heard:
        assert (phase, percent, detail.split(": ")[0]) == ("downloading", 0, "hf://org/tiny")
        assert all(word in detail for word in ("http://127.0.0.1:9", "HTTPS_PROXY", "HF_ENDPOINT"))
        assert len(detail) < 300, "an operator takes 512 characters"
    assert "refused" in heard[1][2]


def test_a_hub_that_answers_that_it_is_busy_is_no_matter_of_the_network(mirror: Mirror) -> None:
    mirror.faults.append(Fault(WEIGHTS, 503, {"Retry-After": "86400"}))
    with pytest.raises(UnavailableError, match="503") as raised:
        resolve("hf://org/tiny")
    assert not isinstance(raised.value, SourceUnreachable)
    assert "HTTPS_PROXY" not in str(raised.value)


def test_a_server_that_asks_for_more_patience_than_there_is_is_believed_at_once(mirror: Mirror) -> None:
    mirror.faults.append(Fault(WEIGHTS, 429, {"Retry-After": "86400"}))
    with pytest.raises(UnavailableError, match=r"429.* 86400 s"):
        resolve("hf://org/tiny")


def test_a_disk_without_room_is_told_with_how_much_is_missing(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 60_000_000))
    with pytest.raises(UnavailableError, match=r"69 MB .*hf://org/tiny .*60 MB .* 9 MB "):
        resolve("hf://org/tiny")
    assert not mirror.sent(WEIGHTS)


def test_models_can_be_fetched_listed_and_verified_by_address(
    mirror: Mirror, tmp_path: Path, fetching: Callable[..., subprocess.Popen[str]]
) -> None:
    def run(*words: str) -> tuple[int | None, str]:
        process = fetching(*words)
        out, errors = process.communicate(timeout=60)
        return process.returncode, out + errors

    code, told = run("verify", "hf://org/tiny")
    assert (code, "hf://org/tiny" in told) == (65, True)
    code, told = run("fetch", "hf://org/tiny", "--revision", "v1")
    folder = tmp_path / "cache" / "models" / "hf" / "org--tiny" / COMMIT
    assert (code, told.splitlines()[-1] if code else str(folder) in told) == (0, True)
    assert run("fetch", "hf://org/tiny", "--into", str(tmp_path / "into"))[0] == 0
    assert visible(tmp_path / "into" / "tiny") == SERVED
    listed = run("list")[1]
    assert "hf://org/tiny@v1" in listed
    assert str(folder) in listed
    code, told = run("verify", "hf://org/tiny")
    assert (code, f"{folder}: 6 files, 2 MB" in told) == (0, True)
    (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size))
    code, told = run("verify", str(folder))
    assert (code, WEIGHTS in told) == (65, True)
    mirror.asked.clear()
    code, told = run("fetch", "hf://org/tiny")
    assert (code, WEIGHTS in told) == (0, True)
    assert not mirror.sent("tokenizer.json")
    assert run("verify", str(folder))[0] == 0
    shutil.rmtree(folder)


def test_a_name_that_would_leave_the_folder_is_never_fetched(mirror: Mirror) -> None:
    mirror.files |= {"../evil.json": b"{}", ".banyan-manifest.json": b"{}", "a b.json": b"{}", "x\\y.json": b"{}"}
    assert visible(resolve("hf://org/tiny")) == SERVED


def test_an_answer_that_is_not_the_hubs_is_told(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def listing(**changes: Any) -> Callable[[], bytes]:
        import json

        return lambda: json.dumps(
            {"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 5, "blobId": "a" * 40}]} | changes
        ).encode()

    for made, told in (
        (listing(sha="main"), "hf://org/tiny"),
        (listing(siblings=[{"rfilename": "config.json", "blobId": "a" * 40}]), "'config.json'"),
        (listing(siblings=[{"rfilename": "config.json", "size": 5}]), "'config.json'"),
        (listing(siblings=["x"]), "'x'"),
    ):
        monkeypatch.setattr(mirror, "listing", made)
        with pytest.raises(UnavailableError, match=told):
            resolve("hf://org/tiny")
