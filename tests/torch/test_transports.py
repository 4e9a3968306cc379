"""Transports chosen by a setting: the same training, byte for byte, whatever carries it; and what cannot work."""

from __future__ import annotations

import json

import preloaded
import pytest
from kernels import gpu
from launching import run_ranks
from ports import free_port


def train() -> None:
    import hashlib
    import json
    import sys

    import torch

    import gradcomp.torch as gc

    gc.init(timeout_seconds=20.0)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 90), torch.nn.ReLU(), torch.nn.Linear(90, 70))
    opt = gc.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression=sys.argv[1]
    )
    data = torch.Generator().manual_seed(gc.rank())
    for _ in range(4):
        opt.zero_grad()
        net(torch.randn(8, 64, generator=data)).square().mean().backward()
        opt.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(json.dumps([hashlib.sha256(bits).hexdigest(), gc.local_rank(), gc.cross_rank(), gc.cross_size()]))
    gc.shutdown()


def variables(transport: str, world: int, hosts: int = 1):
    """As torchrun sets them; the hosts are only said to be several."""
    port, per_host = str(free_port()), world // hosts

    def of(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank // per_host), "GROUP_WORLD_SIZE": str(hosts),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GRADCOMP_TRANSPORT": transport,
        }  # fmt: skip

    return of


def results(transport: str, world: int, hosts: int = 1, compression: str = "quantize:bits=4") -> list[list]:
    ends = run_ranks(
        train,
        world,
        env=variables(transport, world, hosts),
        arguments=(compression,),
        imported=preloaded.TORCH,
    )
    assert [end.returncode for end in ends] == [0] * world, ends[0].stderr[-2000:] + ends[-1].stderr[-2000:]
    return [json.loads(end.stdout.splitlines()[-1]) for end in ends]


def test_shared_memory_trains_as_torch_does():
    digests = {digest for digest, *_ in results("shm", 3)}
    assert len(digests) == 1
    assert digests == {digest for digest, *_ in results("torch", 3)}


def leave_everything() -> None:
    import sys

    import numpy as np
    import torch

    import gradcomp.torch as gc

    gc.init(process_sets=[gc.ProcessSet([0, 1])])
    net = torch.nn.Linear(300, 300)
    gc.broadcast_parameters(net.state_dict(), root_rank=0)
    opt = gc.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression="quantize:bits=4"
    )
    started = gc.allreduce_async(torch.ones(1000))
    for step in range(3):
        opt.zero_grad()
        if step == 2 and gc.rank() == 1 and "fail" in sys.argv:
            raise ValueError(np.float32(step))
        net(torch.randn(8, 300)).square().mean().backward()
        opt.step()
    gc.synchronize(started)


@pytest.mark.parametrize("ending", ["", pytest.param("fail", marks=pytest.mark.full)])
def test_nothing_of_the_shared_memory_is_alive_when_a_program_ends(ending: str) -> None:
    ends = run_ranks(leave_everything, 2, env=variables("shm", 2), arguments=(ending,))
    assert [end.returncode for end in ends] == [int(ending == "fail")] * 2, ends[0].stderr + ends[1].stderr
    for end in ends:
        assert "leaked" not in end.stderr


def test_two_levels_train_as_torch_does():
    found = results("shm+torch", 4, hosts=2)
    assert len({digest for digest, *_ in found}) == 1
    assert found[0][0] == results("torch", 4, hosts=2)[0][0]
    assert [place for _, *place in found] == [[0, 0, 2], [1, 0, 2], [0, 1, 2], [1, 1, 2]]


REFUSED = {
    "shm of several hosts": (
        lambda: variables("shm", 2, hosts=2),
        "transport=shm serves one host, and these ranks are on 2; take shm+torch",
    ),
    "NCCL without a GPU": (lambda: variables("nccl", 2), "ConfigError: rank 0: the nccl transport needs"),
    "NCCL inside hosts, without a GPU": (
        lambda: variables("nccl+torch", 2, hosts=2),
        "ConfigError: rank 0: the nccl transport needs",
    ),
    "different transports": (lambda: different("torch", "shm"), "rank 0 has transport=torch, rank 1 has shm"),
}


def different(*transports: str):
    of = variables("torch", 2)
    return lambda rank: {**of(rank), "GRADCOMP_TRANSPORT": transports[rank]}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(case: str):
    if case.endswith("without a GPU") and gpu.problem() is None:
        pytest.skip("there is a GPU, and NCCL may work")
    of, says = REFUSED[case]
    for end in run_ranks(train, 2, env=of(), arguments=("none",), imported=preloaded.TORCH):
        assert end.returncode != 0
        assert says in end.stderr
