"""Write an algorithm: an all_reduce along a chain of ranks, verified before it runs.

Run: gradwire run -n 4 examples/own_schedule.py
"""

import gradwire
import numpy as np


def chain(ranks):
    """Add up along the chain from the last rank to rank 0, then copy the sum back along it."""
    made = gradwire.Schedule.builder("all_reduce", ranks=ranks, chunks=1, name="chain")
    last = ranks - 1
    for hop in range(last):
        made.reduce(hop, src=last - hop, dst=last - hop - 1, chunks=0)
        made.copy(last + hop, src=hop, dst=hop + 1, chunks=0)
    return made.build()


with gradwire.init() as comm:
    schedule = chain(comm.size)
    if comm.rank == 0:
        print(schedule.verify())
    x = comm.all_reduce(np.full(1000, comm.rank + 1.0), schedule=schedule)
    print(f"rank {comm.rank}: the sum is {x[0]}")
