"""The plans of gradients that are clipped one at a time, apart from those of `clip_`."""

from tritonclip.engine.plan_cache import PlanCache

# More than the forms of the gradients of most models, which come in turn; their memory is bounded
# all the same.
plans = PlanCache(capacity=256)
