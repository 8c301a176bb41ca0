"""The Triton backend: the only code that imports triton. Installed as `tritonclip.kernels`."""
