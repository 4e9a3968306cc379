"""Brings the ranks of a job together for the doctor, by torch.distributed, or by MPI where PyTorch is missing."""

from __future__ import annotations

from typing import Protocol

from gradcomp.core.errors import ConfigError, TransportError, is_there
from gradcomp.doctor.finding import Finding, error
from gradcomp.doctor.reach import Answer, is_up, wait_for
from gradcomp.job import network
from gradcomp.job.launch import Address, Launch
from gradcomp.job.network import Network
from gradcomp.transport.control import ControlChannel

#: A rank that cannot reach the store gives up so much earlier than rank 0, so that its output is there first.
_SHARE_OF_TIME = 0.8


class Meeting(Protocol):
    """The ranks that have met: small values that all of them see, and the network that they would train over."""

    control: ControlChannel

    def network(self, seconds: float) -> Network: ...

    def close(self) -> None: ...


class MpiMeeting:
    """Meets through MPI alone, as TensorFlow's ranks do. Raises ConfigError and TransportError as ``init()`` does."""

    def __init__(self, seconds: float) -> None:
        self._launch, self._network = network.join(seconds)
        self.control: ControlChannel = self._network.control(0, seconds)

    def network(self, seconds: float) -> Network:
        return self._network

    def close(self) -> None:
        self._network.close()


def place_of(launch: Launch) -> str:
    """Return how the ranks meet, for a reader."""
    if launch.master is not None:
        whose = "rank 0's store" if launch.served_attempt is None else "torchrun's store"
        return f"{whose} at {_text(_store_address(launch))}"
    if launch.horovod_server is not None:
        return f"horovodrun's server at {_text(launch.horovod_server)}"
    if not is_there("torch"):
        return "MPI"
    return "a Unix socket of this host" if launch.one_host else "an address that MPI broadcasts"


def meet(launch: Launch, who: str, seconds: float) -> Meeting | Finding:
    """Connect to where the ranks meet. Return what is wrong if that is impossible. ``who``: this rank for a reader."""
    address = _store_address(launch)
    if address is not None and not (launch.rank == 0 and launch.served_attempt is None):
        answer = wait_for(address, _SHARE_OF_TIME * seconds)
        if answer is not Answer.YES:
            return _unreachable(address, answer, who, _SHARE_OF_TIME * seconds, launch.rank)
    try:
        if is_there("torch"):
            from gradcomp.doctor.over_torch import TorchMeeting

            return TorchMeeting(launch, seconds)
        return MpiMeeting(seconds)
    except ConfigError as problem:
        advice = "Start the ranks by a launcher that gradcomp knows, or set MASTER_ADDR and MASTER_PORT on all of them."
        return error("meeting", f"{who}: {problem}", advice, launch.rank)
    except TransportError as problem:
        advice = (
            "Set MASTER_PORT to a port that is free on rank 0's host, and end what is left of earlier jobs."
        )
        return error("meeting", f"{who}: {problem}", advice, launch.rank)


def _store_address(launch: Launch) -> Address | None:
    """Return the address that this rank connects to, if the launcher names one; see ``open_store``."""
    if launch.master is None:
        return launch.horovod_server
    own = launch.one_host and launch.served_attempt is None
    return ("127.0.0.1", launch.master[1]) if own else launch.master


def _unreachable(address: Address, answer: Answer, who: str, seconds: float, rank: int) -> Finding:
    found = f"{who}: {_text(address)}, where the ranks meet, {answer.value} ({seconds:.0f} s)"
    if answer is Answer.SILENT:
        if is_up(address[0]):
            advice = (
                f"Open port {address[1]} in the firewall of {address[0]}, or set MASTER_PORT to an open one."
            )
            return error(
                "ports", f"{found}; the host answers at other ports, so this port is blocked", advice, rank
            )
        advice = (
            f"See whether {address[0]} is rank 0's host in this network, runs, and has no firewall in front."
        )
        return error("meeting", f"{found}; the host answers at no other port either", advice, rank)
    advice = {
        Answer.REFUSED: "Start rank 0, or correct MASTER_ADDR and MASTER_PORT.",
        Answer.FORBIDDEN: "Let this host's firewall pass connections to that port.",
    }.get(answer, "Set MASTER_ADDR to the address of rank 0's host in the network that the hosts share.")
    return error("ports" if answer is Answer.FORBIDDEN else "meeting", found, advice, rank)


def _text(address: Address | None) -> str:
    return "{}:{}".format(*address) if address is not None else "?"
