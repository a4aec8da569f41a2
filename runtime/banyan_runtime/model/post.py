"""What steps that are replayed are told, and the tokens that come of them, on their way between the host and their graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from banyan_runtime.step import I32

if TYPE_CHECKING:
    from banyan_runtime.model.attention import Held
    from banyan_runtime.model.mail import Mail

TURNS: Final = 16
"""Steps whose letters are kept, of which some may be on their way: few steps are in flight."""


Arriving = Callable[[], I32]
"""A copy of tokens that are on their way to the host, int32 [n], -1 of those that failed. Called when the device has come so far."""


class Post:
    """By mail, beside the graphs: `take` and `answer` capture nothing."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail

    def begin(self) -> None:
        """Whatever was replayed before, and may not have been told anything, the next step finds what it is told. Waits for the device."""

    def tell(self, told: I32, target: Tensor) -> None:
        """A step begins: int32 numbers of the host, for as many on the device. Its graph, which takes them, is replayed next."""
        self._mail.bring(told, target)

    def set(self, settings: I32, target: Tensor) -> None:
        """Likewise how the tokens of the step that was told last are drawn."""
        self._mail.bring(settings, target)

    def take(self, target: Tensor) -> None:
        """Captured where a step begins."""

    def take_settings(self, target: Tensor) -> None:
        """Captured before what draws by them."""

    def answer(self, tokens: Tensor, failed: Tensor, held: Held, latest: Tensor) -> None:
        """Captured behind the draw of a decode step: note its tokens int64 [n] in `latest` as those of its rows, and send them to the
        host, -1 where bool `failed` [n]."""

    def answers(self, rows: int) -> Arriving | None:
        """The tokens of so many rows of the step that was told last, for who asks before TURNS further ones are told. None: nobody noted
        or sent them."""
        return None


class PostWithin(Post):
    """By kernels within the graphs, over pinned memory of the host: a step costs the host no launch but its graphs', and no memory is asked
    for. Host and device both count the steps, and so find the same place."""

    _BLOCK: Final = 1024

    def __init__(self, letter: int, settings: int, rows: int, device: torch.device) -> None:
        """For letters of so many numbers, settings of so many, and decode steps of so many rows, at most."""
        from banyan_runtime.model.kernels import mail as kernels

        self._kernels = kernels

        def pages(numbers: int) -> Tensor:
            return torch.zeros((TURNS, max(1, -(-numbers // 4)) * 4), dtype=torch.int32).pin_memory()

        self._letters, self._settings, self._answers = pages(letter), pages(settings), pages(rows)
        # The same memory, as the host writes and reads it.
        self._written, self._set, self._arriving = (each.numpy() for each in (self._letters, self._settings, self._answers))
        self._told = 0  # steps, ever
        self._turn_there = torch.zeros(1, dtype=torch.int32, device=device)  # of the last step that has begun there
        self._read: torch.cuda.Event | None = None  # when the steps that were told in the other half have ended

    def begin(self) -> None:
        torch.cuda.synchronize(self._turn_there.device)
        self._turn_there.fill_(self._told % TURNS)

    def tell(self, told: I32, target: Tensor) -> None:
        self._told += 1
        if self._told % (TURNS // 2) == 0:
            if self._read is not None:
                self._read.synchronize()
            self._read = torch.cuda.current_stream(target.device).record_event()
        self._written[self._told % TURNS, : told.size] = told.reshape(-1)

    def set(self, settings: I32, target: Tensor) -> None:
        self._set[self._told % TURNS, : settings.size] = settings.reshape(-1)

    def take(self, target: Tensor) -> None:
        self._fetch(self._letters, target, ahead=1)
        # A launch of its own in the usual order, behind which all is there: what follows may read it before it waits (`dependent.py`).
        self._kernels.turn_over[(1,)](self._turn_there, TURNS=TURNS)

    def take_settings(self, target: Tensor) -> None:
        self._fetch(self._settings, target, ahead=0)

    def _fetch(self, pages: Tensor, target: Tensor, ahead: int) -> None:
        assert target.is_contiguous()
        count = target.numel()
        self._kernels.fetch[(-(-count // self._BLOCK),)](
            pages, self._turn_there, target, count, pages.stride(0), AHEAD=ahead, TURNS=TURNS, BLOCK=self._BLOCK
        )

    def answer(self, tokens: Tensor, failed: Tensor, held: Held, latest: Tensor) -> None:
        count = len(tokens)
        self._kernels.answer[(-(-count // self._BLOCK),)](
            tokens, failed, held.rows, held.counts, latest, self._answers, self._turn_there, count, self._answers.stride(0), TURNS=TURNS,
            BLOCK=self._BLOCK,
        )  # fmt: skip

    def answers(self, rows: int) -> Arriving | None:
        return partial(self._arrived, self._told, rows)

    def _arrived(self, step: int, rows: int) -> I32:
        assert self._told < step + TURNS, "its page is another step's by now"
        return self._arriving[step % TURNS, :rows].copy()
