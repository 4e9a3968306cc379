"""Start-up and changes of plan among N simulated ranks: calls at the job's store, time and memory.

:func:`start` runs the start-up of real jobs. Every rank is a thread of this process with a runtime and a watchdog of
its own. Two things are simulated: the transport, which is in this process, and the store, a dictionary that counts.
:func:`change` runs N pipelines in one thread, and :func:`build` makes what one rank of many makes.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
from scaling_model import hosts_of
from scaling_simulation import Ranks as Pipelines
from scaling_simulation import parts_of

from gradcomp import Config, LayerSpec, Policy
from gradcomp.core.scheme import parse
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.settings import Settings
from gradcomp.job.launch import Launch, Ranks
from gradcomp.job.membership import introduce
from gradcomp.job.network import Network
from gradcomp.job.start import validate_together
from gradcomp.job.state import Runtime
from gradcomp.reduce.base import class_of
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel
from gradcomp.transport.inprocess import World

OF_EACH = 8  # ranks on a host
WATCHED_SECONDS = 5.0
LAYERS = [LayerSpec(f"weight{i}", (64, 32)) for i in range(4)]
_NUMBER = re.compile(r"\d+")


@dataclass(eq=False)
class CountingStore:
    """Keeps the values of all ranks."""

    values: dict[str, bytes] = field(default_factory=dict)

    def keys_by_form(self) -> Counter[str]:
        """How many keys have each form, with numbers written as N."""
        return Counter(_NUMBER.sub("N", key) for key in self.values)


class CountedControl(ControlChannel):
    """One rank's connection to a store, with counts of calls as a TCPStore is called, and of the bytes of values.

    To publish is one call. To look up a value is two: one asks for the key, one gets it. ``polls`` counts looks at keys
    that no rank has published yet; their number depends on how long the ranks wait.
    """

    def __init__(self, store: CountingStore) -> None:
        self._store = store
        self.calls = self.polls = self.bytes = 0

    def publish(self, key: str, value: bytes) -> None:
        self._store.values[key] = value
        self.calls += 1
        self.bytes += len(value)

    def lookup(self, key: str) -> bytes | None:
        value = self._store.values.get(key)
        if value is None:
            self.polls += 1
            return None
        self.calls += 2
        self.bytes += len(value)
        return value


@dataclass(eq=False)
class Machine:
    """What the ranks of one simulated job share: the store, and worlds by their ranks and number."""

    store: CountingStore = field(default_factory=CountingStore)
    worlds: dict[tuple[Ranks, int], World] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def world(self, ranks: Ranks, number: int) -> World:
        with self.lock:
            return self.worlds.setdefault((ranks, number), World(len(ranks)))


class SimulatedNetwork(Network):
    """One rank's engine: every group is a world of this process."""

    engine = "torch"  # the settings know no other name; nothing of torch is used

    def __init__(self, machine: Machine, rank: int, size: int) -> None:
        self.ranks, self.rank, self._machine = tuple(range(size)), rank, machine
        self._made: Counter[Ranks] = Counter()
        self.connection = CountedControl(machine.store)

    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        self._made[ranks] += 1
        return self._machine.world(ranks, self._made[ranks]).transports()[ranks.index(self.rank)]

    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        return self.connection


class Rank:
    """One rank of the simulated job."""

    def __init__(self, machine: Machine, rank: int, size: int) -> None:
        host, hosts = rank // OF_EACH, -(-size // OF_EACH)
        local = min(OF_EACH, size - host * OF_EACH)
        launch = Launch(rank, size, rank % OF_EACH, local, host, hosts, "simulated", f"host{host}")
        self.network = SimulatedNetwork(machine, rank, size)
        self.runtime = Runtime(launch, Config(transport="torch", timeout_seconds=600.0), self.network)
        self.exchanger: Exchanger | None = None

    def introduce(self) -> None:
        """Exchange hosts, versions and settings, as ``init`` does."""
        introduce(self.runtime, [])
        self.runtime.watchdog.start()

    def compare(self) -> None:
        """Meet, and compare layers, plan and settings, as a wrapped optimizer does."""
        state, ranks = self.runtime, self.runtime.everyone
        plan, transport = validate_together(state, ranks, lambda: Policy("quantize:bits=4").plan(LAYERS))
        assert transport is not None, "there are several ranks"
        settings = Settings(state.name(ranks), topology=state.topology, roster=state.roster(ranks))
        self.exchanger = Exchanger(
            state.engine, LAYERS, plan, transport, state.watchdog, state.config, _nowhere, settings
        )

    def end(self) -> None:
        """End the threads, without the end of a job."""
        self.runtime.engine.stop()
        if self.exchanger is not None:
            self.exchanger.close()
        self.runtime.watchdog.stop()


