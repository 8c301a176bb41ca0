"""`python -m tritonclip`: the command line."""

from tritonclip.commands.cli import main

if __name__ == "__main__":
    # Not sys.exit, which a script that was run may have replaced.
    raise SystemExit(main())
