"""Measured costs of links, errors for ranks that have diverged, and the log of an exchanger's plans."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import StateError, TransportError
from gradcomp.core.strings import printable
from gradcomp.core.topology import Topology
from gradcomp.exchange.fingerprint import Fingerprints
from gradcomp.exchange.members import Watch
from gradcomp.exchange.requests import REPEATED
from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import FLOAT32, MINMAX, SEGMENT
from gradcomp.reduce.header import APPLIED, DISCARDED, EDITED, KEPT, LATE
from gradcomp.reduce.model import Network
from gradcomp.transport.base import Handle, Transport, wait

#: Messages of two sizes give latency and rate. The larger one takes 8 ms at 1 Gbit/s.
PROBE_BYTES = (1 << 10, 1 << 20)
_REPEATS = 5
#: Small rounds that are under way at the same time, to measure what a round costs that hides no latency.
_ROUNDS = 8
_ELEMENTS = 1 << 18
#: Takes one of several times.
Choose = Callable[[list[float]], float]
_LEAST = 1e-9  # seconds; a measured time of 0 would make a rate infinite

#: A rank waits this long for the others to publish what they did; all of them know that they must.
ANSWER_SECONDS = 5.0
_IN_WORDS = {
    APPLIED: "applied the means (step())",
    DISCARDED: "threw the means away (no step(), or zero_grad() before it)",
    KEPT: "went on accumulating (neither step() nor zero_grad())",
    REPEATED: "stepped more than once",
    0: "had no exchange",
}
_OF_MEANS = {
    LATE: "had no gradient",
    EDITED: "changed theirs between backward() and step()",
    0: "left them as they were",
}
logger = logging.getLogger("gradcomp")


def measure(transport: Transport, topology: Topology, wait_for: Callable[[Handle], None] = wait) -> Network:
    """Measure alpha and beta of t(n) = alpha + beta n between hosts and inside them, and the rates of a 4-bit codec.

    All ranks send n bytes to the next rank at the same time, as reductions do; the slowest rank's median counts,
    apart for those whose next rank is on another host. Where no message stays inside a host, it costs nothing
    there. Eight rounds of 1 KiB that are under way together give the processor's time of a round. Collective, outside
    of steps; ``wait_for`` waits for a handle. Wire: 54 messages of 1 KiB and 6 of 1 MiB per rank, not counted in
    ``bytes_sent``, and one all-gather of 40 bytes. :class:`gradcomp.reduce.model.Network` says what the figures are
    for.
    """
    sent_before = transport.bytes_sent
    small, large = (shift(transport, nbytes, wait_for) for nbytes in PROBE_BYTES)
    together = shift(transport, PROBE_BYTES[0], wait_for, rounds=_ROUNDS)
    overhead = max(together - small, 0.0) / (_ROUNDS - 1)
    own = np.array([small, large, *_codec_rates(), overhead])
    parts = transport.allgather_bytes(own.tobytes(), wait_for)
    transport.bytes_sent = sent_before
    everyone = np.stack([np.frombuffer(part, dtype=np.float64) for part in parts])
    hosts = np.asarray(topology.hosts)
    crosses = hosts != np.roll(hosts, -1)
    alpha, beta = _fit(everyone[crosses, :2]) if crosses.any() else (0.0, 0.0)
    local_alpha, local_beta = _fit(everyone[~crosses, :2]) if not crosses.all() else (0.0, 0.0)
    encode_rate, decode_rate = everyone[:, 2:4].min(axis=0).tolist()
    overhead = float(everyone[:, 4].max())
    return Network(alpha, beta, encode_rate, decode_rate, local_alpha, local_beta, overhead)


def _fit(seconds: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """Return latency and seconds per byte of a line through both sizes."""
    small, large = seconds.max(axis=0).tolist()
    beta = max(large - small, _LEAST) / (PROBE_BYTES[1] - PROBE_BYTES[0])
    return max(small - beta * PROBE_BYTES[0], _LEAST), beta


def shift(
    transport: Transport,
    nbytes: int,
    wait_for: Callable[[Handle], None] = wait,
    *,
    rounds: int = 1,
    repeats: int = _REPEATS,
    choose: Choose = median,
) -> float:
    """Return the seconds in which every rank sends to the next and receives from the previous one. Collective.

    It sends ``rounds`` messages of ``nbytes``, all under way together, and does so ``repeats`` times after a first
    time that does not count; ``choose`` takes one of the times. The bytes are not counted in ``bytes_sent``.
    ``wait_for`` waits for a handle.
    """
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    send, recv = np.zeros(nbytes, dtype=np.uint8), np.empty((rounds, nbytes), dtype=np.uint8)
    sent_before = transport.bytes_sent

    def once() -> None:
        for handle in [transport.exchange([(after, send)], [(before, part)]) for part in recv]:
            wait_for(handle)

    seconds = _seconds(once, repeats, choose)
    transport.bytes_sent = sent_before
    return seconds


def _codec_rates() -> tuple[float, float]:
    """Return the bytes of float32 that this core encodes and decodes per second."""
    values = np.random.default_rng(0).standard_normal(_ELEMENTS).astype(np.float32)
    table = np.zeros(1, dtype=SEGMENT)
    table["length"], table["level"], table["bucket_size"], table["dtype"] = _ELEMENTS, 4, 512, FLOAT32
    table["gradient"] = table["output"] = values.ctypes.data
    codec, flags = Codec(MINMAX), np.zeros(1, dtype=np.uint8)
    payload = np.zeros(int(codec.wire_bytes(table).sum()), dtype=np.uint8)
    encode = _seconds(lambda: codec.encode(HOST, table, payload, flags, Draw(0, 0, 0)))
    decode = _seconds(lambda: codec.decode(HOST, table, payload, flags))
    return values.nbytes / encode, values.nbytes / decode


def _seconds(work: Callable[[], None], repeats: int = _REPEATS, choose: Choose = median) -> float:
    seconds = []
    for _ in range(1 + repeats):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return max(choose(seconds[1:]), _LEAST)


def different_parameters(
    table: npt.NDArray[np.uint32], names: Sequence[str], ranks: Sequence[int], steps: int
) -> StateError | None:
    """Return the error to raise if the parameters' digests, a row for each of ``ranks``, differ, else None.

    A row of zeros belongs to a rank that has nothing to compare.
    """
    has_say: npt.NDArray[np.bool_] = np.asarray(table.any(axis=1))
    first = int(np.argmax(has_say))
    different = (table != table[first]) & has_say[:, None]
    differs = different.any(axis=0)
    if not differs.any():
        return None
    layer = int(np.argmax(differs))
    others = ", ".join(str(ranks[member]) for member in np.flatnonzero(different[:, layer]).tolist())
    return StateError(
        f"after step {steps} the parameter of layer {names[layer]!r} differs between rank {ranks[first]} "
        f"and rank {others}; the ranks did not start from the same "
        "parameters (broadcast them) or do not apply the same update"
    )


def different_fingerprints(
    found: Fingerprints, names: Sequence[str], ranks: Sequence[int], when: str
) -> StateError:
    """Return the error for fingerprints that differ; it names what differs, on which ranks."""
    members = np.flatnonzero(found.has_say).tolist()
    first = members[0]
    parts = _different_scalars({ranks[member]: found.scalars[member] for member in members}, ranks[first])
    layers = (found.layers != found.layers[first]) & found.has_say[:, None]
    if layers.any():
        layer = int(np.argmax(layers.any(axis=0)))
        others = ", ".join(str(ranks[member]) for member in np.flatnonzero(layers[:, layer]).tolist())
        parts.append(
            f"the parameter of layer {names[layer]!r} differs between rank {ranks[first]} and rank {others}"
        )
    if changed := [ranks[member] for member in members if found.results[member] != found.results[first]]:
        parts.append(
            f"what rank {', '.join(map(str, changed))} decoded in the last exchange is not what rank {ranks[first]} "
            "did: a message was changed on a rank or between ranks"
        )
    what = "; ".join(parts) or "the fingerprints of the ranks differ"
    return StateError(
        f"{when} {what}. Ranks must start from the same parameters (broadcast them) and apply the same "
        "update: the same learning rate, and no change of gradients on one rank alone"
    )


def _different_scalars(texts: Mapping[int, str], first: int) -> list[str]:
    """Describe the first of the optimizer's scalars that some rank has otherwise than rank ``first``."""
    if len(set(texts.values())) == 1:
        return []
    groups = {rank: _groups_of(text) for rank, text in texts.items()}
    for number, group in enumerate(groups[first]):
        for name, value in group.items():
            values = {
                rank: those[number].get(name) if number < len(those) else None
                for rank, those in groups.items()
            }
            if different := [rank for rank, theirs in values.items() if theirs != value]:
                where = f" of group {number}" if len(groups[first]) > 1 else ""
                digits = 7 if len({_shown(each, 7) for each in values.values()}) > 1 else 17
                said = ", ".join(f"{_shown(values[rank], digits)} on rank {rank}" for rank in different)
                title = "learning rate" if name == "lr" else printable(name.replace("_", " "), 80)
                own = f"{_shown(value, digits)} on rank {first}"
                return [f"the optimizers differ: {title}{where} {said}, {own}"]
    ranks = [rank for rank, text in texts.items() if text != texts[first]]
    return [
        f"the optimizer of rank {', '.join(map(str, ranks))} has other settings than that of rank {first}"
    ]


