"""How many elements torch is given at a time on a CPU.

An operator on 32,768 elements or more, torch's grain, is a parallel region: it ends when its last
thread does. The time to start one, and the cache for scratch, differ from processor to processor:
the first pieces of a large list have several sizes, and the others that of the fastest.
Where other processes keep the cores busy, a thread may wait for its turn, for as long as one
process may run: 92 regions, 48M bfloat16 elements in pieces of 2^20, took 29 ms or 730, as the
scheduler placed the threads. Operators on fewer elements run in the calling thread.
"""

import math
from collections.abc import Iterator
from time import perf_counter_ns

# The most elements of an operator in one thread: fewer than torch's grain of 32,768, and a multiple
# of the elements of a row.
SERIAL = 32640
# Elements of half types that are converted to float32 at a time, in 1 or 4 MiB of scratch. The norm
# of 124M in bfloat16 takes 42, 34, 28, 26 and 28 ms in pieces of 2^18 to 2^22 on an AMD EPYC, where
# a region takes 5 us to start; on a Xeon 27, 30 and 34 ms in pieces of 2^18 to 2^20. That of 16M
# takes 8.9 ms there with SERIAL. (torch 2.13, 2 threads.)
CONVERTED = (2**18, 2**20)
# How often each size is tried: the first piece also pays for scratch that no call has used.
TRIED = 2
# Nanoseconds for a piece, and for each of its elements, from which it is late: 16M elements that no
# cache holds take 0.2 ns each.
LATE, LATE_EACH = 2_000_000, 1
# Pieces for one thread after a late one, and how many times as many after the next: 64 take some 9
# ms, and a list of 48M elements is tried at most four times in all threads.
PENALTY, GROWTH = 64, 4


class Pace:
    """Cuts gradients into pieces of several sizes in turn, and then of the fastest of them.

    For a while after one that was late, pieces are those of one thread.

    Args:
        sizes: elements of a piece; multiples of the elements of a row.

    Attributes:
        way: the index of the size that the current piece has, or would have in all threads.
        kept: the index of the fastest size; None until each was tried.
    """

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self.way = 0
        self.kept: int | None = None
        # The fewest nanoseconds an element for each size, and how many pieces are left to try.
        self._least = [math.inf] * len(sizes)
        self._untried = TRIED * len(sizes) if len(sizes) > 1 else 0
        # Pieces for one thread that are left, and those after the next late one.
        self._left, self._penalty = 0, PENALTY

    @property
    def is_serial(self) -> bool:
        """Whether the next piece is for one thread."""
        return self._left > 0

    def spans(self, n: int) -> Iterator[tuple[int, int]]:
        """Start and stop of each piece of n elements; the next is asked for when one is done."""
        start = 0
        while start < n:
            stop = min(n, start + (SERIAL if self._left else self._sizes[self.way]))
            began = perf_counter_ns()
            yield start, stop
            took = perf_counter_ns() - began
            if self._left:
                self._left -= 1
            elif took > LATE + LATE_EACH * (stop - start):
                self._left, self._penalty = self._penalty, GROWTH * self._penalty
                if self._untried:
                    # This size may be why.
                    self.way = (self.way + 1) % len(self._sizes)
            elif self._untried and stop - start >= min(self._sizes):
                self._compare(took / (stop - start))
            start = stop

    def _compare(self, each: float) -> None:
        """Takes the nanoseconds an element of the last piece, and chooses the next size."""
        self._least[self.way] = min(self._least[self.way], each)
        self._untried -= 1
        self.way = (self.way + 1) % len(self._sizes)
        if not self._untried:
            self.way = self.kept = self._least.index(min(self._least))
