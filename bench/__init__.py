"""Benchmarks of tritonclip against what a user would pick instead; run from the repository root."""
