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

from torch import Tensor

# The most elements of an operator in one thread: fewer than torch's grain of 32,768, and a multiple
# of the elements of a row.
SERIAL = 32640
# Elements of half types that are converted to float32 at a time, in 1 or 4 MiB of scratch. The norm
# of 124M in bfloat16 takes 42, 34, 28, 26 and 28 ms in pieces of 2^18 to 2^22 on an AMD EPYC, where
# a region takes 5 us to start; on a Xeon 27, 30 and 34 ms in pieces of 2^18 to 2^20. That of 16M
# takes 8.9 ms there with SERIAL. (torch 2.13, 2 threads.)
CONVERTED = (2**18, 2**20)
# How often each size is tried, one after the other: the first piece also pays for scratch that no
# call has used, or that another thread has.
TRIED = 2
# Nanoseconds for a piece, and for each of its elements, from which it is late: 16M elements that no
# cache holds take 0.2 ns each.
LATE, LATE_EACH = 2_000_000, 1


def middle_of(scratch: Tensor, n: int) -> Tensor:
    """The n elements, or rows, in the middle of scratch.

    Each of two threads then meets the same half of scratch, however long pieces are. Memory that
    one thread wrote and another one read is slow to write again: bfloat16 pieces of 2^20, 589,824,
    720,896 and 2^18 elements at the start of scratch are converted and measured in 1.4 to 1.8 ms,
    in the middle in 0.3 to 0.5. (torch 2.13, AMD EPYC, when its cores probably shared no cache.)
    """
    start = (len(scratch) - n) // 2
    return scratch[start : start + n]


class Pace:
    """Cuts gradients into pieces of several sizes, one after the other, and then of the fastest.

    After a late piece, pieces are those of one thread until they took as long as it did: but for
    its last late piece, a call takes at most twice as long as in one thread. Where all threads were
    faster nevertheless, they go on.

    Args:
        sizes: elements of a piece; multiples of the elements of a row. Equal ones may stand for
            different operators.

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
        # Nanoseconds that are left to one thread.
        self._left = 0
        # Nanoseconds and elements, in all threads since one thread ended, and in one thread.
        self._shared_ns = self._shared_n = self._alone_ns = self._alone_n = 0

    @property
    def is_serial(self) -> bool:
        """Whether the next piece is for one thread."""
        return self._left > 0

    def spans(self, *sizes: int, whole: bool = False) -> Iterator[tuple[int, int, int]]:
        """The pieces of tensors, one after the other; the next is asked for when one is done.

        Args:
            sizes: elements of each tensor.
            whole: give each as one piece, which the caller cuts for one thread.

        Yields:
            The index of a tensor, and start and stop of a piece of it.
        """
        began = perf_counter_ns()
        for i, n in enumerate(sizes):
            start = 0
            while start < n:
                is_serial = self.is_serial
                most = n if whole else SERIAL if is_serial else self._sizes[self.way]
                stop = min(n, start + most)
                yield i, start, stop
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
            # This size may be why.
            self.way = (self.way + 1) % len(self._sizes)

    def _compare(self, each: float) -> None:
        """Takes the nanoseconds an element of the last piece, and chooses the next size."""
        self._least[self.way] = min(self._least[self.way], each)
        self._untried -= 1
        if self._untried % TRIED == 0:
            self.way = (self.way + 1) % len(self._sizes)
        if not self._untried:
            self.way = self.kept = self._least.index(min(self._least))
