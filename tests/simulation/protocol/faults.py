"""Which disturbances happen. Each that does has a number, in the order of the run; a shrunk schedule leaves some out.

Every kind has its own random stream, so that leaving one kind out changes the others as little as possible.
"""

import random
from collections.abc import Collection, Mapping


class Faults:
    """`only`: the numbers that may happen; None: all. `struck` says what did: number → (time, kind, what)."""

    def __init__(self, seed: int, rates: Mapping[str, float], only: Collection[int] | None = None) -> None:
        self._seed = seed
        self._rates = dict(rates)
        self._only = only
        self._streams = {kind: random.Random(f"{seed} {kind}").random for kind in self._rates}
        self.calm = False
        self.count = 0
        self.struck: dict[int, tuple[float, str, str]] = {}
        self.messages = any(kind in self._rates for kind in ("drop", "delay", "duplicate", "reset"))

    def strikes(self, kind: str, now: float, where: object = "") -> bool:
        """Whether one of the disturbances that have a rate happens here and now."""
        stream = self._streams.get(kind)
        if stream is None or stream() >= self._rates[kind] or self.calm:
            return False
        return self.allowed(kind, now, where)

    def allowed(self, kind: str, now: float, where: object = "") -> bool:
        """Numbers a disturbance that is about to happen; False: this one is left out."""
        self.count += 1
        if self._only is not None and self.count not in self._only:
            return False
        self.struck[self.count] = (now, kind, str(where))
        return True
