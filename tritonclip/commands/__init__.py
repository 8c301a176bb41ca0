"""The command line, `python -m tritonclip`."""
