"""register_fsdp: makes a model that FSDP2 shards communicate in codecs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.codec import NativeCodec
from gradwire.torch._ranks.ranks import Ranks, RanksLike, ranks_of
from gradwire.torch._ranks.settings import made_alike, require_settings
from gradwire.torch.exchange.automatic import choose_for_shards, told
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.defaults import Model, tell
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.exchange.payloads import Payloads
from gradwire.torch.fsdp.gather import PayloadAllGather, torchs_own
from gradwire.torch.fsdp.hooks import PartReduceScatter, ReplicaAllReduce
from gradwire.torch.fsdp.shards import ShardedModule, require_supported, sharded_modules
from gradwire.torch.fsdp.state import FSDPState


def register_fsdp(
    model: nn.Module,
    compression: CompressionLike = "none",
    *,
    gather_codec: str | NativeCodec | None = None,
    algorithm: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: RanksLike = None,
) -> FSDPState:
    """Makes a model that `fully_shard` shards average gradients with gradwire; every rank calls it.

    Called after `fully_shard`, for the root module, before training; parameters are on the CPU, or
    on a CUDA GPU for each rank, where the host waits for no reduction.
    With a mesh of two dimensions (HSDP), the all_reduce of gradients between replicas travels in
    the codec, and a rank keeps residuals as large as its shards. With one dimension the
    reduce_scatter does, and each rank keeps residuals as large as the whole model, since it encodes
    gradients of all of it. Parameters are gathered in `gather_codec`, which is "bf16", "fp16" or,
    on CPUs, "int8" (of blocks of a shard), by default as they are. All ranks then compute with the
    same decoded parameters; the shards that the optimizer steps are not rounded. (FSDP: Zhao et al.
    2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel") On CPUs both codecs
    may be "lossless", by which all bits stay as they are without.

    `compression`, `algorithm`, `scaler` and `optimizer` are as in `register`, and so is what
    happens to gradients of bfloat16 and float16, here of FSDP's `reduce_dtype`. Names in rules are
    those of ``model.named_parameters()``. "auto" is none, lossless, fp16 or int8; lowrank was not
    measured on shards. Parameters of fewer than the Compression's `min_elements` (with replicas:
    shards of fewer) are not gathered in `gather_codec` either. A step is a backward whose gradients
    are synchronised: with `set_requires_gradient_sync(False)` nothing is sent or kept, nor with
    `set_requires_all_reduce(False)` between replicas. Name the codec where the model is split by
    tensor parallelism too: "auto" is chosen by each data-parallel group for itself. There are no
    `momentum` and `clip_norm` of the hook's: FSDP has a whole gradient on no rank.

    `ranks` are those of the model's mesh; a communicator or a group that is given joins those
    between which gradients travel. Raises RendezvousError, and InvalidArgument for a model that
    cannot be supported, which the message explains; on all ranks for settings that differ.

    Backward raises gradwire's errors, which name the rank that failed. It raises Error when some
    parameters of a module have no gradient, unless FSDP gives them zeros
    (`set_reduce_scatter_unused_params(True)`, torch 2.13): then what residuals hold for them is
    delivered. A module without any gradient sends nothing. Backward raises InvalidArgument where
    FSDP reduces outside of it, as pipelines do, and within reentrant checkpoints. Needs torch 2.9;
    tested with 2.9.1 and 2.13.
    """
    modules = _modules(model)
    require_settings(scaler, optimizer)
    given, ranks = compression_of(compression, auto=True), ranks_of(ranks)
    whole = Model(model, dict(model.named_parameters()))
    payloads = None if gather_codec is None else Payloads(gather_codec, or_exact=True)
    first = modules[0]
    if payloads is not None:
        payloads.require_device(first.group.device)
    replicas = first.replicate_group
    communicator, owns = ranks.connect(first.shard_group if replicas is None else replicas)
    shard_group = None if replicas is None else first.shard_group
    chosen, later = choose_for_shards(whole, communicator, given, shard_group)
    gathering: Communicator | None = communicator if replicas is None else None
    owned = [communicator] if owns else []
    if payloads is not None and gathering is None:
        gathering, owns_too = Ranks(timeout=ranks.timeout).connect(first.shard_group)
        owned += [gathering] if owns_too else []
    make = partial(
        FSDPState,
        communicator,
        chosen.compression,
        [shard for each in modules for shard in each.shards],
        first.group.device,
        shard_group=shard_group,
        algorithm=algorithm,
        scaler=scaler,
        optimizer=optimizer,
        owned=owned,
        later=later,
    )
    state = made_alike(
        make,
        communicator,
        owns_communicator=owns,
        group=shard_group,
        codec=told(given, chosen, later),
        gather_codec=gather_codec,
        scaler=scaler is not None,
        optimizer=optimizer is not None,
        **given.alike,
    )
    state.why = chosen.why
    if communicator.rank == 0:
        tell(chosen, optimizer)
    for each in modules:
        _install(each, state)
        if payloads is not None:
            assert gathering is not None
            comm = PayloadAllGather(each, gathering, payloads, given.min_elements, state._steps)
            each.module.set_custom_all_gather(comm)
        elif isinstance(each.group._all_gather_comm, PayloadAllGather):  # of an earlier state
            each.module.set_custom_all_gather(torchs_own())
    return state


def _install(module: ShardedModule, state: FSDPState) -> None:
    if module.replicate_group is None:
        scatter: Any = PartReduceScatter(module, state._steps, state)
        module.module.set_custom_reduce_scatter(scatter)
        hook = module.group._all_reduce_hook
        replaces = hook is None or isinstance(getattr(hook, "__self__", None), PartReduceScatter)
        if state.communicator.size == 1 and replaces:
            module.module.set_all_reduce_hook(scatter.alone)
        return
    module.leave_all_reduce_to_hook()
    module.module.set_all_reduce_hook(ReplicaAllReduce(module, state._steps, state))


def _modules(model: Any) -> list[ShardedModule]:
    """The model's modules; raises InvalidArgument for anything but an FSDP2 model."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    if isinstance(getattr(model, "_orig_mod", None), FSDPModule):
        raise InvalidArgument(
            "the model is compiled: call register_fsdp() for the model that fully_shard() returned"
        )
    if not isinstance(model, FSDPModule):
        raise InvalidArgument(
            f"register_fsdp() takes a model that torch.distributed.fsdp.fully_shard() shards, and "
            f"this is a {type(model).__name__}: call fully_shard(model) first; for "
            "DistributedDataParallel there is register()"
        )
    if not hasattr(model, "set_custom_reduce_scatter"):
        raise InvalidArgument(f"register_fsdp() needs torch 2.9, and this is {torch.__version__}")
    modules = sharded_modules(model)
    require_supported(modules)
    return modules
