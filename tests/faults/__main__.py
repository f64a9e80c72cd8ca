"""`python -m tests.faults`: see `campaign`."""

import sys

from tests.faults.campaign import main

sys.exit(main())
