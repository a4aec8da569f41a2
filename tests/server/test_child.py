"""A process of ours beside this one, where the system has little for it."""

from __future__ import annotations

import asyncio
import os

import pytest

from banyan_runtime.child import Child


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
