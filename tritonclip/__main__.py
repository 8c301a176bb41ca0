"""`python -m tritonclip`: the command line."""

import sys

from tritonclip.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
