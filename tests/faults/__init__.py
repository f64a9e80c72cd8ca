"""The fault campaign: random faults in random jobs, and what must hold all the same.

`make faults COUNT=1000 SEED=S` runs it; `ARGS="--only N"` repeats one case. `training` and
`serving` are the same for training over torch.distributed and for the parameter server.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "python/support"))  # for the stopwatch
