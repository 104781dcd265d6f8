"""How many tokens to draft: as many as are measured to pay, for each request by itself.

With a chance `a` that a draft is right if those before it were, a window of k drafts gives 1 + a + … + a^k tokens. It
is worth as many plain steps as it gives tokens, and costs its time over that of a plain step. Times are running means
by batch size and width, the chance one by request; the cost of what has not run yet is guessed. A request that drafts
nothing tries one draft again after a while, longer each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.engine.request import Request

KEEP = 0.9  # of a running mean, at each new value
FIRST_CHANCE = 0.7
FIRST_COST = 0.06  # of a plain step for each further token, before anything is measured
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # steps without drafts


@dataclass
class _Pace:
    chance: float = FIRST_CHANCE
    pause: int = 0
    next_pause: int = FIRST_PAUSE


class DraftPace:
    """Chooses draft lengths up to `most`; with `adaptive` off always `most`."""

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most, self.adaptive = most, adaptive
        self._paces: dict[Request, _Pace] = {}
        self._seconds: dict[tuple[int, int], float] = {}  # (rows as a power of two, width) -> of a step

    def wanted(self, request: Request, rows: int) -> int:
        """Drafts of the next step of a request, in a batch of `rows`."""
        if not self.adaptive:
            return self.most
        pace = self._paces.setdefault(request, _Pace())
        if pace.pause > 0:
            pace.pause -= 1
            return int(pace.pause == 0)
        best, gain = 0, 1.0
        made = power = 1.0
        for count in range(1, self.most + 1):
            power *= pace.chance
            made += power
            if made / self._cost(rows, count + 1) > gain:
                best, gain = count, made / self._cost(rows, count + 1)
        if not best:
            pace.pause, pace.next_pause = pace.next_pause, min(LONGEST_PAUSE, 2 * pace.next_pause)
        return best

    def learn(self, request: Request, drafted: int, right: int) -> None:
        """Of `drafted` tokens, the first `right` were."""
        pace = self._paces.get(request)
        if pace is None:
            return
        for good in [True] * right + [False] * (right < drafted):
            pace.chance = KEEP * pace.chance + (1 - KEEP) * good
        if right:
            pace.next_pause = FIRST_PAUSE

    def measured(self, rows: int, width: int, seconds: float) -> None:
        """A step of nothing but decode took so long."""
        key = rows.bit_length(), width
        before = self._seconds.get(key, seconds)
        # a first step of its size may have compiled something; the mean forgets it soon, the smaller value at once
        self._seconds[key] = (
            min(seconds, KEEP * before + (1 - KEEP) * seconds)
            if seconds < before
            else (KEEP * before + (1 - KEEP) * min(seconds, 2 * before))
        )

    def forget(self, request: Request) -> None:
        """A request left."""
        self._paces.pop(request, None)

    def _cost(self, rows: int, width: int) -> float:
        """Of a step of windows of `width` tokens, in plain steps."""
        size = rows.bit_length()
        plain, window = self._seconds.get((size, 1)), self._seconds.get((size, width))
        if plain is None or window is None:
            return 1 + FIRST_COST * (width - 1)
        return max(1.0, window / plain)
