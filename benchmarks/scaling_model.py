"""A model of one exchange on many ranks, by term: latency, bytes, coding and handling. It measures nothing.

The model is that of `gradcomp.reduce.costs` with two terms more: the work for each message, round and bucket, and
buckets in flight. A step has B buckets. Each tick issues a round of every active bucket, so B buckets of R rounds take
B + R - 1 times the latency, not B R times. Bytes, coding and handling of all buckets are added, and nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from gradcomp.core.scheme import parse
from gradcomp.core.topology import Topology
from gradcomp.reduce.costs import cost
from gradcomp.reduce.model import Flow, Load, Network, Numbers, to_owners

RANKS = (8, 64, 256, 1024, 4096)
WORLDS = tuple(2**k for k in range(3, 13))  # in which limits are looked for
GBITS = (10, 25, 100)
OF_EACH = 8  # ranks on a host, where there are several
SLICE = 1 << 20  # elements of a bucket
MODELS = {"25 M": 25_000_000, "350 M": 350_000_000}
REDUCTIONS = ("sra", "ring", "tree", "all_to_all", "parameter_server", "gather", "hierarchical")
TERMS = ("latency", "bytes", "coding", "handling")

REDUCED, GATHERED, SUMMED, LED = "reduced", "gathered", "summed", "led"


@dataclass(frozen=True)
class Family:
    """A compressor, and how its messages travel.

    ``REDUCED``: codes, by any reduction. ``GATHERED``: every rank's payload goes to all ranks. ``SUMMED``: floats, in
    ``sums`` allreduces of the transport. ``LED``: one rank's indices go to all ranks, then values are summed.
    ``votes``: partial sums are impossible.
    """

    compression: str
    travels: str
    sums: int = 1
    votes: bool = False


FAMILIES = {
    "none": Family("none", SUMMED),
    "float32": Family("cast:dtype=float32", REDUCED),
    "bf16": Family("cast:dtype=bfloat16", REDUCED),
    "8 bits": Family("quantize:bits=8", REDUCED),
    "4 bits": Family("quantize:bits=4", REDUCED),
    "signs": Family("one_bit", REDUCED),
    "votes": Family("signum", REDUCED, votes=True),
    "TopK 1%": Family("topk:density=0.01", GATHERED),
    "CLT-k 1%": Family("clt_k:density=0.01", LED),
    "PowerSGD 4": Family("powersgd:rank=4", SUMMED, sums=2),
}


@dataclass(frozen=True)
class Constants:
    """Seconds and rates of the model.

    ``alpha`` and ``local_alpha``: of a round between hosts, and inside one. ``local_rate``: bytes a second inside a
    host. Of one core: ``message``, ``round`` and ``bucket`` are the seconds of work for each message that a rank sends
    or receives, each round and each bucket; ``rates`` are the bytes of float32 a second of encoding and decoding;
    ``work`` has for families without a codec the seconds for a full bucket, and those for each payload in it.
    """

    alpha: float
    local_alpha: float
    local_rate: float
    message: float
    round: float
    bucket: float
    rates: Mapping[str, tuple[float, float]]
    work: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Sizes:
    """The bytes of one full bucket under a family. ``led``: those that one rank sends to all."""

    payload: float
    dense: float
    header: int = 0
    led: float = 0.0
    cut: Callable[[int], Sequence[float]] | None = None


@dataclass(frozen=True)
class Time:
    """Predicted seconds of one exchange, by term."""

    latency: float
    bytes: float
    coding: float
    handling: float

    @property
    def total(self) -> float:
        """All terms."""
        return self.latency + self.bytes + self.coding + self.handling


@cache
def hosts_of(world: int, of_each: int) -> Topology:
    """Hosts with so many ranks each, the last one perhaps with fewer."""
    return Topology(tuple(rank // of_each for rank in range(world)))


def messages(reduction: str, topology: Topology) -> int:
    """The messages that the busiest rank sends and receives for one bucket; every one has a header."""
    world, hosts = topology.world, len(topology.leaders)
    members = len(topology.members(0))
    if reduction == "tree":  # the root's children; every other rank has at most as many neighbours
        return 2 * math.ceil(math.log2(world)) if world > 1 else 0
    if reduction == "hierarchical":
        return 4 * (hosts - 1) + 2 * (members - 1)
    return {"sra": 4, "ring": 4, "all_to_all": 2, "gather": 2, "parameter_server": 2}[reduction] * (world - 1)


def exchange(
    family: str,
    reduction: str,
    sizes: Sizes,
    buckets: int,
    topology: Topology,
    gbits: float,
    given: Constants,
) -> Time:
    """The predicted time of a step of so many full buckets. ``reduction`` counts for reduced families only."""
    found = FAMILIES[family]
    load = Load(sizes.payload, sizes.dense, sizes.header, sizes.cut)
    if found.travels == REDUCED:
        rounds = [rounds_of(reduction, load, topology)]
        encode, decode = given.rates[family]
        coding = sizes.dense * (rounds[0].encoded / encode + rounds[0].decoded / decode)
        handling = given.bucket + given.message * messages(reduction, topology)
        handling += given.round * len(rounds[0].between)
    elif found.travels == GATHERED:
        rounds = [rounds_of("all_to_all", load, topology)]
        once, each = given.work[family]
        coding, handling = once + each * topology.world, 0.0
    else:  # the transport's allreduce is a ring; its messages have no headers
        rounds = found.sums * [rounds_of("ring", Load(sizes.payload / found.sums, sizes.dense), topology)]
        if found.travels == LED:
            rounds.append(broadcast(sizes.led, topology))
        if family in given.work:
            coding, handling = given.work[family][0], 0.0
        else:  # copied to a buffer, added up on the way, copied from the buffer
            encode, decode = given.rates["float32"]
            coding, handling = sizes.dense * (1 / encode + 2 / decode), given.bucket
    latency = sum(each.latency(given) for each in rounds)
    sent = sum(each.seconds(given, gbits) for each in rounds)
    first = given.alpha if len(topology.leaders) > 1 else given.local_alpha
    return Time(latency + (buckets - 1) * first, buckets * sent, buckets * coding, buckets * handling)


@dataclass(frozen=True, eq=False)
class Rounds:
    """Of every round, the bytes through the busiest link between hosts and inside one; and the amounts of coding."""

    between: Numbers
    inside: Numbers
    encoded: float
    decoded: float

    @staticmethod
    def of(flows: Sequence[Flow], topology: Topology, encoded: float = 0.0, decoded: float = 0.0) -> Rounds:
        """Keep two numbers of every round: the flows of a ring of 4,096 ranks take a gigabyte."""
        hosts = np.asarray(topology.hosts)
        outside = Network(0.0, 1.0, math.inf, math.inf)
        local = Network(0.0, 0.0, math.inf, math.inf, 0.0, 1.0)
        return Rounds(
            np.array([flow.seconds(hosts, outside) for flow in flows]),
            np.array([flow.seconds(hosts, local) for flow in flows]),
            encoded,
            decoded,
        )

    def latency(self, given: Constants) -> float:
        """The seconds of all rounds without their bytes."""
        outside, local = given.alpha * (self.between > 0), given.local_alpha * (self.inside > 0)
        return float(np.maximum(outside, local).sum())

    def seconds(self, given: Constants, gbits: float) -> float:
        """The seconds of all rounds' bytes; a round's two kinds of link work at the same time."""
        return float(np.maximum(self.between * 8e-9 / gbits, self.inside / given.local_rate).sum())


@cache
def rounds_of(reduction: str, load: Load, topology: Topology) -> Rounds:
    """The rounds of one bucket."""
    found = cost(parse(reduction), load, topology)
    return Rounds.of(found.flows, topology, found.encoded, found.decoded)


@cache
def broadcast(nbytes: float, topology: Topology) -> Rounds:
    """The round in which rank 0 sends to all others."""
    return Rounds.of([to_owners(topology, range(topology.world), {0: nbytes}).back()], topology)


def uncompressed(
    sizes: Mapping[str, Sizes], buckets: int, topology: Topology, gbits: float, given: Constants
) -> Time:
    """The baseline: float32 summed by the transport's ring, or sent by `sra`, whichever takes less."""
    ways = (("none", "ring"), ("float32", "sra"))
    times = [exchange(f, r, sizes[f], buckets, topology, gbits, given) for f, r in ways]
    return min(times, key=lambda time: time.total)


def limit(seconds: Mapping[int, Time], baseline: Mapping[int, Time]) -> tuple[int, str] | None:
    """The fewest ranks from which on a time is above its baseline for good, and the term that grew most; or None.

    The term is the one that has most more than the baseline's there.
    """
    above = None
    for world in sorted(seconds, reverse=True):
        if seconds[world].total <= baseline[world].total:
            break
        above = world
    if above is None:
        return None
    excess = {term: getattr(seconds[above], term) - getattr(baseline[above], term) for term in TERMS}
    return above, max(excess, key=excess.__getitem__)
