"""An all-gather of torch's that fails because another rank called ``compress_fsdp`` says so."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

from gradcomp.core.errors import TransportError
from gradcomp.job import runtime
from gradcomp.job.membership import who_waits


def explain_failures() -> None:
    """Make the default all-gather of ``fully_shard`` tell, where it fails, what the other ranks wait for.

    A rank that does not call ``compress_fsdp`` makes no call to gradcomp from then on. The others are in no collective
    of torch, so its own ends in an error of the backend that names neither. This works only where ``fully_shard`` was
    imported before ``init``, because importing its modules takes seconds.
    """
    collectives = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    kind: Any = getattr(collectives, "DefaultAllGather", None)
    if kind is None or hasattr(kind.__call__, "__wrapped__"):
        return
    gather = kind.__call__

    @functools.wraps(gather)
    def explained(*given: Any, **named: Any) -> Any:
        try:
            return gather(*given, **named)
        except RuntimeError as error:
            if (reason := _reason(named.get("group"))) is None:
                raise
            raise TransportError(f"torch's all-gather of a sharded model failed: {reason}") from error

    kind.__call__ = explained


def _reason(group: Any) -> str | None:
    """Return what another rank of the job waits for; None if the group is not within the job."""
    if not runtime.is_initialized():
        return None
    state = runtime.current()
    members = dist.get_process_group_ranks(group)
    if state.size == 1 or not set(members) <= set(state.network.ranks):
        return None
    try:
        among = {tuple(state.network.ranks.index(rank) for rank in members), state.everyone}
        waits = next(filter(None, (who_waits(state, ranks) for ranks in sorted(among))), None)
    except TransportError as error:
        return f"the other ranks cannot be asked why: {error}"
    return waits and f"{waits}, and this rank has not; all ranks that share a model call compress_fsdp"
