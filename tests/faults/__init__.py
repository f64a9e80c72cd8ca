"""The fault campaign: random faults in random jobs, and what must hold all the same.

`python -m faults --count 1000 --seed S` runs it (`make faults`); `--only N` repeats one case.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "python/support"))  # for the stopwatch
