"""What a step is told, and the tokens that come of it, on their way between the host and a device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from banyan_runtime.model.device import pinned
from banyan_runtime.model.post import Arriving, Post, PostWithin
from banyan_runtime.step import I32

KEPT: Final = 16  # letters, of which some may be on their way: a step has one, and few steps are in flight


class Mail:
    """By copies."""

    def bring(self, told: I32, target: Tensor) -> None:
        """int32 numbers of the host into as many on the device, behind what was launched before."""
        target.copy_(pinned(told, target.device, torch.int32), non_blocking=True)

    def deliver(self, tokens: Tensor, failed: Tensor, owners: Tensor, latest: Tensor) -> Arriving | None:
        """Note drawn tokens int64 [n] in `latest` as those of the rows `owners`, int64 [n]. And send them to the host, -1 where
        bool `failed` [n]. None: whoever calls sends them."""
        latest.index_copy_(0, owners, tokens)
        return None

    def post(self, letter: int, settings: int, rows: int, device: torch.device) -> Post:
        """Of steps that are replayed, as `PostWithin` has it."""
        return Post(self)


class DirectMail(Mail):
    """By kernels on CUDA, which a GPU begins sooner than copies (`kernels/mail.py`)."""

    _BLOCK: Final = 1024

    def __init__(self) -> None:
        from banyan_runtime.model.kernels import mail

        self._kernels = mail
        # Torch knows nothing of what kernels do with memory of the host, and would give it to somebody else.
        self._letters: list[Tensor] = []
        self._earlier: list[Tensor] = []
        self._read: torch.cuda.Event | None = None  # when no kernel is left that the earlier ones are for

    def deliver(self, tokens: Tensor, failed: Tensor, owners: Tensor, latest: Tensor) -> Arriving | None:
        count = len(tokens)
        letter = self._kept(torch.empty(count, dtype=torch.int32, pin_memory=True))
        self._kernels.deliver[(-(-count // self._BLOCK),)](tokens, failed, owners, latest, letter, count, BLOCK=self._BLOCK)
        arriving: Arriving = letter.numpy().copy
        return arriving

    def post(self, letter: int, settings: int, rows: int, device: torch.device) -> Post:
        return PostWithin(letter, settings, rows, device)

    def _kept(self, letter: Tensor) -> Tensor:
        """Until no kernel needs it, whoever else lets it go."""
        if len(self._letters) == KEPT:
            if self._read is not None:
                self._read.synchronize()
            self._earlier, self._letters = self._letters, []
            self._read = torch.cuda.current_stream().record_event()
        self._letters.append(letter)
        return letter
