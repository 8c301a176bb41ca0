"""Files of recorders."""

from helpers.recordings import path, record_run

__all__ = ["path", "record_run"]
