"""Promises about bytes on the wire."""

from __future__ import annotations

from gradcomp.compress.messages import Broadcast, Gather, Reduce, Sum
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Draw, Group
from gradcomp.kernels.segments import UNIT_BYTES
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.header import ByteHeader, CountHeader, padded
from gradcomp.testing.cases import CAP, LAYERS, WORLDS, Row, check, simulated
from gradcomp.testing.recording import payload_of


@check(world=WORLDS)
def every_byte_that_is_sent_is_counted(row: Row, world: int) -> None:
    """Statistics count all bytes that the transport sends."""
    ranks = simulated(row, LAYERS, world, slice_elements=CAP, reorder=False, record=True)
    ranks.step()
    for rank in ranks.ranks:
        sent = sum(_bytes_to_others(kind, len(data), world) for kind, data in rank.transport.sent)
        assert sent == rank.pipeline.transport.bytes_sent == rank.pipeline.statistics.wire_bytes


def _bytes_to_others(kind: str, nbytes: int, world: int) -> int:
    if kind == "allreduce":
        return 2 * nbytes * (world - 1) // world
    return nbytes * (world - 1) if kind == "allgatherv" else nbytes


@check(lambda row: row.sized and row.steady, world=WORLDS)
def bytes_sent_follow_the_formula(row: Row, world: int) -> None:
    """All ranks together send 2 d (N - 1) bytes for sums and reductions, N d (N - 1) for gathers, plus headers."""
    ranks = simulated(row, LAYERS, world, slice_elements=CAP, reorder=False, record=True)
    ranks.step()
    low, slack = 0, 0
    for bucket in ranks.pipelines[0].layout.buckets:
        (group,) = bucket.groups
        payload = int(group.compressor.wire_bytes(group).sum())
        header = ByteHeader.size(len(bucket.layers))
        counts = 4 * CountHeader(len(bucket.layers)).length
        message = next(group.compressor.exchange(group, StepContext(Draw(0, 0, 0), world)))
        if isinstance(message, Sum):
            low += 2 * (world - 1) * (payload + counts)
        elif isinstance(message, Reduce):
            low += 2 * (world - 1) * (payload + world * header)
            slack += 2 * (world - 1) * world * 15  # padding of each chunk
            slack += 2 * (world - 1) ** 2 * _bytes_of_cut(message, group)
        elif isinstance(message, Gather):
            low += world * (world - 1) * (padded(payload) + header)
            if not message.fixed:
                low += world * (world - 1) * (padded(8) + header)  # sizes are gathered first
        else:
            assert isinstance(message, Broadcast)
            indices, values = message.max_bytes, payload - message.max_bytes
            low += (world - 1) * (padded(indices) + world * header + 2 * values)
    sums = sum(kind == "allreduce" for rank in ranks.ranks for kind, _ in rank.transport.sent)
    sent = sum(p.transport.bytes_sent for p in ranks.pipelines)
    assert low - sums <= sent <= low + slack  # each rank's part of a sum is rounded down


@check(lambda row: row.sized)
def wire_bytes_is_what_travels(row: Row) -> None:
    """A rank sends ``wire_bytes``, headers aside: its chunks of two rounds, its sums, its part of what is gathered."""
    layers = [LayerSpec("w", (30, 10))]
    ranks = simulated(row, layers, 2, record=True, reorder=False)
    for _ in range(4):
        ranks.step()
        buckets = ranks.pipelines[0].layout.buckets
        payload = sum(int(g.compressor.wire_bytes(g).sum()) for bucket in buckets for g in bucket.groups)
        sent = [list(rank.transport.sent) for rank in ranks.ranks]
        for rank in ranks.ranks:
            rank.transport.sent.clear()
        if any(p.plan.version for p in ranks.pipelines):
            break  # a schedule has ended, so the next step has another compressor
        kinds = [kind for kind, _ in sent[0]]
        group = buckets[0].groups[0]
        message = next(group.compressor.exchange(group, StepContext(Draw(0, 0, 0), 2)))
        if kinds[0] == "alltoallv":
            assert kinds == ["alltoallv", "allgatherv"]
            travelled = sum(len(payload_of(messages[1][1])) for messages in sent)
            assert isinstance(message, Reduce)
            assert 0 <= travelled - payload <= _bytes_of_cut(message, group)
        else:
            counts = 4 * CountHeader(1).length
            sizes = padded(8) if isinstance(message, Gather) and not message.fixed else 0
            lengths = [
                [len(payload_of(data)) if kind == "allgatherv" else len(data) for kind, data in messages]
                for messages in sent
            ]
            # The counts are appended to the first sum if nothing was gathered before.
            appended = counts if kinds[0] != "allgatherv" else 0
            assert max(map(sum, lengths)) - appended == payload + sizes


def _bytes_of_cut(message: Reduce, group: Group) -> int:
    """Returns the bytes that a border of chunks may add: a byte that it splits, and one more unit of scales."""
    inside = (group.table["level"] * group.table["bucket_size"] % 8).any()
    return int(inside) + UNIT_BYTES.get(message.codec.kind, 0)
