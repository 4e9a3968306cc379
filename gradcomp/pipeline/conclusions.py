"""Ranks agree on an order, compare digests and plans, and take over what servers hand over, as a step ends."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import PlanMismatchError, WireFormatError
from gradcomp.core.role import Role
from gradcomp.core.state import DoubleBuffer, Residuals
from gradcomp.kernels.codec import Sizes
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.in_flight import Waiting
from gradcomp.transport.base import AllGather, AllReduce, Handle, Operation, Transport


def until_complete(handle: Handle) -> Generator[Waiting, None, None]:
    while not handle.poll():
        yield Waiting.WIRE


def collective(operation: Operation, transport: Transport) -> Generator[Waiting, None, None]:
    """Issue a collective and wait for it."""
    yield from until_complete(operation.issue(transport))


def agree_on_order(
    transport: Transport, role: Role, count: int, arrived: Sequence[int]
) -> Generator[Waiting, None, list[int]]:
    """Return the order in which the leader's gradients arrived; layers without one follow behind."""
    order, leader = np.zeros(count, dtype="<i4"), role.first
    if role.leads:
        order[:] = [*arrived, *sorted(set(range(count)) - set(arrived))]
    counts = [order.nbytes * (rank == leader) for rank in range(transport.size)]
    yield from collective(AllGather(order.view(np.uint8), counts), transport)
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise WireFormatError(f"rank {leader} sent an order that is not a permutation of the layers")
    agreed: list[int] = order.tolist()
    return agreed


def compare(
    transport: Transport, count: int, future: Future[Digests]
) -> Generator[Waiting, None, npt.NDArray[np.uint32]]:
    """Gather every rank's digests of its parameters; the row of a rank without any holds zeros."""
    while not future.done():
        yield Waiting.BACKGROUND
    table = np.zeros((transport.size, count), dtype="<u4")
    numbers = future.result().numbers
    table[transport.rank, : len(numbers)] = numbers
    counts = [4 * count] * transport.size
    yield from collective(AllGather(table.reshape(-1).view(np.uint8), counts), transport)
    return table


def check_same_plan(transport: Transport, digest: bytes, version: int) -> Generator[Waiting, None, None]:
    """Raise PlanMismatchError unless all ranks pass the same digest: message sizes follow from plans."""
    digests = np.zeros((transport.size, len(digest)), dtype=np.uint8)
    digests[transport.rank] = np.frombuffer(digest, dtype=np.uint8)
    counts = [len(digest)] * transport.size
    yield from collective(AllGather(digests.reshape(-1), counts), transport)
    others = [rank for rank in range(transport.size) if digests[rank].tobytes() != digest]
    if others:
        raise PlanMismatchError(
            f"plan {version} of rank {transport.rank} differs from that of rank {', '.join(map(str, others))}; "
            "set_compression() takes the same arguments on every rank, between the same two steps"
        )


def hand_over(
    transport: Transport, role: Role, residuals: Residuals, layers: Sizes, owned: Sequence[Sizes]
) -> Generator[Waiting, None, None]:
    """What servers no longer own goes, exactly, to who does now: they have no gradients to send it with.

    ``owned``: layers that servers own now. What no server owns any more becomes a part of the first trainer's residual.
    Nothing where all train.
    """
    if role.all_train:
        return
    assert isinstance(residuals.first, DoubleBuffer), "bfloat16 is refused beside dedicated servers"
    held = residuals.first.load(layers) * np.float32(not role.trains)
    yield from collective(AllReduce(held), transport)
    if not role.trains:
        residuals.take_over(layers, held, len(role.trainers))
    elif role.leads:
        residuals.add(layers, held, np.isin(layers, np.concatenate(owned), invert=True))