def _shown(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else printable(json.dumps(value), 80)


def _groups_of(text: str) -> list[dict[str, Any]]:
    """Return the scalars of a rank's parameter groups, or nothing if the text has none."""
    try:
        groups = json.loads(text)
    except ValueError:
        return []
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def different_outcomes(watch: Watch, number: int, outcome: int, when: str) -> StateError:
    """Return the error for a step whose means some ranks applied and others did not; it names them all.

    All members call it for the exchange of the same ``number``. Each publishes what it did and waits up to five seconds
    for the others.
    """
    parts = _in_words(_told(watch, number, outcome), watch.roster.ranks, _IN_WORDS)
    return StateError(
        f"{when} the ranks went different ways: {'; '.join(parts)}. Their parameters differ now: "
        "training cannot go on. A step must be skipped on all ranks or on none: decide it by a value that all "
        "ranks share"
    )


def different_means(watch: Watch, step: int, notices: int) -> StateError:
    """Return the error for means that some ranks changed before a late rank had them; it names them all.

    All members call it, as they call :func:`different_outcomes`.
    """
    parts = _in_words(_told(watch, step, notices), watch.roster.ranks, _OF_MEANS)
    return StateError(
        f"after step {step} the ranks applied different means: {'; '.join(parts)}. Their parameters differ now: "
        "training cannot go on. Where backward() reaches no parameter, the means come with step() only: on every rank, "
        "call opt.synchronize() first, then change them"
    )


def _in_words(told: Mapping[int, int], ranks: Sequence[int], words: Mapping[int, str]) -> list[str]:
    those = {bits: [ranks[m] for m in sorted(told) if told[m] == bits] for bits in sorted(set(told.values()))}
    parts = [
        f"rank {', '.join(map(str, some))} {words.get(bits, 'did something else')}"
        for bits, some in those.items()
    ]
    if silent := [rank for member, rank in enumerate(ranks) if member not in told]:
        parts.append(f"rank {', '.join(map(str, silent))} did not say")
    return parts


def _told(watch: Watch, number: int, bits: int) -> Mapping[int, int]:
    control, own = watch.watchdog.control, watch.member
    known = {str(bits).encode(): bits for bits in (*_IN_WORDS, *_OF_MEANS)}
    keys = [f"{watch.scope}/outcome/{number}/{member}" for member in range(len(watch.roster.ranks))]
    told = {own: bits}
    deadline = monotonic() + ANSWER_SECONDS
    try:
        control.publish(keys[own], str(bits).encode())
        while len(told) < len(keys) and monotonic() < deadline:
            for other, key in enumerate(keys):
                value = None if other in told else control.lookup(key)
                if value is not None and bytes(value) in known:
                    told[other] = known[bytes(value)]
            sleep(0.01)
    except TransportError:
        pass  # the error names what is known
    return told
