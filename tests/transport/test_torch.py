"""What Gloo is given in an all-gather (of two ranks the caller's memory, of more a copy for each), and its threads."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import preloaded
import pytest
from launching import run_ranks

pytest.importorskip("torch")


class Group:
    """Notes the tensors of its all-to-alls: where they begin, and how long they are."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def alltoall_base(self, target: Any, source: Any, *splits: list[int]) -> Any:
        self.given += [(each.data_ptr(), len(each)) for each in (target, source) if len(each)]
        self.sent = source.tolist()
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


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


def test_copies_for_more_ranks_take_the_memory_of_those_under_way_however_many_sizes_there_are() -> None:
    from gradcomp.transport.torch import TorchTransport

    transport = TorchTransport.__new__(TorchTransport)
    transport.rank, transport.size, transport.bytes_sent = 1, 3, 0
    transport._running, transport._groups, transport._copies = [], [Group()], []
    for length in (5, 9, 1, 7, 0, 20, 3):
        counts = [4, length, 6]
        buffer = np.arange(sum(counts), dtype=np.uint8)
        own = buffer[4 : 4 + length].tolist()
        handles = []
        for _ in range(2):  # under way together, so each has copies of its own
            handles.append(transport.allgatherv(buffer, counts))
            assert transport._groups[0].sent == 3 * own
        assert all(handle.poll() for handle in handles)
        assert len(transport._copies) == 2
    assert sum(map(len, transport._copies)) <= 2 * 3 * 20
    assert transport.bytes_sent == 2 * 2 * (5 + 9 + 1 + 7 + 0 + 20 + 3)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")
def test_gloos_threads_take_no_core_from_others_and_those_of_the_users_groups_keep_their_policy() -> None:
    def body() -> None:
        import os

        import torch.distributed as dist

        from gradcomp.transport.torch import TorchTransport, threads_of_gloo

        dist.init_process_group("gloo")
        before = threads_of_gloo()
        if not before:
            print("no names")
            return
        transport = TorchTransport(range(2), 30.0)
        made = threads_of_gloo() - before
        assert len(made) == 2
        assert {os.sched_getscheduler(thread) for thread in made} == {os.SCHED_BATCH}
        assert {os.sched_getscheduler(thread) for thread in before} == {os.SCHED_OTHER}
        transport.close()
        dist.destroy_process_group()
        print("fine")

    ended = run_ranks(body, 2, imported=preloaded.TORCH)
    if version("torch").split("+")[0] != "2.13.0" and ended[0].stdout == "no names\n":
        pytest.skip("this PyTorch does not name Gloo's threads")
    for end in ended:
        assert (end.returncode, end.stdout) == (0, "fine\n"), end.stderr
