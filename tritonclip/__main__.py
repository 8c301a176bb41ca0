"""`python -m tritonclip`: the command line."""

from tritonclip.commands.cli import main

if __name__ == "__main__":
    # A script that ran here may have replaced sys.exit.
    raise SystemExit(main())
