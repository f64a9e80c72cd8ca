"""Devices: which calls with CUDA tensors run on the GPU, and which go by way of the host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire._base.backend import DEVICES
from gradwire._calls import on_gpu
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._host import cuda
from gradwire.torch.backend.cuda_staging import ByHost, OnGpu
from gradwire.torch.backend.staging import Staging

_log = logging.getLogger("gradwire")


class Devices:
    """The devices of one group's tensors."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._all_have_gpus: bool | None = None  # with gradwire's CUDA part; None: not asked yet
        self._lock = threading.Lock()

    def staging(
        self, name: str, tensor: torch.Tensor, options: Mapping[str, Any], on_host: bool
    ) -> Staging:
        """The staging of a call whose tensors are on this tensor's device, which is not the CPU.

        The choice follows from what is the same on all ranks. The first call that GPUs take asks
        all ranks whether they can. Raises InvalidArgument for devices other than CUDA.
        """
        device = tensor.device
        if device.type not in DEVICES:
            raise InvalidArgument(
                f"{name}: a tensor is on {device}, and the backend gradwire works on the CPU and "
                "on CUDA: use x.cpu()"
            )
        if on_host or not on_gpu.takes(name, prescale=options.get("prescale", 1.0)):
            return ByHost(device)
        return OnGpu(device, self._communicator) if self._gpus_work() else ByHost(device)

    def _gpus_work(self) -> bool:
        """Whether gradwire's CUDA part works on all ranks; the first call exchanges that."""
        with self._lock:
            if self._all_have_gpus is None:
                self._all_have_gpus = self._ask_all()
            return self._all_have_gpus

    def _ask_all(self) -> bool:
        works, why = cuda.devices()
        found = self._communicator.all_gather(np.array([works]))
        if found.all():
            return True
        if works:
            rank = int(np.flatnonzero(~found)[0])
            why = f"because rank {rank} cannot use GPUs; its log says why"
        _log.warning("collectives of CUDA tensors go by way of the host, %s", why)
        return False
