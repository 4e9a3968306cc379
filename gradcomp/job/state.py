"""What a job is in this process: its ranks, settings, connections, and what uses them."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError
from gradcomp.core.timeline import Timeline
from gradcomp.core.topology import Topology
from gradcomp.engine import Engine, Exchanger, Watchdog
from gradcomp.engine.watch import Roster
from gradcomp.job.launch import Launch
from gradcomp.job.network import Network, Ranks
from gradcomp.job.signing import Seal, SignedControl
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel


class _Channel(Protocol):
    """A :class:`gradcomp.job.channel.Channel`, which stands above this module."""

    @property
    def failure(self) -> GradcompError | None: ...

    def close(self, reason: str | None = None) -> None: ...


@dataclass(eq=False)
class Runtime:
    """What ``init`` set up. ``life``: from ``init`` to ``shutdown``; what an earlier one published is not read."""

    launch: Launch
    config: Config
    network: Network
    life: int = 0
    engine: Engine = field(default_factory=Engine)
    exchangers: list[Exchanger] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)
    #: One group per set of ranks, for the user's own collectives.
    groups: dict[Ranks, Transport] = field(default_factory=dict)
    channels: dict[Ranks, _Channel] = field(default_factory=dict)
    #: Why there can be no channel among some ranks, whose meeting failed.
    channel_errors: dict[Ranks, GradcompError] = field(default_factory=dict)
    #: The user's calls that have a name and are not over, by their ranks.
    in_flight: set[tuple[Ranks, str]] = field(default_factory=set)
    #: How often this rank has joined.
    joins: int = 0
    topology: Topology = field(init=False)
    #: The ranks' hosts, by name.
    hosts: tuple[str, ...] = ()
    #: Signs what the ranks publish, if strangers could publish too.
    seal: Seal | None = None
    #: The file that records what exchangers do, while there is one.
    timeline: Timeline | None = None
    _names: dict[Ranks, int] = field(default_factory=dict)
    _meetings: dict[Ranks, int] = field(default_factory=dict)
    _channel_locks: dict[Ranks, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.topology = Topology.one_host(self.size)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.network.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.network.ranks)

    @property
    def everyone(self) -> Ranks:
        """All ranks of the job."""
        return tuple(range(self.size))

    def add(self, exchanger: Exchanger) -> None:
        """An exchanger of this process, made by a frontend."""
        self.exchangers.append(exchanger)
        if self.timeline is not None:
            self.timeline.listen(exchanger.pipeline.trace)

    def close(self, exchanger: Exchanger) -> None:
        """An exchanger exchanges nothing any more; all ranks close theirs in the same order."""
        self.exchangers.remove(exchanger)
        exchanger.close()

    def start_timeline(self, path: str, mark_steps: bool = False) -> None:
        """Record what exchangers do: on rank 0, on all ranks where ``path`` has ``{rank}`` in it."""
        if "{rank}" not in path and self.rank != 0:
            return
        self.timeline = Timeline(path.replace("{rank}", str(self.rank)), self.rank, mark_steps)
        for exchanger in self.exchangers:
            self.timeline.listen(exchanger.pipeline.trace)

    def make_group(self, ranks: Ranks) -> Transport:
        """A new communicator of the engine that the ranks met through; collective over ``ranks``."""
        return self.network.group(ranks, self.config.timeout_seconds)

    def group(self, ranks: Ranks) -> Transport:
        """The communicator of the user's own collectives among ``ranks``; the first call is collective."""
        if ranks not in self.groups:
            self.groups[ranks] = self.make_group(ranks)
        return self.groups[ranks]

    def channel_lock(self, ranks: Ranks) -> threading.Lock:
        """Held while the channel among ``ranks`` is made: several threads may make their first call at once."""
        return self._channel_locks.setdefault(ranks, threading.Lock())

    def name(self, ranks: Ranks) -> str:
        """A name for one more exchanger among ``ranks``: the same on all of them."""
        number = self._names.get(ranks, 0)
        self._names[ranks] = number + 1
        return f"{self.key(ranks)}-{number}"

    def next_meeting(self, ranks: Ranks) -> str:
        """A name for one more meeting of ``ranks``: the same on all of them."""
        meeting = self.meeting_to_come(ranks)
        self._meetings[ranks] = self._meetings.get(ranks, 0) + 1
        return meeting

    def meeting_to_come(self, ranks: Ranks) -> str:
        """The name that the next meeting of ``ranks`` will have, to which others may have come already."""
        return f"{self.key(ranks)}-{self._meetings.get(ranks, 0)}"

    def roster(self, ranks: Ranks) -> Roster:
        """Who ``ranks`` are."""
        return Roster(ranks, tuple(self.hosts[rank] for rank in ranks) if self.hosts else ())

    def key(self, ranks: Ranks) -> str:
        """What tells these ranks from others in the job's key-value store."""
        return "all" if ranks == self.everyone else hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]

    def make_control(self) -> ControlChannel:
        """A connection to the job's small values."""
        control = self.network.control(self.life, self.config.timeout_seconds)
        return control if self.seal is None else SignedControl(control, self.seal)

    @cached_property
    def watchdog(self) -> Watchdog:
        """What watches all that this rank waits for, over the only connection."""
        roster = self.roster(self.everyone)
        return Watchdog(self.make_control(), self.rank, self.size, roster.names)
