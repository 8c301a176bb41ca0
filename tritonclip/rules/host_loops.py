"""Averages, quantiles and moments of norms on the host, in C where `has_extension`."""

try:
    from tritonclip.backends._native import advance_averages as advance_averages
    from tritonclip.backends._native import advance_quantiles as advance_quantiles
    from tritonclip.backends._native import mean_and_deviation as mean_and_deviation

    has_extension = True
except ImportError:
    has_extension = False
