"""A folder as it is: full, read-only, removed, shared with writers that were killed."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime.storage.local import STALE_SECONDS, TEMPORARY, LocalStore
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import Denied, Full, NotFound, Precondition, StoreError, Unreachable


def on_a_disk(folder: Path, code: str, options: str = "size=1m") -> str:
    """What `code` prints when `folder`, its variable, is a disk of its own, in a process of its own."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    probe = subprocess.run(["unshare", "-rm", *mount], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no disk can be mounted here ({probe.stderr.strip()})")
    head = "import sys\nfrom pathlib import Path\nfrom banyan_runtime.storage.local import *\nfrom banyan_runtime.storage.store import *\n"
    script = f"{head}folder = Path(sys.argv[1])\n{textwrap.dedent(code)}"
    shell = ["unshare", "-rm", "sh", "-c", '"$@" && exec "$PYTHON" -c "$SCRIPT" "$FOLDER"', "sh", *mount]
    environment = os.environ | {"PYTHON": sys.executable, "SCRIPT": script, "FOLDER": str(folder)}
    done = subprocess.run(shell, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_a_full_disk_is_named_and_what_did_not_fit_is_gone(tmp_path: Path) -> None:
    told = on_a_disk(
        tmp_path,
        """
        store = LocalStore(folder)
        store.put("keep", bytes(700_000))
        for size in (400_000, 300_000):
            try:
                store.put("a/big", bytes(size))
                print("fits")
            except Full as error:
                print(error.key)
        print(sorted(p.name for p in folder.rglob("*") if p.is_file()))
        """,
    )
    first, second, files = told.splitlines()
    assert first == f"file://{tmp_path}/a/big"
    assert second == "fits"  # the first try took no room with it
    assert files == "['big', 'keep']"


def test_a_disk_that_many_small_writes_fill_is_full_and_not_a_bug(tmp_path: Path) -> None:
    told = on_a_disk(
        tmp_path,
        """
        store = LocalStore(folder)
        upload = store.upload("lines")
        try:
            for _ in range(40_000):
                upload.write(b"x" * 100)
        except Full as error:
            print("write:", error.reason)
        for again in (lambda: upload.write(b"x"), upload.complete):
            try:
                again()
                print("went on after a failed write")
            except Full as error:
                print("again:", error.reason)
        print(list(folder.iterdir()))
        upload.abort()
        upload.abort()
        """,
    )
    reason = "no space left on device"
    assert told.splitlines() == [f"write: {reason}", f"again: {reason}", f"again: {reason}", "[]"]


def test_a_disk_without_inodes_is_full(tmp_path: Path) -> None:
    told = on_a_disk(
        tmp_path,
        """
        store = LocalStore(folder)
        try:
            for i in range(50):
                store.put(f"{i}", b"")
        except Full as error:
            print("full")
        done = len([p for p in folder.iterdir() if p.name.isdigit()])
        store.delete("0")
        print(done > 5, [p.name for p in folder.iterdir() if not p.name.isdigit()])
        """,
        "size=1m,nr_inodes=20",
    )
    assert told.splitlines() == ["full", "True []"]


@pytest.mark.parametrize("step", ["write", "fsync", "close"])
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_a_failure_of_any_step_is_typed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(step)
        raise OSError(code, os.strerror(code))

    class Failing:
        """A file on a volume that reports late, as NFS may."""

        def __init__(self, file: object) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return fail if name == step and not calls else getattr(self._file, name)

    store = LocalStore(tmp_path)
    upload = store.upload("x")
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(upload, "_file", Failing(upload._file))
    kind = Unreachable if code == errno.EIO else Full

    def write() -> None:
        upload.write(b"data")
        upload.complete()

    with pytest.raises(kind):
        write()
    with pytest.raises(kind):  # nobody knows what the file holds: another fsync would say that all is well
        upload.complete()
    assert calls == [step]
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk_is_denied(tmp_path: Path) -> None:
    told = on_a_disk(
        tmp_path,
        """
        import subprocess
        store = LocalStore(folder)
        store.put("x", b"data")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        print(store.get("x"))
        for call in (lambda: store.put("x", b""), lambda: store.put("a/y", b""), lambda: store.delete("x"), lambda: store.upload("z")):
            try:
                call()
            except Denied as error:
                print(error.reason)
        """,
    )
    assert told.splitlines() == ["b'data'"] + ["read-only file system"] * 4


def test_a_folder_without_permission_is_denied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("x", b"")
    tmp_path.chmod(0o500)
    user = os.geteuid()
    try:
        os.seteuid(user or 65_534)  # root may write everywhere
        for call in (lambda: store.put("y", b""), lambda: store.put("a/y", b""), lambda: store.delete("x")):
            with pytest.raises(Denied):
                call()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_permission_that_is_lost_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    store = LocalStore(tmp_path)
    upload = store.upload("x")
    upload.write(b"data")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(Denied):
        upload.complete(if_none_match=True)
    upload.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_under_a_writer_is_not_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    upload = store.upload("a/x")
    upload.write(b"data")
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(NotFound):
        upload.complete(if_none_match=True)
    upload.abort()
    with pytest.raises(NotFound):
        store.get("a/x")
    store.put("a/x", b"made anew")
    assert store.get("a/x") == b"made anew"


def test_a_file_in_a_folders_place_is_said(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"file")
    with pytest.raises(StoreError):
        store.put("a/b", b"")
    store.put("folder/x", b"")
    calls: list[Callable[[], object]] = [lambda: store.get("folder"), lambda: store.head("folder"), lambda: store.put("folder", b"")]
    for call in (*calls, lambda: store.put("folder", b"", if_none_match=True)):
        with pytest.raises(StoreError) as error:
            call()
        assert error.value.key == store.uri("folder")
    assert not list(tmp_path.glob(f"*{TEMPORARY}"))


def test_a_pipe_is_no_object_and_a_reader_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(StoreError, match=r"pipe\.jsonl"):
        store.head("pipe.jsonl")
    store.put("a", b"1")
    assert [info.key for info in store.list()] == ["a"]


def test_of_the_limits_of_a_process_that_of_open_files_is_waited_for_and_that_of_a_files_size_is_not(tmp_path: Path) -> None:
    script = """
    import resource, sys
    from pathlib import Path
    from banyan_runtime.storage.local import LocalStore
    from banyan_runtime.storage.store import StoreError, Unreachable
    store = LocalStore(Path(sys.argv[1]))
    for limit, most in ((resource.RLIMIT_FSIZE, 1000), (resource.RLIMIT_NOFILE, 3)):
        before = resource.getrlimit(limit)
        resource.setrlimit(limit, (most, before[1]))
        try:
            store.put("a", bytes(2000))
        except StoreError as error:
            print(isinstance(error, Unreachable), error.key)
        resource.setrlimit(limit, before)
    """
    argv = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    size, files = done.stdout.splitlines()
    assert size == f"False file://{tmp_path}/a"
    assert files == f"True file://{tmp_path}/a"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_link_that_leads_nowhere_is_named_and_not_taken_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(Path, "hardlink_to", refuse)
    store = LocalStore(tmp_path)
    (tmp_path / "x").symlink_to("/Nowhere/else")
    calls: list[Callable[[], object]] = [lambda: store.get("x"), lambda: store.head("x")]
    for call in (*calls, lambda: store.put("x", b"", if_none_match=True)):
        with pytest.raises(StoreError, match="/Nowhere/else"):
            call()
    store.put("x", b"1")
    assert store.get("x") == b"1"
    assert not list(tmp_path.glob(f".*{TEMPORARY}"))


def test_a_link_whose_answer_was_lost_is_known_as_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Path.hardlink_to

    def twice(self: Path, target: Path) -> None:
        linked(self, target)
        linked(self, target)  # a network volume sends it again

    monkeypatch.setattr(Path, "hardlink_to", twice)
    store = LocalStore(tmp_path)
    store.put("x", b"mine", if_none_match=True)
    with pytest.raises(Precondition):
        store.put("x", b"mine", if_none_match=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_writer_left_is_removed_by_the_next_writer_of_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from banyan_runtime.storage.local import *\n"
        "u = LocalStore(Path(sys.argv[1])).upload('a/dead'); u.write(bytes(1000)); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as writer:  # type: ignore[call-overload]
        writer.stdout.readline()
        (left,) = (tmp_path / "a").iterdir()
        old = time.time() - STALE_SECONDS - 60
        os.utime(left, (old, old))
        LocalStore(tmp_path).put("a/first", b"")
        assert left.exists()  # it lives, however slow it is
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    LocalStore(tmp_path).put("a/second", b"")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["first", "second"]


def test_a_folder_that_does_not_answer_is_told_of(tmp_path: Path) -> None:
    told = queue.Queue[str]()
    store = LocalStore(tmp_path, Patience(60, told.put, first_notice_s=0.05))
    with LocalStore(tmp_path).locked():
        writer = threading.Thread(target=store.put, args=("x", b"data"))
        writer.start()
        assert str(tmp_path) in told.get(timeout=20)
    writer.join()
    assert store.get("x") == b"data"
    assert str(tmp_path) in told.get(timeout=20)
