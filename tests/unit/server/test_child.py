"""A process of ours beside this one, where the system has little for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from banyan_runtime.child import Child
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError
from banyan_runtime.server.batch_child import START_S, BatchChild, default_storage


@pytest.mark.parametrize("told", [True, False], ids=["told", "asked"])
def test_an_end_is_noted_also_where_the_system_tells_nobody(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    def refused(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if not told:
        monkeypatch.setattr(os, "pidfd_open", refused)
    child = Child("http.server", "--bind", "127.0.0.1", "0")

    async def ended() -> int:
        asyncio.get_running_loop().call_later(0.1, child.kill)
        return await asyncio.wait_for(child.wait(), 10)

    assert asyncio.run(ended()) == -9


def test_a_process_hears_of_no_interrupt_from_its_first_moment_on() -> None:
    """A Ctrl-C while it imports would have it die with a traceback, beside the one that ends it in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = Child("http.server", "--bind", "127.0.0.1", "0")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before

    async def ended() -> int:
        for _ in range(50):
            child.signal(signal.SIGINT)
            await asyncio.sleep(0.02)
        child.signal(signal.SIGTERM)
        return await asyncio.wait_for(child.wait(), 10)

    assert asyncio.run(ended()) == -signal.SIGTERM


def model_at(path: str, *names: str) -> ServerConfig:
    return ServerConfig(model_path=path, served_model_name=names or None)


def test_a_models_storage_is_its_own_however_its_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "b" / "model").mkdir(parents=True)
    found = []
    for folder in ("a", "b"):
        monkeypatch.chdir(tmp_path / folder)
        found.append(default_storage(model_at("model")))
        assert default_storage(model_at(str(tmp_path / folder / "model"))) == found[-1]
        assert default_storage(model_at("../b/../" + folder + "/model")) == found[-1]
        assert default_storage(model_at("model", "name")) == default_storage(model_at(str(tmp_path / folder / "model"), "name"))
    assert len({*found, default_storage(model_at("model", "name")), default_storage(model_at("catalog://model"))}) == 4


def test_who_waits_for_a_batch_host_that_dies_hears_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def asked() -> float:
        child = BatchChild(ServerConfig(model_path="m", file_storage_path=str(tmp_path / "file" / "storage")), "http://127.0.0.1:9", "key")
        began = time.monotonic()
        try:
            with pytest.raises(ApiError) as refused:
                await child.address()
            assert (refused.value.status, refused.value.code) == (503, "unavailable")
        finally:
            await child.close()
        return time.monotonic() - began

    assert asyncio.run(asked()) < START_S / 2
