"""Gradients as views of one buffer for each device and dtype."""
