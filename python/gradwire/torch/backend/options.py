"""Options of a process group, for torch's `pg_options=`."""

from __future__ import annotations

from gradwire._base.arguments import whole
from gradwire._calls.requests import native
from gradwire.codec import NativeCodec
from gradwire.torch.exchange.payloads import Payloads


class Options:
    """Options of a process group of the backend gradwire; every rank of the group gives the same::

        options = gradwire.torch.Options(codec="int8")
        group = dist.new_group(backend="gradwire", pg_options=options)
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("data", "tensor"),
            backend_override={"tensor": ("gradwire", options)},
        )

    It is for activations and their gradients in tensor and pipeline parallelism. Tensors of
    float32, bfloat16 and float16 with at least `min_elements` elements travel in `codec` in
    all_reduce, reduce and reduce_scatter (sums and averages), in all_gather, and in send and recv.
    What the codec loses is lost: there is no error feedback. All ranks get the same bits. Other
    types, other operations, barriers and objects travel as they are.

    Such a group also rounds what else is sent over it: give it no checkpoints, and call
    `DTensor.full_tensor` for parameters on another group.
    """

    _timeout = None  # a DeviceMesh asks for it, and takes the default then

    def __init__(self, codec: str | NativeCodec = "none", *, min_elements: int = 1024) -> None:
        """Takes "none", "bf16", "fp16" or "int8", or an object of `gradwire.codec`.

        Raises InvalidArgument for other codecs, which need error feedback.
        """
        self.codec = native(codec).name
        self.min_elements = whole(min_elements, "min_elements", least=0, bits=64)
        if self.codec != "none":
            Payloads(self.codec)  # refuses others

    def __repr__(self) -> str:
        return f"Options(codec={self.codec!r}, min_elements={self.min_elements})"
