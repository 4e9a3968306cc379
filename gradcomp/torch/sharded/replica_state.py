"""The state of the exchange between replicas, as tensors that torch.distributed.checkpoint cuts into other shards."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from gradcomp.compress import Policy
from gradcomp.core.errors import StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.checkpoint_manager import CheckpointManager
from gradcomp.exchange.snapshot import Snapshot
from gradcomp.job.checkpoint import from_plain, to_plain
from gradcomp.torch.sharded.replicas import ReplicaExchange

logger = logging.getLogger("gradcomp")

Array = npt.NDArray[Any]
Gather = Callable[[bytes], list[bytes]]
#: Kind of state -> number of the replica -> layer -> its values on all shards.
Tensors = dict[str, dict[str, dict[str, DTensor]]]

RESIDUAL, SERVER = "residual", "server_error"
#: A matrix whose size no further state of a low rank has.
_PROBE = LayerSpec("probe", (10007, 20011), "float32")
_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class ReplicaState:
    """Saves and restores the state of a rank that is replica ``replica`` of shards number ``shard``.

    ``parameters`` are the sharded parameters by layer, ``policy`` what they are compressed by, ``shards`` the number
    of shards of a replica. ``over_replicas`` and ``over_shards`` gather the bytes of all replicas of these shards, and
    of all shards of a replica; None if there is one.

    State that has a value for each element becomes a DTensor with the placements of its parameter: residuals,
    server-side errors with zeros where another replica has the value, and momentum. Every other state is gathered as
    text, the same on all ranks, in which each rank finds its own part if the shards are those of the saved run.
    """

    manager: CheckpointManager
    policy: Policy
    parameters: Mapping[str, DTensor]
    shard: int
    replica: int
    over_replicas: Gather
    over_shards: Gather | None
    shards: int

    @classmethod
    def of(cls, exchange: ReplicaExchange, shards: int, over_shards: Gather | None) -> ReplicaState:
        """Return what saves the state of an exchange between replicas of ``shards`` shards."""
        layers = exchange.asked.proposal.layers
        return cls(
            exchange.checkpoint_manager,
            exchange.asked.proposal.policy,
            {layer.name: parameter for layer, parameter in zip(layers, exchange.parameters, strict=True)},
            exchange.asked.arguments.shard,
            exchange.exchanger.pipeline.transport.rank,
            exchange.exchanger.allgather_bytes,
            over_shards,
            shards,
        )

    def save(self) -> dict[str, Any]:
        """Return the state. Collective over all shards and replicas."""
        own = self.manager.snapshot()
        tensors: Tensors = {}
        for kind in self._kinds():
            by_name = {name: self._tensor(name, kind, own) for name in own.shared.layers}
            tensors[kind] = {str(self.replica): by_name}
        rest = {kind: values for kind, values in own.fields.items() if kind not in tensors}
        part = {
            "snapshot": to_plain(replace(own, first={}, second=_NONE, fields=rest)),
            "held": {RESIDUAL: list(own.first)}
            | {kind: list(values) for kind, values in own.fields.items() if kind in tensors},
        }
        mine = self.over_replicas(json.dumps(part, default=_text).encode())
        whole = json.dumps([each.decode() for each in mine]).encode()
        of_shards = [whole] if self.over_shards is None else self.over_shards(whole)
        return {"parts": json.dumps([json.loads(each) for each in of_shards]), "tensors": tensors}

    def load(self, state: Any) -> None:
        """Go on from what :meth:`save` returned. Local, with nothing changed if it does not fit (StateError)."""
        fresh = self.manager.snapshot()
        try:
            parts = json.loads(state["parts"])
            if (replicas := len(parts[0])) != fresh.world:
                raise StateError(
                    f"the state is of {replicas} replicas, this job has {fresh.world}: residuals belong to one replica "
                    "each"
                )
            part = json.loads(parts[min(self.shard, len(parts) - 1)][self.replica], object_hook=_array)
            saved, held, tensors = part["snapshot"], part["held"], state["tensors"]
            values = {
                kind: {
                    name: self._values(name, tensor)
                    for name, tensor in tensors[kind][str(self.replica)].items()
                }
                for kind in self._kinds()
            }
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"this is no state of an exchange between replicas: {error!r}") from error
        found = from_plain(saved)
        if len(parts) == self.shards and found.shared.layers == fresh.shared.layers:
            self.manager.restore(_filled(found, held, values))
            return
        logger.info(
            "the state of the exchange between replicas is of %d shards: residuals are cut anew; levels that a "
            "controller chose, and factors of low rank, begin anew",
            len(parts),
        )
        self.manager.restore(self._recut(fresh, found, values))

    def _recut(self, fresh: Snapshot, saved: Snapshot, values: Mapping[str, Mapping[str, Array]]) -> Snapshot:
        """Return the state that this rank begins with, with the step and the elements' values of ``saved``.

        r' = r + N s for N replicas: a server-side error s belongs to the mean, a residual to one of N summands.
        """
        step = saved.shared.step
        layers = [LayerSpec(name, *form) for name, form in fresh.shared.layers.items()]
        residuals = {
            name: values[RESIDUAL][name] + np.float32(fresh.world) * values[SERVER][name]
            for name in fresh.first
        }
        fields = {
            kind: {
                name: values[kind][name].reshape(-1) if kind in values else old
                for name, old in by_name.items()
            }
            for kind, by_name in fresh.fields.items()
        }
        shared = replace(
            fresh.shared, step=step, rate=saved.shared.rate, plan=self.policy.plan(layers, step=step)
        )
        return replace(fresh, shared=shared, first=residuals, ranges=(), second=_NONE, fields=fields)

    def _kinds(self) -> list[str]:
        """Return the kinds of state that have a value for each element; they depend on the policy alone."""
        compressors = self.policy.compressors
        fields = (c.fields(_PROBE, 0).items() for c in compressors)
        by_element = dict.fromkeys(
            kind for found in fields for kind, (size, _) in found if size == prod(_PROBE.shape)
        )
        keeps = any(c.traits.keeps_residual for c in compressors)
        return [*((RESIDUAL, SERVER) if keeps else ()), *by_element]

    def _tensor(self, name: str, kind: str, own: Snapshot) -> DTensor:
        """Return the values of one layer, with zeros where it has none."""
        shape = own.shared.layers[name][0]
        values = np.zeros(shape, np.float32)
        flat = values.reshape(-1)
        if kind == RESIDUAL and name in own.first:
            values[...] = own.first[name]
        elif kind == SERVER:
            number = list(own.shared.layers).index(name)
            for row, (begin, end) in zip(own.ranges, _places(own), strict=True):
                if row.layer == number:
                    flat[row.start : row.end] = own.second[begin:end]
        elif name in own.fields.get(kind, {}):
            flat[:] = own.fields[kind][name]
        like = self.parameters[name]
        return DTensor.from_local(
            torch.from_numpy(values),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=torch.empty(like.shape, device="meta").stride(),
        )

    def _values(self, name: str, tensor: DTensor) -> Array:
        like = self.parameters[name]
        if tensor.shape != like.shape or tensor.placements != like.placements:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)} in the state, {list(like.shape)} here")
        values: Array = tensor.to_local().detach().cpu().numpy().astype(np.float32)
        return values


def _places(state: Snapshot) -> Sequence[tuple[int, int]]:
    """Return where the server-side errors of each range lie in ``second``."""
    return list(pairwise(accumulate((row.length for row in state.ranges), initial=0)))


def _filled(
    state: Snapshot, held: Mapping[str, Sequence[str]], values: Mapping[str, Mapping[str, Array]]
) -> Snapshot:
    """Return the saved state of this rank with the values of elements put back."""
    names = list(state.shared.layers)
    second = [values[SERVER][names[row.layer]].reshape(-1)[row.start : row.end] for row in state.ranges]
    fields = {
        kind: {name: values[kind][name].reshape(-1) for name in of}
        for kind, of in held.items()
        if kind != RESIDUAL
    }
    return replace(
        state,
        first={name: values[RESIDUAL][name] for name in held[RESIDUAL]},
        second=np.concatenate([_NONE, *second]),
        fields={**state.fields, **fields},
    )


def _text(value: Any) -> Any:
    """Return an array as JSON takes it."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no part of a state")
    return {"float32": base64.b64encode(value.astype("<f4").tobytes()).decode()}


def _array(data: dict[str, Any]) -> Any:
    """Invert :func:`_text` for JSON's objects."""
    if data.keys() == {"float32"} and isinstance(data["float32"], str):
        return np.frombuffer(base64.b64decode(data["float32"]), "<f4").copy()
    return data
