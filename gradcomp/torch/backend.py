"""``init_process_group(backend="gradcomp")``: compressed DDP for programs in which almost nothing can be changed.

Importing this module registers the name. A group of this name is one of Gloo, and of NCCL for CUDA devices, and all
calls on it are theirs. A DistributedDataParallel that is made over such a group gets gradcomp's communication hook.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Backend, PrefixStore, ProcessGroup  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch.requires  # noqa: F401
from gradcomp.compress import Compressor, Policy, as_policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime
from gradcomp.job.settings import Arguments
from gradcomp.job.state import Runtime
from gradcomp.torch.ddp import HookState, make_hook, trainable
from gradcomp.torch.loss_scale import LossScale
from gradcomp.torch.registered_layers import RegisteredLayers, sizes_of
from gradcomp.torch.runtime import init

__all__ = ["compress_layer", "exclude_layer", "hook_state", "register_model"]

logger = logging.getLogger("gradcomp")

NAME = "gradcomp"

_groups: WeakSet[ProcessGroup] = WeakSet()
_layers = RegisteredLayers()
_states: WeakKeyDictionary[DistributedDataParallel, HookState] = WeakKeyDictionary()
#: The runtime that this module has begun, because the program did not call ``gc.init()``.
_begun: Runtime | None = None
_ever_compressed = False


def register_model(layers: Any) -> None:
    """Name the layers of a model, so that :func:`exclude_layer` and :func:`compress_layer` can refer to them.

    Call it after ``init_process_group`` and before the model is wrapped in DistributedDataParallel, on all ranks alike.
    The layers that a DistributedDataParallel exchanges must be among those of one registered model. A program that
    registers nothing has every DistributedDataParallel compressed by the setting ``backend_compression``.

    Local; ranks that differ raise PlanMismatchError when the model is wrapped.

    Args:
        layers: the model, or pairs of a layer's name in it and its number of elements or shape, such as
            ``[(name, p.numel()) for name, p in model.named_parameters()]``.

    Raises:
        ConfigError: if ``layers`` is something else, or is registered already.
        StateError: without a process group of the backend, and if a DistributedDataParallel has the layers already.
    """
    _registered("register_model").add_model(sizes_of(layers))


def exclude_layer(pattern: str) -> None:
    """Exchange registered layers exactly.

    Args:
        pattern: a part of the layers' names, such as ``"bn"``, or a shell pattern such as ``"head.*.weight"``. Of
            several calls for a layer, to this function or to :func:`compress_layer`, the last one applies.

    Raises:
        ConfigError: if no registered layer matches.
        StateError: without a process group of the backend, before :func:`register_model`, and if a
            DistributedDataParallel has the layers already.
    """
    _registered("exclude_layer").add_rule(pattern, "none")


def compress_layer(pattern: str, compression: Compressor | str) -> None:
    """Compress registered layers by a compressor of their own, also those that are exchanged exactly by default.

    Args:
        pattern: as for :func:`exclude_layer`.
        compression: a compressor with its level, such as ``"quantize:bits=2"``.

    Raises:
        ConfigError: if no registered layer matches, or if there is no such compressor or level.
        StateError: as for :func:`exclude_layer`.
    """
    _registered("compress_layer").add_rule(pattern, compression)


def hook_state(ddp: DistributedDataParallel) -> HookState:
    """Return the state of gradcomp's hook in a DistributedDataParallel, for statistics, ``gc.save`` and ``gc.load``.

    Raises:
        ConfigError: if it was not made over a process group of the backend.
    """
    state = _states.get(ddp) if isinstance(ddp, DistributedDataParallel) else None
    if state is None:
        raise ConfigError(f'expected a DistributedDataParallel over a group of backend="{NAME}"')
    return state


def _registered(caller: str) -> RegisteredLayers:
    if not (dist.is_initialized() and _groups):
        raise StateError(f'call torch.distributed.init_process_group(backend="{NAME}") before {caller}()')
    return _layers


# ---- process groups


def _make_group(given: Any, options: Any) -> ProcessGroup:
    """Make the group that torch makes for ``cpu:gloo,cuda:nccl``, or for ``gloo`` where there is no CUDA device."""
    global _layers
    if not given.global_ranks_in_group:  # the default group, before which there is none
        _layers = RegisteredLayers()
        if runtime.is_initialized() and runtime.current() is _begun:
            runtime.shutdown()  # it was of a default group that has been destroyed
    rank, size = given.group_rank, given.group_size
    kinds = ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu/", given.store), rank, size, given.timeout)
    made: dict[str, tuple[Any, Any]] = {"cpu": (kinds.GLOO, gloo), "cuda": (kinds.GLOO, gloo)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = options or dist.ProcessGroupNCCL.Options()
        options._timeout = given.timeout
        options.global_ranks_in_group, options.group_name = given.global_ranks_in_group, given.group_id
        made["cuda"] = (
            kinds.NCCL,
            dist.ProcessGroupNCCL(PrefixStore("cuda/", given.store), rank, size, options),
        )
    group = ProcessGroup(given.store, rank, size)
    group._set_default_backend(made["cuda"][0])
    for device, (kind, backend) in made.items():
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, backend)
    _groups.add(group)
    _compress_each_ddp()
    if rank == 0:
        atexit.unregister(_warn_if_unused)
        atexit.register(_warn_if_unused)
    return group


def _warn_if_unused() -> None:
    if not _ever_compressed:
        logger.warning(
            'backend="%s" has compressed nothing: no DistributedDataParallel was made over one of its groups',
            NAME,
        )


Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


# ---- DistributedDataParallel


def _compress_each_ddp() -> None:
    """Patch the constructor of DistributedDataParallel, once: torch calls nothing when one has been made."""
    make: Any = DistributedDataParallel.__init__
    if hasattr(make, "of_gradcomp"):
        return

    @functools.wraps(make)
    def make_and_compress(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        if self.process_group in _groups:
            _compress(self)

    wrapped: Any = make_and_compress
    wrapped.of_gradcomp = True
    DistributedDataParallel.__init__ = wrapped  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Registered(Arguments):
    """The arguments of a hook whose policy depends on what is registered; each rank checks its own together."""

    policy: Callable[[], Policy] = Policy

    def check(self) -> Policy:
        return self.policy()


def _compress(ddp: DistributedDataParallel) -> None:
    """Register gradcomp's hook. Collective over the group, as the construction is."""
    global _begun, _ever_compressed
    _ever_compressed = True
    if not runtime.is_initialized():
        if dist.get_world_size(ddp.process_group) < dist.get_world_size():
            raise StateError(
                "this DistributedDataParallel has some of the ranks only: call gradcomp.torch.init() on all ranks, "
                "after init_process_group"
            )
        init()
        _begun = runtime.current()
    config = runtime.current().config

    def policy() -> Policy:
        sizes = {name: parameter.numel() for name, parameter in trainable(ddp)[0]}
        return _layers.policy(sizes, as_policy(config.backend_compression))

    state, hook = make_hook(ddp, _Registered(policy=policy), LossScale(None))
    ddp.register_comm_hook(state, hook)
    _states[ddp] = state
