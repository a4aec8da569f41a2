"""What one life of a batch host shows of being alive, and when that is too little. Knows no clock and does nothing."""

from __future__ import annotations

from typing import Final

LOOK_EVERY_S: Final = 2.0
STALLED_LOOKS: Final = 5  # one after another at which it has said nothing and computed nothing at all
HUNG_LOOKS: Final = 30  # likewise, though it computes: a loop that never comes round, or a machine that has hardly any time for it
OPENING_LOOKS: Final = 60  # until it listens: a storage may keep it waiting, and it says nothing before


class Signs:
    """Looked at every LOOK_EVERY_S. What a look finds counts only if it came in time: while the process that looks stood still or was
    starved, the host may have been as well, and gets all of its time anew. Times are monotonic seconds."""

    def __init__(self, begun: float) -> None:
        self._looked_at = begun
        self._cpu_s = -1.0  # at the last look
        self._heard = False  # since the last look
        self._silent_looks = 0
        self._idle_looks = 0
        self.open = False

    def heard(self) -> None:
        """It has said something: first that it listens, then what it has counted or only that it is there."""
        self.open = self._heard = True
        self._silent_looks = self._idle_looks = 0

    def look(self, now: float, cpu_s: float) -> bool:
        """Whether it is to be ended. `cpu_s`: what it has computed so far."""
        heard, self._heard = self._heard, False
        late, self._looked_at = now - self._looked_at > 2 * LOOK_EVERY_S, now
        idle, self._cpu_s = cpu_s == self._cpu_s, cpu_s
        if heard or late:
            self._silent_looks = self._idle_looks = 0
            return False
        self._silent_looks += 1
        self._idle_looks = self._idle_looks + 1 if idle else 0
        if not self.open:
            return self._silent_looks >= OPENING_LOOKS
        return self._idle_looks >= STALLED_LOOKS or self._silent_looks >= HUNG_LOOKS

    @property
    def silent(self) -> bool:
        """Whether who asks it anything would probably wait in vain."""
        return self.open and self._silent_looks >= STALLED_LOOKS

    @property
    def newly_silent(self) -> bool:
        """As of the last look."""
        return self.open and self._silent_looks == STALLED_LOOKS
