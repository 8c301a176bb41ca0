"""The Triton backend's verbs, under the names that both backends share."""

from tritonclip.kernels.chunks import prepare
from tritonclip.kernels.clamp import clamp_
from tritonclip.kernels.norm import count_norms, norm
from tritonclip.kernels.scale import scale_, scale_each_

__all__ = ["clamp_", "count_norms", "norm", "prepare", "scale_", "scale_each_"]
