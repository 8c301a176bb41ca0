"""A step that failed after it began to write gradients, and the one that is tried again."""

from collections.abc import Iterable

from torch import Tensor

from tritonclip.monitor.stats import Outcomes
from tritonclip.optim.memory import Judgement, Memory
from tritonclip.optim.step import StepClipping


class Attempt:
    """The part of a step that must happen once: its gradients are divided and clipped.

    Attributes:
        clipping: the gradients, measured.
        skip: whether to leave the step out, on the device; None for no.
        outlier: the verdict of the test for outliers, where there is one.
        overflow: whether a GradScaler leaves it out, on the device; None for no.
        stop: whether the device is to leave it out; None where the host has decided to take it.
        outcomes: of the clipping, as soon as all gradients are written.
    """

    def __init__(
        self,
        clipping: StepClipping,
        skip: Tensor | None,
        outlier: Judgement | None,
        *,
        scaled: bool,
    ) -> None:
        self.clipping, self.skip, self.outlier = clipping, skip, outlier
        self.overflow: Tensor | None = None
        self.stop: Tensor | None = None
        self.outcomes: Outcomes | None = None
        self._scaled = scaled
        self._seen: list[tuple[Tensor, int]] = []
        self._verdict: bool | None = None

    def fail(self) -> None:
        """Remembers the gradients that the failed step leaves."""
        self._verdict = None
        self._seen = [(grad, _version(grad)) for grad in self.clipping.written_to()]

    def judge(self, there: Iterable[Tensor]) -> None:
        """Decides now whether the next step goes on: before a GradScaler writes to gradients."""
        self._verdict = None
        self._verdict = self.goes_on(there)

    def refuse_unscaling(self, there: Iterable[Tensor]) -> None:
        """RuntimeError where a GradScaler would divide the gradients that the failed step left."""
        self.judge(there)
        if self._verdict:
            raise RuntimeError(
                "the step before ended after it divided or clipped these gradients, and unscale_ "
                "would divide them again; expected another step, which goes on with them, or new "
                "gradients: call zero_grad and backward"
            )

    def goes_on(self, there: Iterable[Tensor]) -> bool:
        """Whether the gradients are those that the failed step left, so that none is written again.

        Raises:
            RuntimeError: some are, and would be divided or clipped twice, or not at all.
        """
        if self._verdict is not None:
            return self._verdict
        present = set(map(id, there))
        same = [id(grad) in present and _version(grad) == n for grad, n in self._seen]
        whole = self.outcomes is not None
        if not any(same) or (whole and not self._scaled and not all(same)):
            return False
        if whole and all(same):
            return True
        raise RuntimeError(
            "the step before ended while it divided or clipped gradients, and some of them are "
            "still there as it left them; expected new gradients: call zero_grad and backward"
        )

    def remember_in(self, memory: Memory) -> None:
        """Has the step remembered there: a checkpoint may have been loaded since it failed."""
        self.clipping.remember_in(memory)
        if self.outlier is not None and memory.skip_above is not None:
            # The step goes on as it was judged.
            self.outlier = memory.judge(self.outlier.norm)._replace(flag=self.outlier.flag)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
