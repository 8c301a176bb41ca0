"""Files of recorders: their paths, and files with whole runs."""

from helpers.recordings import path, record_runs

__all__ = ["path", "record_runs"]
