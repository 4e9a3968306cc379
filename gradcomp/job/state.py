"""Holds a job as it is in this process: its ranks, settings and connections, and what uses them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError
from gradcomp.core.topology import Topology
from gradcomp.core.trace import ExchangeId, Timeline
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.members import Roster
from gradcomp.exchange.thread import Engine
from gradcomp.exchange.watchdog import Watchdog
from gradcomp.job.launch import Launch, Ranks
from gradcomp.job.network import Network
from gradcomp.job.signing import Seal, SignedControl
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel

if TYPE_CHECKING:
    from gradcomp.job.channel import Channel
    from gradcomp.job.joining import Context


@dataclass(eq=False)
class Runtime:
    """Holds the objects that ``init`` creates.

    ``life`` counts the calls of ``init``. Values that were published in an earlier life are not read.
    """

    launch: Launch
    config: Config
    network: Network
    life: int = 0
    engine: Engine = field(default_factory=Engine)
    exchangers: list[Exchanger] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)
    #: One group per set of ranks, for the user's own collectives.
    groups: dict[Ranks, Transport] = field(default_factory=dict)
    channels: dict[Ranks, Channel] = field(default_factory=dict)
    #: The errors with which some ranks failed to make a channel.
    channel_errors: dict[Ranks, GradcompError] = field(default_factory=dict)
    #: The names of the user's pending calls, with their ranks.
    in_flight: set[tuple[Ranks, str]] = field(default_factory=set)
    #: The number of times that this rank has joined, by the ranks that join together.
    joins: Counter[Ranks] = field(default_factory=Counter)
    #: The blocks ``with join(...)`` that this process is in.
    contexts: list[Context] = field(default_factory=list)
    topology: Topology = field(init=False)
    #: A random name of the job, the same on all ranks; empty in a world of one.
    job: str = ""
    #: The name of each rank's host.
    hosts: tuple[str, ...] = ()
    #: Signs what the ranks publish, if strangers may publish too.
    seal: Seal | None = None
    #: Records what exchangers do, as long as a timeline is being recorded.
    timeline: Timeline | None = None
    #: True if the framework computes on all cores that this rank may use.
    shares_core: bool = False
    #: The numbers of named exchangers and of meetings among these ranks.
    _names: Counter[Ranks] = field(default_factory=Counter)
    _meetings: Counter[Ranks] = field(default_factory=Counter)
    #: Locks under which channels are made: several threads may need one at once.
    channel_locks: dict[Ranks, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.size = self.network.rank, len(self.network.ranks)
        self.everyone: Ranks = tuple(range(self.size))
        self.topology = Topology.one_host(self.size)

    def what_if(self, ranks: Ranks) -> str:
        """Return the ratios of a what-if run; none where a rank is alone, since nothing is exchanged."""
        return self.config.what_if if len(ranks) > 1 else ""

    def add(self, exchanger: Exchanger) -> None:
        """Add an exchanger that a frontend has made."""
        self.exchangers.append(exchanger)
        if self.timeline is not None:
            self._record(self.timeline, exchanger)

    def _record(self, timeline: Timeline, exchanger: Exchanger) -> None:
        exchange = ExchangeId(self.job, exchanger.name, exchanger.ranks)
        timeline.listen(exchanger.pipeline.trace, exchange)

    def close(self, exchanger: Exchanger) -> None:
        """Close an exchanger; all ranks close theirs in the same order."""
        self.exchangers.remove(exchanger)
        exchanger.close()

    def start_timeline(self, path: str, mark_steps: bool = False) -> None:
        """Record the phases of all exchangers: on rank 0, or on all ranks if ``path`` has ``{rank}`` in it."""
        if "{rank}" not in path and self.rank != 0:
            return
        self.timeline = Timeline(path.replace("{rank}", str(self.rank)), self.rank, mark_steps)
        for exchanger in self.exchangers:
            self._record(self.timeline, exchanger)

    def make_group(self, ranks: Ranks) -> Transport:
        """Make a communicator of the engine that the ranks met through. Collective over ``ranks``."""
        return self.network.group(ranks, self.config.timeout_seconds)

    def group(self, ranks: Ranks) -> Transport:
        """Return the communicator of the user's own collectives among ``ranks``. The first call is collective."""
        if ranks not in self.groups:
            self.groups[ranks] = self.make_group(ranks)
        return self.groups[ranks]

    def name(self, ranks: Ranks) -> str:
        """Return a new name for an exchanger among ``ranks``, the same on all of them."""
        self._names[ranks] += 1
        return f"{self.key(ranks)}-{self._names[ranks] - 1}"

    def next_meeting(self, ranks: Ranks) -> str:
        """Return a new name for a meeting of ``ranks``, the same on all of them."""
        meeting = self.meeting_to_come(ranks)
        self._meetings[ranks] += 1
        return meeting

    def meeting_to_come(self, ranks: Ranks) -> str:
        """Return the name that the next meeting of ``ranks`` will have; other ranks may wait there already."""
        return f"{self.key(ranks)}-{self._meetings[ranks]}"

    def roster(self, ranks: Ranks) -> Roster:
        return Roster(ranks, tuple(self.hosts[rank] for rank in ranks) if self.hosts else ())

    def key(self, ranks: Ranks) -> str:
        """Return a name that tells these ranks from others in the job's key-value store."""
        return "all" if ranks == self.everyone else hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]

    def make_control(self) -> ControlChannel:
        """Connect to the store of the job's small values, which are signed if other programs can write to it."""
        control = self.network.control(self.life, self.config.timeout_seconds)
        return control if self.seal is None else SignedControl(control, self.seal)

    @cached_property
    def watchdog(self) -> Watchdog:
        """Return the watchdog of all that this rank waits for. It has the only connection to the control channel."""
        roster = self.roster(self.everyone)
        return Watchdog(self.make_control(), self.rank, self.size, roster.names)
