"""hf:// models from a mirror that breaks: what arrives is whole, checked, and only what serving needs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.errors import AccessError, CacheNotWritable, ConfigError, ModelError, SourceUnreachable, UnavailableError
from banyan_runtime.hub import cache, manifest, resolve, source
from banyan_runtime.hub.address import HubRepo
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.hub.resolve import fetch
from banyan_runtime.hub.source import RemoteFile
from tests.support.models import ggufs
from tests.support.models.mirror import COMMIT, TOKEN, Fault, Mirror

Fetching = Callable[..., "subprocess.Popen[str]"]
WEIGHTS = "model.safetensors"
SERVED = {"config.json", "generation_config.json", "chat_template.jinja", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
HALF = 1_500_000
NOWHERE = "http://127.0.0.1:9"


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def same(folder: Path, original: Path) -> bool:
    return all((folder / name).read_bytes() == (original / name).read_bytes() for name in SERVED)


def until(true: Callable[[], object], what: str, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def overwrite(path: Path) -> None:
    """A block in the middle, as `dd conv=notrunc` does it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 100_000)


def test_a_hub_model_is_fetched_with_what_serving_needs_and_nothing_else(mirror: Mirror, tmp_path: Path, tiny_chat: Path) -> None:
    heard: list[tuple[str, int, str]] = []
    folder = resolve("hf://org/tiny", progress=lambda *told: heard.append(told))
    assert folder == tmp_path / "cache" / "models" / "hf" / "models--org--tiny" / "snapshots" / COMMIT
    assert visible(folder) == SERVED
    assert same(folder, tiny_chat)
    assert inspect(folder).files == 1
    assert {phase for phase, *_ in heard} == {"downloading"}
    percents = [percent for _, percent, _ in heard]
    assert (percents, percents[0], percents[-1]) == (sorted(percents), 0, 100)
    assert mirror.sent(WEIGHTS) == len(mirror.files[WEIGHTS])


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


