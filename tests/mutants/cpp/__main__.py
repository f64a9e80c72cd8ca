"""`python -m tests.mutants.cpp`: see the package."""

import sys

from tests.mutants.cpp.sample import main

sys.exit(main())
