"""Who computes: Triton kernels, loops in C on a CPU, or PyTorch."""
