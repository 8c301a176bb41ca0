"""In which way, and how many elements at a time, torch writes large gradients on a CPU.

What is faster differs from processor to processor: the first pieces of a large list are written in
several ways, and the others in the fastest. An operator on 32,768 elements or more, torch's grain,
is a parallel region: it ends when its last thread does.
Where other processes keep the cores busy, a thread may wait for its turn, for as long as one
process may run: 92 regions, 48M bfloat16 elements in pieces of 2^20, took 29 ms or 730, as the
scheduler placed the threads. Operators on fewer elements run in the calling thread.
"""

import math
from collections.abc import Iterator
from time import perf_counter_ns

# The most elements of an operator in one thread: fewer than torch's grain of 32,768.
SERIAL = 32640
# How often each way is tried, one after the other: the first piece also pays for scratch that no
# call has used, or that another thread has.
TRIED = 2
# Nanoseconds for a piece, and for each of its elements, from which it is late: 16M elements that no
# cache holds take 0.2 ns each.
LATE, LATE_EACH = 2_000_000, 1


class Pace:
    """Cuts gradients into pieces for several ways, one after the other, and then for the fastest.

    After a late piece, pieces are those of one thread until they took as long as it did: but for
    its last late piece, a call takes at most twice as long as in one thread. Where all threads were
    faster nevertheless, they go on.

    Args:
        sizes: elements of a piece in each way.

    Attributes:
        way: the index of the current way.
        kept: the index of the fastest way; None until each was tried.
    """

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self.way = 0
        self.kept: int | None = None
        # The fewest nanoseconds an element in each way, and how many pieces are left to try.
        self._least = [math.inf] * len(sizes)
        self._untried = TRIED * len(sizes) if len(sizes) > 1 else 0
        # Nanoseconds that are left to one thread.
        self._left = 0
        # Nanoseconds and elements, in all threads since one thread ended, and in one thread.
        self._shared_ns = self._shared_n = self._alone_ns = self._alone_n = 0

    @property
    def is_serial(self) -> bool:
        """Whether the next piece is for one thread."""
        return self._left > 0

    def spans(self, n: int) -> Iterator[tuple[int, int]]:
        """Start and stop of each piece of n elements; the next is asked for when one is done."""
        began = perf_counter_ns()
        start = 0
        while start < n:
            is_serial = self.is_serial
            stop = min(n, start + (SERIAL if is_serial else self._sizes[self.way]))
            yield start, stop
            now = perf_counter_ns()
            took, size = now - began, stop - start
            began, start = now, stop
            if is_serial:
                self._alone_ns += took
                self._alone_n += size
                self._left -= took
                if not self.is_serial:
                    self._shared_ns = self._shared_n = 0
                continue
            self._shared_ns += took
            self._shared_n += size
            if took > LATE + LATE_EACH * size:
                self._be_late(took)
            elif self._untried and 2 * size >= min(self._sizes):
                self._compare(took / size)

    def _be_late(self, took: int) -> None:
        """Takes the nanoseconds of a late piece; leaves the next to one thread if it is faster."""
        n_alone = self._alone_n
        if not n_alone or self._shared_ns * n_alone > self._alone_ns * self._shared_n:
            self._left = took
        if self._untried:
            # This way may be why.
            self.way = (self.way + 1) % len(self._sizes)

    def _compare(self, each: float) -> None:
        """Takes the nanoseconds an element of the last piece, and chooses the next way."""
        self._least[self.way] = min(self._least[self.way], each)
        self._untried -= 1
        if self._untried % TRIED == 0:
            self.way = (self.way + 1) % len(self._sizes)
        if not self._untried:
            self.way = self.kept = self._least.index(min(self._least))
