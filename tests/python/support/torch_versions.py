"""What tests of the backend must know of the torch that they run with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire.torch.backend import versions

# From 2.14 on, torch makes the group itself, and wraps the operations of a backend in Python.
WRAPS = versions.parse(torch.__version__) >= versions.FIRST_WITH_BACKENDS

# From 2.15 on, `split_group` takes groups of the CPU.
SPLITS = versions.parse(torch.__version__) >= (2, 15)

forwards_all = pytest.mark.skipif(
    WRAPS, reason="this torch forwards only wait and get_future of an operation in Python"
)

# FSDP2 of torch 2.7 asserts a CUDA event where it replicates shards.
HYBRID_SHARDS = versions.parse(torch.__version__) >= (2, 8)

has_hybrid_shards = pytest.mark.skipif(
    not HYBRID_SHARDS, reason="this torch's FSDP2 cannot replicate shards on the CPU"
)

has_fsdp_hooks = pytest.mark.skipif(
    versions.parse(torch.__version__) < (2, 9), reason="this torch does not let FSDP2 be replaced"
)

has_monitored_barriers = pytest.mark.skipif(
    not WRAPS, reason="this torch leaves monitored_barrier to gloo alone"
)

gloo_has_complex = pytest.mark.skipif(
    versions.parse(torch.__version__) < (2, 9), reason="this torch's gloo takes no complex numbers"
)


def endpoint_of(group: Any) -> Any:
    """The backend's own part of a process group."""
    return group._get_backend(torch.device("cpu"))._endpoint
