"""Lose a rank in the middle of a training, and go on with the others in the same processes.

Run: python examples/shrink_and_go_on.py

Launchers such as torchrun end all ranks when one dies. This program starts its four ranks itself,
and rank 2 kills itself half-way.
"""

import multiprocessing
import os
import secrets
import signal
import socket

import gradwire
import numpy as np

RANKS, STEPS = 4, 10


def train(rank, store):
    """Move the weights to the mean of all ranks' targets."""
    comm = gradwire.init(rank=rank, ranks=RANKS, store=store, timeout=60)
    target = np.full(1000, rank, np.float32)
    weights, step = np.zeros_like(target), 0
    while step < STEPS:
        if rank == 2 and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = weights - target
        try:
            comm.all_reduce(gradient, op="avg")
        except (gradwire.TransportError, gradwire.Timeout, gradwire.Aborted) as error:
            comm = comm.shrink(timeout=30)
            # Some survivors may have finished the step in which others failed.
            weights, step = comm.broadcast_object((weights, step))
            print(f"rank {rank} lost rank {error.peer}: now rank {comm.rank} of {comm.size}")
            continue
        weights -= gradient
        step += 1
    print(f"rank {rank} ends with {weights[0]:.3f} after {step} steps")
    comm.close()


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    os.environ["GRADWIRE_SECRET"] = secrets.token_hex(32)  # over TCP none is let in without it
    store = f"tcp://127.0.0.1:{free_port()}"
    started = [multiprocessing.Process(target=train, args=(rank, store)) for rank in range(RANKS)]
    for process in started:
        process.start()
    for process in started:
        process.join()
