"""Gloo between two ranks: what a large all-gather is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")


class Group:
    """Notes the tensors of its all-to-alls: where they begin, and how long they are."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def alltoall_base(self, target: Any, source: Any, *splits: list[int]) -> Any:
        self.given += [(each.data_ptr(), len(each)) for each in (target, source) if len(each)]
        return self


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_sent_and_received_is_the_callers_memory(rank: int) -> None:
    from gradcomp.transport.torch import TorchTransport

    transport = TorchTransport.__new__(TorchTransport)
    transport.rank, transport.size, transport.bytes_sent = rank, 2, 0
    transport._running, transport._groups = [], [Group(), Group()]
    buffer, counts = np.zeros(500_000, np.uint8), [300_000, 200_000]
    transport.allgatherv(buffer, counts)
    begins = [buffer.ctypes.data, buffer.ctypes.data + counts[0]]
    assert [group.given for group in transport._groups] == [
        [(begin, count)] for begin, count in zip(begins, counts, strict=True)
    ]
    assert transport.bytes_sent == counts[rank]
