"""How many elements torch is given at a time on a CPU, where cores are idle and where not.

An operator on 32,768 elements or more, torch's grain, is a parallel region: it ends when its last
thread does.
Where other processes keep the cores busy, a thread may wait for its turn, for as long as one
process may run: 92 regions, 48M bfloat16 elements in pieces of 2^20, took 29 ms or 730, as the
scheduler placed the threads. Operators on fewer elements run in the calling thread.
"""

from collections.abc import Iterator
from time import perf_counter_ns

# The most elements of an operator in one thread: fewer than torch's grain of 32,768, and a multiple
# of the elements of a row.
SERIAL = 32640
# Elements of half types that are converted to float32 at a time: 1 MiB of scratch stays in the
# cores' own caches. The norm of GPT-2's 124M in bfloat16 takes 27, 30 and 34 ms with 2^18, 2^19 and
# 2^20, that of 16M 8.9 with SERIAL. (torch 2.13, Xeon, 2 threads.)
CONVERTED = 2**18
# Nanoseconds for a piece, and for each of its elements, from which it is late: 16M elements that no
# cache holds take 0.2 ns each.
LATE, LATE_EACH = 2_000_000, 1
# Pieces for one thread after a late one, and how many times as many after the next: 64 take some 9
# ms, and a list of 48M elements is tried at most four times in all threads.
PENALTY, GROWTH = 64, 4


class Pace:
    """Cuts gradients into pieces; for a while after one that was late, into those of one thread.

    Args:
        size: elements of a piece otherwise; a multiple of the elements of a row.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Pieces for one thread that are left, and those after the next late one.
        self._left, self._penalty = 0, PENALTY

    def spans(self, n: int) -> Iterator[tuple[int, int]]:
        """Start and stop of each piece of n elements; the next is asked for when one is done."""
        start = 0
        while start < n:
            stop = min(n, start + (SERIAL if self._left else self._size))
            began = perf_counter_ns()
            yield start, stop
            if self._left:
                self._left -= 1
            elif perf_counter_ns() - began > LATE + LATE_EACH * (stop - start):
                self._left, self._penalty = self._penalty, GROWTH * self._penalty
            start = stop
