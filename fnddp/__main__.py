"""`python -m fnddp`."""

import sys

from fnddp.cli.main import main

# Ranks that the demo starts import this file too, under another name.
if __name__ == "__main__":
    sys.exit(main())
