"""Average an array over four ranks of this machine.

Run: gradwire run -n 4 examples/all_reduce.py
"""

import gradwire
import numpy as np

with gradwire.init() as comm:
    x = np.full(1_000_000, comm.rank, np.float32)
    comm.all_reduce(x, op="avg")  # in place
    print(f"rank {comm.rank} of {comm.size}: the average is {x[0]}")
