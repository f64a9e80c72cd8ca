"""`python -m gradwire`."""

import sys

from gradwire._cli import main

if __name__ == "__main__":
    sys.exit(main())
