"""The command `gradwire`, as `python -m gradwire`."""

import sys

from gradwire._tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
