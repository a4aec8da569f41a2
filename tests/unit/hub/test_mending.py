"""A fetched model is looked at each time it is used: what is damaged comes again, and nothing else does."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.errors import CacheNotWritable, UnavailableError
from banyan_runtime.hub import manifest, remote, resolve
from banyan_runtime.hub.address import HubRepo
from banyan_runtime.hub.gguf import conversion
from banyan_runtime.hub.inspect import inspect
from banyan_runtime.hub.manifest import NAME
from banyan_runtime.hub.resolve import fetch
from tests.support.models.mirror import Mirror
from tests.unit.hub.test_fetch import digest, shelf  # noqa: F401
from tests.unit.hub.test_hub_models import SERVED, WEIGHTS, same, visible


def overwrite(path: Path) -> None:
    """A block in the middle, as `dd conv=notrunc` does it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 100_000)


def keep_time(path: Path) -> None:
    """As a disk that damages data."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes(20))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (WEIGHTS, overwrite, "sha256"),
    (WEIGHTS, keep_time, "sha256"),
    (WEIGHTS, Path.unlink, " missing"),
    (WEIGHTS, lambda path: os.truncate(path, 1000), " 1000 bytes"),
    ("config.json", Path.unlink, " missing"),
    ("tokenizer.json", lambda path: path.write_bytes(b"{}") and None, " 2 bytes"),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGES, ids=["8mb", "same-time", "gone", "cut", "config-gone", "short"])
def test_a_damaged_file_is_fetched_again_and_no_other(
    mirror: Mirror, tiny_chat: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None], told: str
) -> None:
    folder = resolve("hf://org/tiny")
    damage(folder / name)
    mirror.asked.clear()
    with (folder / "tokenizer_config.json").open("rb") as reader:  # somebody else's server, which is starting
        assert resolve("hf://org/tiny") == folder
        assert reader.read() == (tiny_chat / "tokenizer_config.json").read_bytes()
    assert same(folder, tiny_chat)
    assert {other: mirror.sent(other) for other in SERVED} == {other: len(mirror.files[other]) * (other == name) for other in SERVED}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{folder}: {name} " in line
    assert told in line


def test_a_manifest_that_is_damaged_vouches_for_nothing(mirror: Mirror, tiny_chat: Path) -> None:
    folder = resolve("hf://org/tiny")
    overwrite(folder / WEIGHTS)
    (folder / NAME).write_bytes(b'{"source": ')
    assert same(resolve("hf://org/tiny"), tiny_chat)
    assert manifest.read(folder) not in (None, manifest.Manifest("", "", {}))


def test_files_that_only_look_newer_are_hashed_once_and_stay(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("hf://org/tiny")
    for name in SERVED:
        (folder / name).touch()
    mirror.asked.clear()
    hashed: list[str] = []
    real = manifest.sha256_of
    monkeypatch.setattr(manifest, "sha256_of", lambda paths: real(hashed.append(path.name) or path for path in paths))
    monkeypatch.setattr(manifest, "START_BYTES", 0)
    assert resolve("hf://org/tiny") == folder
    assert set(hashed) == SERVED
    hashed.clear()
    assert resolve("hf://org/tiny") == folder
    assert hashed == []
    assert not any(mirror.sent(name) for name in SERVED)


def test_what_fits_into_the_budget_is_hashed_the_smallest_first(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("hf://org/tiny")
    kept = manifest.read(folder)
    assert kept is not None
    keep_time(folder / WEIGHTS)
    keep_time(folder / "chat_template.jinja")
    assert set(manifest.check(folder, kept, budget=100_000).damaged) == {"chat_template.jinja"}
    assert set(manifest.check(folder, kept).damaged) == {"chat_template.jinja", WEIGHTS}


def test_a_copy_that_may_only_be_read_is_served(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("hf://org/tiny")
    (folder / WEIGHTS).touch()

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(manifest, "write", read_only)
    assert resolve("hf://org/tiny") == folder


def test_a_damaged_copy_is_not_served_where_it_cannot_be_mended(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("hf://org/tiny")
    overwrite(folder / WEIGHTS)
    monkeypatch.setattr(remote, "ASK_WITH_COPY_S", 0.1)
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError):
        resolve("hf://org/tiny")
    assert visible(folder) == SERVED  # and the next try begins where this one stood


@pytest.mark.long
@pytest.mark.parametrize("damage", [overwrite, Path.unlink], ids=["8mb", "gone"])
def test_a_catalog_model_that_is_damaged_is_made_again(
    shelf: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    before = {path.name: digest(path) for path in folder.iterdir() if path.name != NAME}
    damage(folder / "tiny.gguf")
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert {path.name: digest(path) for path in folder.iterdir() if path.name != NAME} == before
    assert "tiny.gguf " in caplog.text
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lease", "tiny"]


def test_a_catalog_model_of_an_earlier_version_is_taken_as_it_is_if_it_is_whole(
    shelf: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = resolve("catalog://tiny", str(tmp_path / "cache"))
    (folder / NAME).unlink()
    wheel = next(shelf.glob("*.whl"))
    shutil.move(wheel, tmp_path / "aside")
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert json.loads((folder / NAME).read_text())["files"].keys() >= {"config.json", "tiny.gguf"}
    (folder / NAME).unlink()
    (folder / "tiny.gguf").unlink()
    shutil.move(tmp_path / "aside", wheel)
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert (folder / "tiny.gguf").stat().st_size > 100_000


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("damage", [overwrite, Path.unlink, None], ids=["8mb", "gone", "manifest"])
def test_a_catalog_model_that_an_earlier_version_converted_stays_until_it_is_damaged_and_comes_as_a_gguf_file_then(
    shelf: Path,  # noqa: F811
    tmp_path: Path,
    damage: Callable[[Path], None] | None,
) -> None:
    folder = tmp_path / "cache" / "models" / "tiny"
    conversion.convert(tmp_path / "tiny.gguf", folder)
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert inspect(folder).dtypes == {"BF16": 20}
    if damage is None:
        (folder / NAME).write_text("{")
    else:
        damage(folder / WEIGHTS)
    assert resolve("catalog://tiny", str(tmp_path / "cache")) == folder
    assert inspect(folder).dtypes == {"F32": 20}
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tiny.gguf"}
    assert {path.name for path in folder.iterdir()} == {NAME, *files}
    assert json.loads((folder / NAME).read_text())["files"].keys() == files


def test_a_volume_that_may_only_be_read_is_named_with_what_to_do(
    shelf: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(CacheNotWritable, match="Read-only file system"):
        resolve("catalog://tiny", str(tmp_path / "cache"))


def test_weights_in_a_folder_that_we_have_not_made_stay(mirror: Mirror, tmp_path: Path) -> None:
    folder = tmp_path / "somebodys"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "own.safetensors").write_bytes(b"own")
    fetch(HubRepo("org/tiny", "main"), tmp_path / "cache", into=folder)
    assert (folder / "own.safetensors").read_bytes() == b"own"
    assert set(SERVED) <= {path.name for path in folder.iterdir()}
