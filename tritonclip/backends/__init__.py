"""Who computes: Triton kernels, or PyTorch."""
