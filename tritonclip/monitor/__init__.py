"""Norms over a training run."""
