"""Other libraries as optimizers that exchange gradients, called as the libraries' own examples call them."""

from __future__ import annotations

import os
import socket
from typing import Any

import hosts
from peers_rows import EPFML, GRACE, HOROVOD, PeerRow

RANK = 4
DENSITY = 0.01


class AfterBackward:
    """An optimizer before whose step GRACE exchanges one tensor after the other, as in GRACE's example of training."""

    def __init__(self, optimizer: Any, model: Any, communicator: Any) -> None:
        self._optimizer, self._communicator = optimizer, communicator
        self._parameters = list(model.named_parameters())

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        for name, parameter in self._parameters:
            parameter.grad = self._communicator.step(parameter.grad, name)
        self._optimizer.step()


class KeepingErrors:
    """An optimizer with epfml/powersgd, which leaves its errors in ``.grad``: gradients are not set to zero."""

    def __init__(self, optimizer: Any, model: Any) -> None:
        from powersgd import Config, PowerSGD

        # Two iterations, one for each factor, are a step of the first paper, of torch's hook and of gradcomp.
        config = Config(
            rank=RANK, min_compression_rate=10, num_iters_per_step=2, start_compressing_after_num_steps=0
        )
        self._optimizer = optimizer
        self._aggregator = PowerSGD(list(model.parameters()), config=config)

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        from powersgd import optimizer_step

        optimizer_step(self._optimizer, self._aggregator)


def wrap(row: PeerRow, optimizer: Any, model: Any, world: int) -> Any:
    """The optimizer that exchanges by the row's library."""
    if row.kind == GRACE:
        return AfterBackward(optimizer, model, grace_communicator(row.how, world))
    if row.kind == EPFML:
        return KeepingErrors(optimizer, model)
    if row.kind == HOROVOD:
        import horovod.torch as hvd

        # Horovod tells tensors apart by their names, in all optimizers of a process.
        names = [(f"{row.key}.{name}", parameter) for name, parameter in model.named_parameters()]
        compression = getattr(hvd.Compression, row.how)
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
    return optimizer


def grace_communicator(how: str, world: int) -> Any:
    """GRACE's compressor, memory and communicator of this name.

    Its helper takes neither the rank of PowerSGD nor a scale of EF-SignSGD that gives the mean over ranks, so these two
    are made of its classes. EF-SignSGD divides the sum over ranks by the compressor's ``lr``.
    """
    from grace_dl.dist.helper import grace_from_params

    if how == "qsgd":
        parts = {"compressor": "qsgd", "quantum_num": 127, "memory": "none"}
    elif how == "topk":
        parts = {"compressor": "topk", "compress_ratio": DENSITY, "memory": "residual"}
    elif how == "efsignsgd":
        from grace_dl.dist.communicator.allgather import Allgather
        from grace_dl.dist.compressor.efsignsgd import EFSignSGDCompressor
        from grace_dl.dist.memory.efsignsgd import EFSignSGDMemory

        return Allgather(EFSignSGDCompressor(lr=world), EFSignSGDMemory(lr=1.0), world)
    else:
        from grace_dl.dist.communicator.allreduce import Allreduce
        from grace_dl.dist.compressor.powersgd import PowerSGDCompressor
        from grace_dl.dist.memory.residual import ResidualMemory

        compressor = PowerSGDCompressor(rank=RANK, use_memory=True, world_size=world)
        return Allreduce(compressor, ResidualMemory(), world)
    return grace_from_params({**parts, "communicator": "allgather", "world_size": world})


def start_horovod(rank: int, world: int) -> Any:
    """Start Horovod over Gloo without its launcher, which needs ssh; the caller stops rank 0's server."""
    import horovod.torch as hvd
    import torch.distributed as dist
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    names = [host_name(i) for i in range(world)]
    server, port = None, [0]
    if rank == 0:
        server = RendezvousServer()
        port = [server.start()]
        server.init(get_host_assignments(parse_hosts(",".join(f"{name}:1" for name in names)), world))
    dist.broadcast_object_list(port)
    os.environ |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": hosts.INTERFACE,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts.addresses()[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port[0]),
        "HOROVOD_HOSTNAME": socket.gethostname(),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(world),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(world),
    }
    hvd.init()
    return server


def host_name(rank: int | str) -> str:
    return f"host{rank}"