def test_a_body_that_is_cut_is_asked_for_again(mirror: Mirror, tiny_chat: Path) -> None:
    mirror.faults.append(Fault(WEIGHTS, change=lambda body: body[: len(body) * 3 // 4]))
    assert same(resolve("hf://org/tiny"), tiny_chat)
    assert mirror.faults[0].times == 0


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_bytes_that_differ_from_the_listing_are_refused_and_fetched_by_the_next_try(mirror: Mirror, tiny_chat: Path, name: str) -> None:
    mirror.faults.append(Fault(name, change=lambda body: body[:-9] + bytes(9)))
    with pytest.raises(ModelError, match=rf"hf://org/tiny: .*{name}.* [0-9a-f]{{40,64}}.* [0-9a-f]{{40,64}}"):
        resolve("hf://org/tiny")
    mirror.asked.clear()
    assert same(resolve("hf://org/tiny"), tiny_chat)
    assert {other: mirror.sent(other) > 0 for other in SERVED} == {other: other == name for other in SERVED}


@pytest.mark.parametrize("status", [500, 503])
def test_a_hub_that_fails_is_no_matter_of_the_network(mirror: Mirror, tiny_chat: Path, status: int) -> None:
    mirror.faults.append(Fault(WEIGHTS, status))
    with pytest.raises(UnavailableError, match=f"^hf://org/tiny: .* {status}") as raised:
        resolve("hf://org/tiny")
    assert not isinstance(raised.value, SourceUnreachable)
    assert same(resolve("hf://org/tiny"), tiny_chat)


def test_the_token_goes_to_the_hub_alone_and_into_no_message(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    mirror.token = TOKEN
    with pytest.raises(AccessError, match=r"hf://org/tiny: .* 401 \(GatedRepo\).* HF_TOKEN .*HF_TOKEN_PATH"):
        resolve("hf://org/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN[:-1])
    with pytest.raises(AccessError, match="HF_TOKEN") as error:
        resolve("hf://org/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    mirror.faults.append(Fault(WEIGHTS, change=lambda body: body[: len(body) // 2]))
    with caplog.at_level(logging.DEBUG):
        resolve("hf://org/tiny")
    assert {asked.headers.get("authorization") for asked in mirror.asked if asked.path.startswith(f"/{COMMIT}/")} == {None}
    assert TOKEN[:-1] not in caplog.text + str(error.value) + capfd.readouterr().err


def test_a_token_of_a_file_is_used(mirror: Mirror, tmp_path: Path, fetching: Fetching) -> None:
    mirror.token = TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert fetching("fetch", "hf://org/tiny", HF_TOKEN_PATH=str(tmp_path / "token")).wait(60) == 0


@pytest.mark.parametrize("value", ["two words", "tökén"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        resolve("hf://org/tiny")
    assert value not in str(error.value)


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("hf://org/tiny@nosuch", ModelError, r"hf://org/tiny@nosuch: .*404 \(RevisionNotFound\)"),
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


@pytest.fixture
def quantized(mirror: Mirror, tiny_chat: Path, tmp_path: Path) -> Mirror:
    """A repository of GGUF files, one of them in a folder of its own."""
    files = {
        name: ggufs.write(tiny_chat, tmp_path / "x.gguf", lambda _, kind=kind: kind).read_bytes()
        for name, kind in {"tiny-Q8_0.gguf": "Q8_0", "tiny.q4_0.gguf": "Q4_0", "BF16/tiny-BF16.gguf": "BF16"}.items()
    }
    mirror.files = {"README.md": b"", "config.json": b'{"model_type": "qwen3"}', "mmproj-F16.gguf": b"GGUF", **files}
    return mirror


@pytest.mark.parametrize(
    ("wanted", "name"),
    [(":Q8_0", "tiny-Q8_0.gguf"), (":Q4_0", "tiny.q4_0.gguf"), ("/tiny-Q8_0.gguf", "tiny-Q8_0.gguf"), (":bf16", "BF16/tiny-BF16.gguf")],
)
def test_one_gguf_file_of_several_is_fetched_alone(quantized: Mirror, wanted: str, name: str) -> None:
    folder = resolve(f"hf://org/tiny{wanted}@main")
    assert (folder / Path(name).name).read_bytes() == quantized.files[name]
    assert inspect(folder).architecture == "Qwen3ForCausalLM"
    assert {other for other in quantized.files if quantized.sent(other)} == {name}
    assert resolve(f"hf://org/tiny{wanted}") == folder
    assert quantized.sent(name) == len(quantized.files[name]), "fetched once"


@pytest.mark.parametrize("wanted", ["", ":Q6_K", "/other.gguf"])
def test_what_no_gguf_file_fits_names_those_that_there_are(quantized: Mirror, wanted: str) -> None:
    with pytest.raises(ModelError, match=r"hf://org/tiny.*BF16/tiny-BF16\.gguf, tiny-Q8_0\.gguf, tiny\.q4_0\.gguf"):
        resolve(f"hf://org/tiny{wanted}")
    assert not any(map(quantized.sent, quantized.files))


def test_the_only_gguf_file_needs_no_name_and_its_parts_are_one_file() -> None:
    def needed(*names: str, gguf: str = "") -> list[str]:
        return [file.name for file in source.needed([RemoteFile(name, 1) for name in names], "x", gguf)]

    assert needed("README.md", "a-Q8_0.gguf") == ["a-Q8_0.gguf"]
    parts = [f"a-UD-Q4_K_XL-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert needed(*parts, "a-Q8_0.gguf", gguf="UD-Q4_K_XL") == parts
    assert needed(*parts, "a-Q8_0.gguf", gguf=parts[0]) == parts
    assert needed("config.json", "model.safetensors", "a-Q8_0.gguf") == ["config.json", "model.safetensors"]
    with pytest.raises(ModelError, match="no GGUF file is Q2_K"):
        needed("config.json", "model.safetensors", gguf="Q2_K")


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
    folder = resolve("hf://org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert resolve("hf://org/tiny") == folder
    assert COMMIT[:12] in caplog.text, "the version"
    with pytest.raises(SourceUnreachable, match=r"^hf://org/tiny@v1: http://127\.0\.0\.1:9: .*refused.*HTTPS_PROXY.*HF_ENDPOINT"):
        resolve("hf://org/tiny@v1")


def test_offline_only_what_is_here_is_served(mirror: Mirror, fetching: Fetching) -> None:
    process = fetching("fetch", "hf://org/tiny", HF_HUB_OFFLINE="1")
    assert (process.wait(60), "HF_HUB_OFFLINE" in process.communicate()[1]) == (75, True)
    assert mirror.asked == []
    folder = resolve("hf://org/tiny")
    mirror.asked.clear()
    assert fetching("fetch", "hf://org/tiny", HF_HUB_OFFLINE="1").communicate()[0].strip() == str(folder)
    assert mirror.asked == []


def test_a_disk_without_room_is_told_with_how_much_is_missing(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 60_000_000))
    with pytest.raises(UnavailableError, match=r"69 MB .*hf://org/tiny .*60 MB .* 9 MB .*--download-dir"):
        resolve("hf://org/tiny")
    assert not mirror.sent(WEIGHTS)


def test_a_folder_that_may_only_be_read_is_named(mirror: Mirror) -> None:
    folder = resolve(f"hf://org/tiny@{COMMIT}")  # which notes no branch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        assert resolve("hf://org/tiny") == folder
        mirror.commit = "f" * 40
        with pytest.raises(CacheNotWritable, match=r"hf://org/tiny .*--download-dir"):
            resolve("hf://org/tiny")


def test_models_can_be_fetched_listed_and_verified_by_address(mirror: Mirror, tmp_path: Path, fetching: Fetching) -> None:
    def run(*words: str) -> tuple[int | None, str]:
        process = fetching(*words)
        out, errors = process.communicate(timeout=60)
        return process.returncode, out + errors

    code, told = run("verify", "hf://org/tiny")
    assert (code, "hf://org/tiny" in told) == (65, True)
    code, told = run("fetch", "hf://org/tiny", "--revision", "v1")
    folder = tmp_path / "cache" / "models" / "hf" / "models--org--tiny" / "snapshots" / COMMIT
    assert (code, told.splitlines()[-1] if code else str(folder) in told) == (0, True)
    into = tmp_path / "into" / "tiny"
    assert run("fetch", "hf://org/tiny", "--into", str(tmp_path / "into"))[0] == 0
    assert visible(into) == SERVED
    listed = run("list")[1]
    assert "hf://org/tiny@v1" in listed
    assert str(folder) in listed
    code, told = run("verify", "hf://org/tiny")
    assert (code, f"{folder}: 6 files, 2 MB" in told) == (0, True)
    for damaged in (folder, into):
        overwrite(damaged / WEIGHTS)
        code, told = run("verify", str(damaged))
        assert (code, WEIGHTS in told) == (65, True)
    mirror.asked.clear()
    code, told = run("fetch", "hf://org/tiny")
    assert (code, WEIGHTS in told) == (0, True)
    assert not mirror.sent("tokenizer.json")
    assert run("fetch", "hf://org/tiny", "--into", str(tmp_path / "into"))[0] == 0
    assert [run("verify", str(mended))[0] for mended in (folder, into)] == [0, 0]


def test_a_folder_with_other_files_is_left_alone(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.safetensors").write_bytes(b"own")
    with pytest.raises(ConfigError, match="/own: "):
        fetch(HubRepo("org/tiny", "main"), tmp_path / "cache", into=tmp_path / "own")
    assert visible(tmp_path / "own") == {"own.safetensors"}


@pytest.mark.parametrize(
    ("name", "damage", "told", "fetched"),
    [
        (WEIGHTS, lambda path: os.truncate(path, 1000), " 1000 bytes", {WEIGHTS}),
        ("config.json", lambda path: path.resolve().unlink(), " missing", {"config.json"}),
        ("config.json", Path.unlink, " missing", set()),  # a link of the cache
        (manifest.NAME, lambda path: path.write_bytes(b"{"), "", set()),
    ],
    ids=["cut", "gone", "link", "manifest"],
)
def test_a_file_of_another_size_is_fetched_again_at_the_next_start_and_no_other(
    mirror: Mirror,
    tiny_chat: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
    told: str,
    fetched: set[str],
) -> None:
    folder = resolve("hf://org/tiny")
    damage(folder / name)
    mirror.asked.clear()
    with (folder / "tokenizer_config.json").open("rb") as reader:  # another server, which is starting
        assert resolve("hf://org/tiny") == folder
        assert reader.read() == (tiny_chat / "tokenizer_config.json").read_bytes()
    assert same(folder, tiny_chat)
    assert {other for other in SERVED if mirror.sent(other)} == fetched
    assert not told or f"{folder}: {name} " in caplog.text


def test_a_fetch_that_was_killed_keeps_the_files_that_it_had(mirror: Mirror, tiny_chat: Path, fetching: Fetching) -> None:
    mirror.stop_at[WEIGHTS] = HALF
    first = fetching("fetch", "hf://org/tiny")
    until(lambda: mirror.sent(WEIGHTS) and all(mirror.sent(name) for name in SERVED), "all but the weights")
    time.sleep(0.5)
    first.terminate()
    assert first.wait(10) == 143
    mirror.stop_at.clear()
    mirror.asked.clear()
    second = fetching("fetch", "hf://org/tiny")
    out, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert same(Path(out.strip()), tiny_chat)
    assert {name for name in SERVED if mirror.sent(name)} == {WEIGHTS}


def test_processes_that_fetch_the_same_at_once_fetch_every_byte_once(mirror: Mirror, fetching: Fetching, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, "_POLL_S", 0.1)
    mirror.stop_at[WEIGHTS] = HALF
    several = [fetching("fetch", "hf://org/tiny") for _ in range(2)]
    until(lambda: mirror.sent(WEIGHTS), "the first piece")
    heard: list[str] = []
    late = threading.Thread(target=resolve, args=("hf://org/tiny", None, lambda *told: heard.append(told[2])), daemon=True)
    late.start()
    until(lambda: any("another process" in detail for detail in heard), "that it waits")
    mirror.go.set()
    late.join(60)
    assert {process.wait(60) for process in several} == {0}
    assert {name: mirror.sent(name) for name in SERVED} == {name: len(mirror.files[name]) for name in SERVED}


def test_a_name_that_would_leave_the_folder_is_never_fetched(mirror: Mirror) -> None:
    mirror.files |= {"../evil.json": b"{}", ".banyan-manifest.json": b"{}", "a b.json": b"{}", "x\\y.json": b"{}"}
    assert visible(resolve("hf://org/tiny")) == SERVED


@pytest.mark.parametrize(
    "changes",
    [
        {"sha": "main"},
        {"siblings": [{"rfilename": "config.json", "blobId": "a" * 40}]},
        {"siblings": [{"rfilename": "config.json", "size": 5}]},
        {"siblings": ["x"]},
        None,
    ],
)
def test_an_answer_that_is_not_the_hubs_is_told(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None) -> None:
    found = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 5, "blobId": "a" * 40}]}
    monkeypatch.setattr(mirror, "listing", lambda: b"<html>" if changes is None else json.dumps(found | changes).encode())
    with pytest.raises(UnavailableError, match=r"hf://org/tiny: .*HF_ENDPOINT"):
        resolve("hf://org/tiny")
