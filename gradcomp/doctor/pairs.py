"""The pairs of hosts: in which order their links are measured, and what the measured times and rates mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradcomp.doctor.facts import Facts
from gradcomp.doctor.finding import Finding, error, ok, warning
from gradcomp.doctor.links import Attempt
from gradcomp.doctor.reach import Answer

Pair = tuple[int, int]

#: Up to so many hosts no two pairs are measured at once. Beyond, each host is in one pair at a time.
_ONE_BY_ONE_HOSTS = 8
#: A pair is slow if its rate is less than this share of what a good quarter of the pairs has.
_SLOW_SHARE = 1 / 3
#: A pair is late if its messages take so many times as long as those of a good quarter, and at least so long.
_LATE_TIMES, _LATE_SECONDS = 10, 2e-3
#: Less than this cannot be used: 100 MB of gradients take 16 s and more, uncompressed.
_UNUSABLE_BYTES_PER_SECOND = 50e6 / 8
_GRADIENT_BYTES = 100e6


@dataclass(frozen=True)
class Link:
    """The link between two hosts, measured by their first ranks ``a`` and ``b``.

    ``there``: bytes per second from a to b, ``back``: from b to a. ``attempts``: how the addresses of the key's second
    rank answered its first.
    """

    a: int
    b: int
    latency_seconds: float = 0.0
    there: float = 0.0
    back: float = 0.0
    problem: str = ""
    attempts: Mapping[Pair, Sequence[Attempt]] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return self.there > 0 and self.back > 0

    @property
    def rate(self) -> float:
        """The rate of the slower direction, in bytes per second."""
        return min(self.there, self.back)

    def better(self, other: Link) -> Link:
        """Return the better of two measurements in each figure: what disturbs one makes it worse, never better."""
        if not (self.is_measured and other.is_measured):
            return self if self.is_measured else other
        latency = min(self.latency_seconds, other.latency_seconds)
        there, back = max(self.there, other.there), max(self.back, other.back)
        return replace(self, latency_seconds=latency, there=there, back=back)


def rounds(leaders: Sequence[int]) -> list[list[Pair]]:
    """Return all pairs in rounds; the pairs of a round are measured at once, and no rank is in two of them."""
    pairs = [(a, b) for place, a in enumerate(leaders) for b in leaders[place + 1 :]]
    if len(leaders) <= _ONE_BY_ONE_HOSTS:
        return [[pair] for pair in pairs]
    # The circle method: one stays, the others move on by a place each round.
    ring = [*leaders, *[-1] * (len(leaders) % 2)]
    found = []
    for _ in range(len(ring) - 1):
        met = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        found.append([(min(pair), max(pair)) for pair in met if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def doubtful(links: Sequence[Link]) -> list[Link]:
    """Return the links to measure again: those that would be reported."""
    return [link for link in links if link.is_measured and (_is_slow(link, links) or _is_late(link, links))]


def judge(links: Sequence[Link], ranks: Mapping[int, Facts]) -> list[Finding]:
    """Return the findings on the links between hosts."""
    found = [*_unreachable(links, ranks)]
    measured = [link for link in links if link.is_measured]
    for link in links:
        if link.problem:
            names = f"{ranks[link.a].where} and {ranks[link.b].where}"
            advice = "Look for lost packets and unequal MTUs on the way: small messages passed."
            found.append(error("links", f"{names}: {link.problem}", advice))
    if not measured:
        return found
    slow = [link for link in measured if _is_slow(link, measured)]
    found += _slow(slow, measured, ranks)
    typical = seconds_text(_good_latency(measured))
    for link in measured:
        if _is_late(link, measured):
            takes = seconds_text(link.latency_seconds)
            text = f"a message between {_names(link, ranks)} takes {takes}, and {typical} elsewhere"
            advice = (
                "Look at the way between these hosts: a detour, a full queue, or a processor that is busy."
            )
            found.append(warning("links", text, advice))
    worst = min(measured, key=lambda link: link.rate)
    text = (
        f"{mbit(worst.rate)} between {_names(worst, ranks)}, {seconds_text(worst.latency_seconds)} a message"
    )
    text = f"the worst of {len(measured)} pairs has {text}" if len(measured) > 1 else text
    found.append(ok("links", f"{text}: {meaning(worst.rate)}"))
    return found


def _slow(slow: Sequence[Link], measured: Sequence[Link], ranks: Mapping[int, Facts]) -> Iterator[Finding]:
    """Yield a finding for each host whose links are all slow, and for each other slow pair."""
    hosts = {rank for link in measured for rank in (link.a, link.b)}
    best = mbit(_good_rate(measured))
    guilty = set()
    for rank in sorted(hosts) if len(hosts) > 2 else ():
        own = [link for link in measured if rank in (link.a, link.b)]
        if own and all(link in slow for link in own):
            guilty.add(rank)
    if guilty and len(guilty) == len(hosts):
        rate = max(link.rate for link in slow)
        advice = "Use another interface or network: set GLOO_SOCKET_IFNAME."
        yield warning("links", f"every pair of hosts has {mbit(rate)} or less: {meaning(rate)}", advice)
        return
    for rank in sorted(guilty):
        own = [link for link in slow if rank in (link.a, link.b)]
        worst = min(own, key=lambda link: link.rate)
        text = f"the link of {ranks[rank].where} is slow: {mbit(worst.rate)} to another host, and {best} elsewhere"
        advice = (
            "Look at this host's cable, port and interface: its negotiated rate, errors, or other traffic."
        )
        yield warning("links", text, advice, rank)
    for link in slow:
        if link.a in guilty or link.b in guilty:
            continue
        if link.rate < _UNUSABLE_BYTES_PER_SECOND:
            text = f"{mbit(link.rate)} between {_names(link, ranks)}: {meaning(link.rate)}"
            advice = "Use another interface or network: set GLOO_SOCKET_IFNAME."
        else:
            text = f"{mbit(link.rate)} between {_names(link, ranks)}, and {best} elsewhere"
            advice = "Look at the switches and cables between these two hosts."
        yield warning("links", text, advice)


def _unreachable(links: Sequence[Link], ranks: Mapping[int, Facts]) -> Iterator[Finding]:
    """Yield for each address that another host cannot reach why: a wrong interface, or a blocked port."""
    wrong: dict[int, tuple[str, str]] = {}
    for link in links:
        for (asking, asked), attempts in link.attempts.items():
            failed = [one for one in attempts if one.answer is not Answer.YES]
            if not failed:
                continue
            if len(attempts) > len(failed):
                if not failed[0].address.startswith("127."):  # that of loopback is a finding of its own
                    wrong[asked] = failed[0].address, attempts[-1].address
                continue
            ports = ", ".join(
                f"{one.address}:{ranks[asked].network.ports.get(one.address, 0)} {one.answer.value}"
                for one in failed
            )
            advice = "Open all TCP ports between the hosts of the job: Gloo listens at ports that the system chooses."
            text = f"{ranks[asking].where} cannot connect to {ranks[asked].where}: {ports}"
            yield error("ports", text, advice, asking, asked)
    for rank, (address, reached) in wrong.items():
        interfaces = {each.address: each.name for each in ranks[rank].network.interfaces}
        name = interfaces.get(reached, "NAME")
        used = interfaces.get(address, "its interface")
        text = f"{ranks[rank].where}: other hosts cannot reach {address} of {used}, which Gloo uses, "
        text += f"and reach {reached} of {name}"
        yield error("interface", text, f"Set GLOO_SOCKET_IFNAME={name} on this host.", rank)


def _good(values: Sequence[float]) -> float:
    """Return the value that the largest quarter reaches: one bad host among four makes half of the pairs bad."""
    return sorted(values, reverse=True)[(len(values) - 1) // 4]


def _good_rate(links: Sequence[Link]) -> float:
    return _good([link.rate for link in links if link.is_measured])


def _good_latency(links: Sequence[Link]) -> float:
    return -_good([-link.latency_seconds for link in links if link.is_measured])


def _is_slow(link: Link, links: Sequence[Link]) -> bool:
    return link.rate < max(_SLOW_SHARE * _good_rate(links), _UNUSABLE_BYTES_PER_SECOND)


def _is_late(link: Link, links: Sequence[Link]) -> bool:
    return link.latency_seconds > max(_LATE_TIMES * _good_latency(links), _LATE_SECONDS)


def _names(link: Link, ranks: Mapping[int, Facts]) -> str:
    return f"{ranks[link.a].where} and {ranks[link.b].where}"


def mbit(bytes_per_second: float) -> str:
    """Return a rate for a reader."""
    rate = 8e-6 * bytes_per_second
    return (
        f"{rate / 1e3:.2f} Gbit/s"
        if rate >= 1000
        else f"{rate:.0f} Mbit/s"
        if rate >= 10
        else f"{rate:.2f} Mbit/s"
    )


def meaning(bytes_per_second: float) -> str:
    """Return what a rate means for a step of training: an exchange sends and receives about the gradients' size."""
    seconds = _GRADIENT_BYTES / bytes_per_second
    return f"100 MB of gradients take {seconds_text(seconds)} uncompressed and {seconds_text(seconds / 7.8)} at 4 bits"


def seconds_text(seconds: float) -> str:
    """Return a time for a reader."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
