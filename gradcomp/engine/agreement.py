"""All ranks compare, before the first exchange, what they are about to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradcomp.core.config import DEVICE_SLICE, HOST_SLICE, Config
from gradcomp.core.errors import PlanMismatchError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.text import printable
from gradcomp.transport.base import Handle, Transport, wait
from gradcomp.version import __version__


def describe(layers: Sequence[LayerSpec], plan: Plan, config: Config, **extra: Any) -> dict[str, Any]:
    """Return what must be equal on all ranks: version, settings, layers, plan."""
    return {
        "version": __version__,
        "settings": {**config.shared(), **extra},
        "layers": {layer.name: [list(layer.shape), layer.dtype] for layer in layers},
        "order": [layer.name for layer in layers],
        "compression": {a.layer: [a.compressor, a.level] for a in plan.assignments},
    }


def agree(
    transport: Transport,
    description: Mapping[str, Any] | None,
    error: Exception | None = None,
    *,
    wait_for: Callable[[Handle], None] = wait,
) -> None:
    """Raise PlanMismatchError on every rank unless all descriptions are equal. Collective.

    A rank that cannot go on passes its ``error`` instead: it raises that one, and the others one that quotes it.
    ``wait_for`` waits for a handle. Wire: two rounds of a digest; the descriptions themselves travel only if the
    digests differ.
    """
    mine = {"error": f"{type(error).__name__}: {error}"} if error else dict(description or {})
    text = json.dumps(mine, sort_keys=True)
    digests = transport.allgather_bytes(hashlib.sha256(text.encode()).digest(), wait_for)
    if error is None and len(set(digests)) == 1:
        return
    if len(set(digests)) > 1 or error is not None:
        everyone = [
            _parse(rank, part) for rank, part in enumerate(transport.allgather_bytes(text.encode(), wait_for))
        ]
        if error is not None:
            raise error
        raise PlanMismatchError(printable(_difference(everyone)))


def agree_on_slices(
    transport: Transport, config: Config, on_device: bool, *, wait_for: Callable[[Handle], None] = wait
) -> Config:
    """Return the settings with a size of exchange buckets, the same on all ranks. Collective, after :func:`agree`.

    A setting is taken as it is. Without one, buckets are large if every rank's gradients are on a device: a rank on
    the host would take long over a large one, and hold up the others. It raises WireFormatError for an answer that
    is not a yes or no. Wire: a byte from every rank, if there is no setting.
    """
    if config.slice_elements:
        return config
    answers = transport.allgather_bytes(bytes([on_device]), wait_for)
    for rank, answer in enumerate(answers):
        if answer not in (b"\0", b"\1"):
            raise WireFormatError(
                f"rank {rank} sent {answer[:8]!r}, which does not say where its gradients are"
            )
    chosen = DEVICE_SLICE if all(answer == b"\1" for answer in answers) else HOST_SLICE
    return replace(config, slice_elements=chosen)


def _parse(rank: int, part: bytes) -> dict[str, Any]:
    try:
        data = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"rank {rank} sent a description that is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise WireFormatError(f"rank {rank} sent a description that is not an object")
    return data


def _difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first thing in which a rank differs from rank 0, or the first rank that failed."""
    for rank, other in enumerate(everyone):
        if "error" in other:
            return f"rank {rank} failed: {other['error']}"
    for rank, other in enumerate(everyone):
        for key in everyone[0]:
            mine, theirs = everyone[0][key], other.get(key)
            if mine == theirs:
                continue
            if isinstance(mine, dict) and isinstance(theirs, dict):
                names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
                name = names[0]
                what = f"{key} of {name!r}" if key != "layers" else f"layer {name!r}"
                return (
                    f"{what}: rank 0 has {mine.get(name, 'none')}, rank {rank} has {theirs.get(name, 'none')}"
                    f" ({len(names)} differ)"
                )
            return f"{key}: rank 0 has {mine}, rank {rank} has {theirs}"
    return "the ranks differ"