def _nowhere(layer: int) -> int:
    raise AssertionError(f"layer {layer} has a gradient on every rank")


@dataclass(frozen=True)
class Phase:
    """Calls at the store in one phase: rank 0's, the mean of the others', all; polls and bytes of all; seconds."""

    name: str
    first: int
    others: float
    total: int
    polls: int
    bytes: int
    seconds: float


def start(size: int) -> tuple[list[Phase], Counter[str]]:
    """Start ``size`` simulated ranks, and let them wait for a while; the phases, and the keys by form."""
    machine = Machine()
    ranks = [Rank(machine, rank, size) for rank in range(size)]
    works: dict[str, Callable[[Rank], Any]] = {
        "init: introduce": Rank.introduce,
        "optimizer: meet, compare": Rank.compare,
        f"idle for {WATCHED_SECONDS:g} s": lambda _: sleep(WATCHED_SECONDS),
    }
    phases = []
    with ThreadPoolExecutor(size) as pool:
        for name, work in works.items():
            counted = [rank.network.connection for rank in ranks]
            before = np.array([(each.calls, each.polls, each.bytes) for each in counted])
            begin = perf_counter()
            list(pool.map(work, ranks))
            seconds = perf_counter() - begin
            made = np.array([(each.calls, each.polls, each.bytes) for each in counted]) - before
            total, polls, sent = made.sum(axis=0).tolist()
            first = int(made[0, 0])
            phases.append(Phase(name, first, (total - first) / (size - 1), total, polls, sent, seconds))
        list(pool.map(Rank.end, ranks))
    return phases, machine.store.keys_by_form()


@dataclass(frozen=True)
class Change:
    """Milliseconds of work of one rank, on one core.

    ``make``: a pipeline. ``step``: a step. ``change``: one at whose end the ranks compare the next plan. ``after``: the
    first step under that plan, for which each rank makes its buckets anew. ``bytes``: those that a rank sends for the
    comparison.
    """

    ranks: int
    make: float
    step: float
    change: float
    after: float
    bytes: int


def change(size: int) -> Change:
    """Change from 4 to 8 bits among ``size`` pipelines in one thread."""
    begin = process_time()
    ranks = Pipelines(LAYERS, "quantize:bits=4", "sra", hosts_of(size, OF_EACH))
    made = process_time() - begin
    for _ in range(3):
        step, sent = ranks.step()
    plan = Policy("quantize:bits=8").plan(LAYERS)
    for pipeline in ranks.pipelines:
        pipeline.set_compression(plan, {})
    changed, with_change = ranks.step()
    assert ranks.pipelines[0].plan.assignments[0].level == 8, "the plan has not changed"
    after, _ = ranks.step()
    return Change(size, 1e3 * made / size, 1e3 * step, 1e3 * changed, 1e3 * after, with_change - sent)


@dataclass(frozen=True)
class Built:
    """What one rank of many needs for one exchange bucket: seconds to make it, and bytes of memory that it keeps."""

    reduction: str
    ranks: int
    seconds: float
    bytes: int


def build(reduction: str, size: int) -> Built:
    """Make rank 0's side of a reduction for a full bucket of the default size, at 4 bits."""
    layers = [LayerSpec(f"weight{i}", (1024, 64)) for i in range(16)]
    parts = parts_of(layers, "quantize:bits=4")
    scheme, topology = parse(reduction), hosts_of(size, OF_EACH)
    begin = process_time()
    class_of(scheme)(parts, len(layers), 0, **class_of(scheme).arguments(scheme, topology, 0))
    seconds = process_time() - begin
    topology = dataclasses.replace(topology)
    tracemalloc.start()
    kept = class_of(scheme)(parts, len(layers), 0, **class_of(scheme).arguments(scheme, topology, 0))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return Built(reduction, size, seconds, nbytes)
