"""`PYTHONPATH=tests python -m faults`: see `campaign`."""

import sys

from faults.campaign import main

sys.exit(main())
