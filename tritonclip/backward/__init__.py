"""Clipping inside backward: of activation gradients, and of gradients as they arrive."""
