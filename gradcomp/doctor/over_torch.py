"""Lets the ranks meet through torch.distributed: its store for what they tell, and Gloo for what they measure."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gradcomp.core.errors import TransportError
from gradcomp.job.jobstore import Deadline, first_line, open_store, with_interface
from gradcomp.job.launch import Launch
from gradcomp.job.network import Network
from gradcomp.job.over_torch import TorchNetwork
from gradcomp.transport.control import ControlChannel


class StoreControl(ControlChannel):
    """Publishes in the job's store before there is a process group. Calls take as long as the store takes to answer."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def publish(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value.decode())
        except RuntimeError as error:
            raise TransportError(f"the job's store is gone: {first_line(error)}") from error

    def lookup(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise TransportError(f"the job's store is gone: {first_line(error)}") from error


class TorchMeeting:
    """Connects this rank to the job's store, as ``init()`` does. Raises ConfigError and TransportError as that does."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self._open = ExitStack()
        self._launch = with_interface(launch)
        try:
            met = open_store(self._launch, Deadline(self._launch, seconds), self._open)
        except BaseException:
            self._open.close()
            raise
        self._store = PrefixStore("gradcomp/doctor", met.store)
        self.control: ControlChannel = StoreControl(self._store)

    def network(self, seconds: float) -> Network:
        """Form the default process group. Collective over all ranks; TransportError if Gloo cannot connect them."""
        launch = self._launch
        if launch.interface is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["GLOO_SOCKET_IFNAME"] = launch.interface
        store = PrefixStore("group", self._store)
        timeout = timedelta(seconds=seconds)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
            )
        except RuntimeError as error:
            raise TransportError(f"Gloo could not connect the ranks: {first_line(error)}") from error
        return TorchNetwork(tuple(range(launch.size)), launch.rank, True, launch.served_attempt)

    def close(self) -> None:
        self._open.close()


def training_threads() -> int:
    """Return the number of threads on which PyTorch computes."""
    return torch.get_num_threads()


def gpus() -> tuple[str, int]:
    """Return the CUDA that PyTorch was built for, empty without, and the number of GPUs that it sees."""
    return torch.version.cuda or "", torch.cuda.device_count() if torch.cuda.is_available() else 0


def version() -> str:
    """Return PyTorch's version with its build, which the package's metadata may lack."""
    return str(torch.__version__)
