"""Benchmarks of tritonclip against what a user would pick instead; run from the repository root.

`__main__` has the commands: `speed` and `functional` in speed.py, the others in files of their
names. Imports point up this list: workloads and results; accuracy, which also checks results;
timing; providers and frameworks, which are compared; codegen; speed, host and distributed; report.
"""
