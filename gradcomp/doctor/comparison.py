"""Compares what the ranks of a job told of themselves."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from gradcomp.doctor.facts import PROTOCOL, Facts, Interface
from gradcomp.doctor.finding import Finding, error, ok, ranks_text, warning

#: Another interface is worth a warning if its driver names a rate this many times as high.
_FASTER = 4


def compare(ranks: Sequence[Facts]) -> list[Finding]:
    """Return what differs among the ranks that came."""
    found = [*_versions(ranks)]
    found += _settings(ranks)
    if len(ranks) > 1:
        found += _hosts(ranks)
        found += _interfaces(ranks)
    return found


def comparable(ranks: Sequence[Facts]) -> bool:
    """Return whether the doctors of these ranks understand each other."""
    return all(facts.protocol == PROTOCOL for facts in ranks)


def hosts_of(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Return the ranks of each host, as the launcher names it."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for facts in ranks:
        found[facts.place.host].append(facts)
    return found


def attendance(ranks: Sequence[Facts], size: int, waited_seconds: float) -> Finding:
    """Return which ranks came within this time."""
    there = {facts.rank for facts in ranks}
    missing = [rank for rank in range(size) if rank not in there]
    if not missing:
        hosts = len(hosts_of(ranks))
        return ok("ranks", f"all {size} ranks came, on {hosts} host{'s' * (hosts > 1)}")
    names = ranks_text(missing, 0)
    return error(
        "ranks",
        f"rank {names} of {size} did not come within {waited_seconds:.0f} s",
        f"Look at the output of rank {names}: there is none if it was not started, and a rank that runs says there "
        "which address it could not reach.",
        *missing,
    )


def _by_value(ranks: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for facts in ranks:
        found[value(facts)].append(facts.rank)
    return found


def _said(by_value: dict[str, list[int]]) -> str:
    return "; ".join(f"{value} on rank {ranks_text(numbers, 0)}" for value, numbers in by_value.items())


def _versions(ranks: Sequence[Facts]) -> Iterator[Finding]:
    own = _by_value(ranks, lambda facts: f"gradcomp {facts.gradcomp}, wire protocol {facts.wire}")
    if len(own) > 1:
        advice = (
            "Install the same version of gradcomp on every host: ranks of different versions refuse to start."
        )
        yield error("versions", _said(own), advice)
    else:
        yield ok("versions", next(iter(own)), *(facts.rank for facts in ranks))
    libraries = dict.fromkeys(name for facts in ranks for name in facts.libraries)
    alike = []
    for library in libraries:
        versions = _by_value(ranks, lambda facts, name=library: facts.libraries.get(name, "missing"))  # type: ignore[misc]
        if len(versions) > 1:
            advice = f"Install the same version of {library} on every host: results and protocols may differ."
            yield warning("libraries", f"{library}: {_said(versions)}", advice)
        else:
            alike.append(f"{library} {next(iter(versions))}")
    if alike:
        yield ok("libraries", ", ".join(alike), *(facts.rank for facts in ranks))


def _settings(ranks: Sequence[Facts]) -> Iterator[Finding]:
    readable = [facts for facts in ranks if not facts.settings.problem]
    values = {name for facts in readable for name in facts.settings.shared}
    for name in ("transport", *sorted(values)):
        if name == "transport":
            by_value = _by_value(readable, lambda facts: f"transport={facts.settings.transport}")
        else:
            by_value = _by_value(readable, lambda f, n=name: f"{n}={f.settings.shared.get(n, 'missing')}")  # type: ignore[misc]
        if len(by_value) > 1:
            advice = f"Set GRADCOMP_{name.upper()} to one value on all ranks."
            yield error("settings", _said(by_value), advice)
    secrets = _by_value(ranks, lambda facts: "set" if facts.settings.has_secret else "not set")
    if len(secrets) > 1:
        advice = "Set GRADCOMP_SECRET to the same text on all ranks."
        yield error("secret", f"GRADCOMP_SECRET: {_said(secrets)}", advice)
    elif len(hosts_of(ranks)) > 1:
        signed = "GRADCOMP_SECRET signs what the ranks publish"
        yield ok("secret", signed if "set" in secrets else "GRADCOMP_SECRET is not set: nothing is signed")


def _hosts(ranks: Sequence[Facts]) -> Iterator[Finding]:
    by_host = hosts_of(ranks)
    for host, members in by_host.items():
        if len({facts.network.boot for facts in members}) > 1:
            numbers = ranks_text([facts.rank for facts in members], 0)
            found = f"ranks {numbers} are on several machines of the name {host}"
            advice = "Give every host a name of its own: gradcomp takes these ranks for ranks of one host."
            yield error("hosts", found, advice)
    by_machine: dict[str, list[str]] = defaultdict(list)
    for host, members in by_host.items():
        by_machine[members[0].network.boot].append(host)
    for hosts in by_machine.values():
        if len(hosts) > 1 and len(by_host) > 1:
            yield ok("hosts", f"{len(hosts)} hosts are containers of one machine, whose cores they share")


def _interfaces(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Yield what the hosts' interfaces have in common: sizes of packets, and a faster network that nobody uses."""
    leaders = [members[0] for members in hosts_of(ranks).values()]
    if len(leaders) < 2:
        return
    used = {facts.rank: _used(facts) for facts in leaders}
    known = [facts for facts in leaders if used[facts.rank] is not None]
    sizes = _by_value(known, lambda facts: str(getattr(used[facts.rank], "mtu", 0)))
    if len(sizes) > 1:
        advice = (
            "Give the interfaces one MTU: large messages may stop where a router does not report their size."
        )
        yield warning("interface", f"the MTU differs: {_said(sizes)}", advice)
    rate = min((each.mbit for each in used.values() if each is not None and each.mbit > 0), default=0)
    for networks in _common(leaders):
        names = sorted({each.name for each in networks})
        if rate and min(each.mbit for each in networks) >= _FASTER * rate:
            faster = min(each.mbit for each in networks)
            found = f"{' and '.join(names)} connects all hosts at {faster} Mbit/s, and the interface in use has {rate}"
            advice = f"Set GLOO_SOCKET_IFNAME={names[0]} on every host."
            yield warning("interface", found, advice)


def _used(facts: Facts) -> Interface | None:
    network = facts.network
    return next((each for each in network.interfaces if each.address == network.address), None)


def _common(leaders: Sequence[Facts]) -> Iterator[list[Interface]]:
    """Yield the real interfaces other than those in use that are on one network of 256 addresses on all hosts."""
    by_network: dict[str, dict[int, Interface]] = defaultdict(dict)
    for place, facts in enumerate(leaders):
        for each in facts.network.interfaces:
            if each.is_hardware and each.address != facts.network.address:
                try:
                    network = ipaddress.ip_network(f"{each.address}/24", strict=False)
                except ValueError:
                    continue
                by_network[str(network)][place] = each
    for found in by_network.values():
        interfaces = list(found.values())
        if len(interfaces) == len(leaders) == len({each.address for each in interfaces}):
            yield interfaces
