"""What goes between the host and a GPU with each step, by kernels: in Triton's interpreter, or on the GPU that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan_runtime.model import mail
from banyan_runtime.model.attention import Held
from banyan_runtime.model.kernels import mail as kernels
from banyan_runtime.model.mail import DirectMail, Mail
from banyan_runtime.model.post import TURNS, PostWithin
from tests.kernels.test_triton import DEVICE
from tests.support.models.pretended import DEVICE as GPU
from tests.support.models.pretended import PretendedGpu, pretended


def of_the_host(*numbers: int) -> torch.Tensor:
    letter = torch.tensor(numbers, dtype=torch.int32)
    return letter.pin_memory() if DEVICE == "cuda" else letter


def test_tokens_are_delivered_and_noted() -> None:
    tokens, owners = torch.tensor([5, 6, 7], device=DEVICE), torch.tensor([4, 0, 2], device=DEVICE)
    failed, latest = torch.tensor([False, True, False], device=DEVICE), torch.full((5,), -1, device=DEVICE)
    arriving = of_the_host(0, 0, 0, 9)
    kernels.deliver[(1,)](tokens, failed, owners, latest, arriving, 3, BLOCK=16)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert arriving.tolist() == [5, -1, 7, 9]
    assert latest.tolist() == [6, -1, 7, -1, 5]


def test_copies_bring_and_note_as_much() -> None:
    target, latest = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    post = Mail()
    post.bring(np.arange(4, dtype=np.int32).reshape(2, 2), target)
    assert target.tolist() == [[0, 1], [2, 3]]
    assert post.deliver(torch.tensor([8]), torch.tensor([False]), torch.tensor([1]), latest) is None
    assert latest.tolist() == [0, 8, 0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    with pretended(monkeypatch, tmp_path) as found:
        yield found


def test_letters_stay_until_they_are_read(gpu: PretendedGpu) -> None:
    """Of one that nobody waits for, too; else torch would give its memory to somebody else while the GPU still writes there. Nobody waits
    for a letter that has just been sent."""
    post, latest = DirectMail(), torch.zeros(1, dtype=torch.int64, device=GPU)
    token, failed, owner = torch.tensor([3], device=GPU), torch.tensor([False], device=GPU), torch.tensor([0], device=GPU)
    gpu.waits.clear()
    sent = []
    for number in range(3 * mail.KEPT):
        assert post.deliver(token + number, failed, owner, latest) is not None
        sent.append(post._letters[-1])
        kept = {id(one) for one in (*post._letters, *post._earlier)}
        unread = [one for one in sent if one.tolist() == [torch.iinfo(torch.int32).max // 3]]
        assert {id(one) for one in unread} <= kept
        assert len(unread) >= min(len(sent), mail.KEPT)
        assert len(kept) <= 2 * mail.KEPT
    torch.cuda.current_stream().record_event().synchronize()
    assert [one.item() for one in sent] == [3 + number for number in range(len(sent))]
    assert gpu.waits == []


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("rows", [5, 1, 1030])
def test_steps_find_what_they_were_told(gpu: PretendedGpu, rows: int) -> None:
    """Each its own letter and its own settings, however often pages are used again; its tokens are noted for its rows, and arrive when the
    device has come so far."""
    held, settings = Held.empty(rows, GPU), torch.zeros(rows, 2, dtype=torch.int32, device=GPU)
    latest = torch.full((rows,), -1, dtype=torch.int64, device=GPU)
    post = DirectMail().post(held.told.numel(), settings.numel(), rows, GPU)
    assert isinstance(post, PostWithin)
    for _ in range(3):
        post.take(held.told)  # as captures do
    post.begin()
    gpu.waits.clear()
    padded = rows // 4  # whose count is 0
    for number in range(2 * TURNS + 3):
        told = np.full(tuple(held.told.shape), number, np.int32)
        told[1, :rows], told[4, :rows] = np.arange(rows)[::-1], np.arange(rows) >= padded
        post.tell(told, held.told)
        post.set(np.full((rows, 2), -number, np.int32), settings)
        post.take(held.told)
        post.take_settings(settings)
        tokens = torch.arange(rows, device=GPU) + 100 * number
        failed = torch.arange(rows, device=GPU) == rows - 1
        post.answer(tokens, failed, held, latest)
        arriving = post.answers(rows)
        assert arriving is not None
        assert (arriving()[padded:-1] == torch.iinfo(torch.int32).max // 3).all()  # not there yet
        torch.cuda.current_stream().record_event().synchronize()
        assert arriving()[padded:].tolist() == [*(row + 100 * number for row in range(padded, rows - 1)), -1]
        assert torch.equal(held.told.kept, torch.from_numpy(told))  # type: ignore[attr-defined]
        assert (settings.kept == -number).all()  # type: ignore[attr-defined]
        noted = [row + 100 * number if row >= padded else -1 for row in range(rows)]
        assert latest.kept.tolist() == noted[::-1]  # type: ignore[attr-defined]
    assert gpu.waits == []


def test_no_page_is_written_over_that_a_step_may_still_read(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a step before it tells the one after the next one, as engines do, never waits here."""
    post = DirectMail().post(4, 4, 1, GPU)
    assert isinstance(post, PostWithin)
    told = ended = 0  # steps

    class Event:
        def __init__(self) -> None:
            self._upto = told

        def synchronize(self) -> None:
            nonlocal ended
            assert self._upto <= told - TURNS // 2 + 1
            ended = max(ended, self._upto)

    class Stream:
        def record_event(self) -> Event:
            return Event()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    first = None
    pages = [0] * TURNS  # when each was written last
    for _ in range(5 * TURNS):
        post.tell(np.zeros(4, np.int32), torch.zeros(4, dtype=torch.int32, device=GPU))
        told += 1
        assert pages[told % TURNS] <= ended
        pages[told % TURNS] = told
        first = first or post.answers(1)
        if told == TURNS:
            first()
    with pytest.raises(AssertionError, match="another step's"):
        first()
