"""A made-up GPU for the tuner."""

from tritoncomm.tune.candidates import Candidate
from tritoncomm.tune.cases import Case

__all__ = ["DEVICE", "FakeBench"]

DEVICE = ("Test GPU", 7)


class FakeBench:
    """A device whose times are made up: 8 loads per thread are fastest, the default takes 100 us per MiB."""

    device_name, sm_count, target, lanes = *DEVICE, None, 32

    def __init__(self, interrupt_after: int = 10**9, wrong: str = "", clock: list[float] | None = None) -> None:
        self.timed: list[tuple[str, str]] = []
        self.compared = 0
        self._left, self._wrong, self._clock = interrupt_after, wrong, clock

    def check(self, case: Case, candidate: Candidate) -> str:
        return "3 of 7 elements differ" if candidate.label == self._wrong else ""

    def time(self, case: Case, candidate: Candidate) -> float:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        if self._clock is not None:
            self._clock[0] += 1.0
        self.timed.append((case.label, candidate.label))
        best = 128 * 32 * candidate.num_warps == candidate.tile_bytes and candidate.segment_bytes == 1024
        return case.nbytes / 2**20 * ((80.0 if best else 100.0 + candidate.num_warps) + candidate.evict_first)

    def paths(self, case: Case) -> tuple[float, float]:
        self.compared += 1
        return (5.0, 9.0) if case.nbytes < 100_000 else (50.0, 20.0)
