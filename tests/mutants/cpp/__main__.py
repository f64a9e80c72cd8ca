"""`PYTHONPATH=tests python -m mutants.cpp`: see the package."""

import sys

from mutants.cpp.sample import main

sys.exit(main())
