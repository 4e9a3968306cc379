"""Examines a job: gathers the facts of its ranks, and has them measure their links and collectives.

**Roles.** Rank 0 conducts: it waits for the facts of all ranks, then publishes numbered orders, which the others
follow. An order is to measure pairs of hosts, to measure collectives, or to end. If rank 0 does not come, the first of
the others reports what there is.

**Ends.** Every wait has a deadline. A rank that is told to end reports nothing and ends with the same code; one that is
not told reports what it knows itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, TypeVar

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, TransportError, WireFormatError
from gradcomp.core.scheme import AUTO
from gradcomp.core.strings import printable
from gradcomp.core.topology import Topology
from gradcomp.doctor import checks, comparison, links, pairs, rates
from gradcomp.doctor.facts import Facts
from gradcomp.doctor.finding import Finding, Level, error, ok, worst
from gradcomp.doctor.links import Attempt, Door
from gradcomp.doctor.meeting import Meeting, meet, place_of
from gradcomp.doctor.pairs import Link, Pair
from gradcomp.doctor.reach import Answer
from gradcomp.job.launch import Launch
from gradcomp.job.network import make_transport
from gradcomp.job.state import Runtime

T = TypeVar("T")

_POLL_SECONDS, _POLLS_PER_SECOND = 0.02, 5000
#: An order, and what it asks for, take at most this long.
_ORDER_SECONDS = 60.0
#: The other rank of a pair says within this time whether it could connect.
_ANSWER_SECONDS = 15.0
#: Rank 0 waits so long for the others to read that the job ends.
_END_SECONDS = 5.0
_GROUP_SECONDS = 30.0
#: What answers at the address of the store, and is none, may keep a connection open without a word.
_OPENING_SECONDS = 10.0


class Job:
    """The examination of a job by one of its ranks. :meth:`run` fills the other attributes, which may be read any time.

    ``reports``: this rank prints; ``code``: that of the rank which prints, for those that do not.
    """

    def __init__(self, launch: Launch, own: Facts, seconds: float) -> None:
        self._launch, self._own, self._seconds = launch, own, seconds
        self._meeting: Meeting | None = None
        self._order = 0
        self._began = time.monotonic()
        self.doing = f"connecting to {place_of(launch)}"
        self.deadline = self._began + seconds + _OPENING_SECONDS
        self.facts: dict[int, Facts] = {own.rank: own}
        self.failures: list[str] = []
        self.measured_findings: list[Finding] = []
        self.links: list[Link] = []
        self.rates: list[rates.Rate] = []
        self.reports = True
        self.code: int | None = None
        self.has_met = False
        self.size = own.place.size
        self.is_complete = self.size == 1 and not own.place.problem

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.facts]

    def findings(self) -> list[Finding]:
        """Return all findings up to now."""
        ranks = [self.facts[rank] for rank in sorted(self.facts)]
        found = [*checks.check(ranks), *comparison.compare(ranks), *self.measured_findings]
        if self.has_met:
            waited = min(time.monotonic() - self._began, self._seconds)
            found.append(comparison.attendance(ranks, self.size, waited))
        advice = "Install one version of gradcomp on all hosts, and end what is left of earlier jobs."
        return found + [error("ranks", failure, advice) for failure in self.failures]

    def overdue(self) -> Finding:
        """Return what is wrong if this rank has not ended at :attr:`deadline`."""
        text = f"{self._own.where} did not get on with {self.doing}"
        if self._meeting is None:
            advice = "Set MASTER_PORT to a free port: what listens there may be no store of this job."
        else:
            advice = "Look at the hosts of the other ranks: one may be stopped, or its network gone."
        return error("meeting", text, advice, self._own.rank)

    def terminated(self) -> Finding:
        """Return that the launcher has ended this rank early."""
        advice = "Look at the output of the other ranks: a launcher ends all of them when one fails."
        return error("launcher", f"the launcher ended {self._own.where} while it was {self.doing}", advice)

    def run(self) -> None:
        """Meet, gather, measure. It raises nothing: what goes wrong is a finding."""
        network = self._own.network
        # The address that Gloo uses, then the one that leads to rank 0. One host needs no connection to another.
        outside = [each for each in (network.address, network.routed) if each and not each.startswith("127.")]
        try:
            with Door(() if self._launch.one_host else outside) as self._door:
                network = replace(network, ports=self._door.ports, token=self._door.token)
                self._own = self.facts[self._own.rank] = replace(self._own, network=network)
                self._run()
        except GradcompError as problem:
            advice = (
                "Look at the output of the other ranks: one ended, or stopped, while this one waited for it."
            )
            self.measured_findings.append(
                error("meeting", f"{self._own.where}: {problem}", advice, self._own.rank)
            )
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            text = f"{self._own.where} read in the job's store what no doctor writes ({problem!r:.80})"
            advice = "Keep other programs from the store: see who can connect to it."
            self.measured_findings.append(error("meeting", text, advice, self._own.rank))

    def finish(self, code: int) -> None:
        """Tell the others to end with this code, and wait until they have read it; or tell that this rank has."""
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            return
        control, own = meeting.control, self._own.rank
        with suppress(TransportError), closing(meeting):
            if self.reports:
                self._publish(control, {"end": code})
                others = [rank for rank in self.facts if rank != own]
                with suppress(TimeoutError):
                    for rank in others:
                        self._wait(lambda rank=rank: control.lookup(f"left/{rank}"), _END_SECONDS)  # type: ignore[misc]
            else:
                control.publish(f"left/{own}", b"1")

    def _run(self) -> None:
        met = meet(self._launch, self._own.where, self._seconds)
        if isinstance(met, Finding):
            self.measured_findings.append(met)
            return
        self._meeting = met
        self.deadline = time.monotonic() + 2 * self._seconds + _ORDER_SECONDS
        own = self._own.rank
        if met.control.lookup(f"facts/{own}") is not None:
            raise TransportError(f"another process says that it is rank {own}")
        met.control.publish(f"facts/{own}", self._own.to_json())
        if own == 0:
            self.has_met = True
            self._conduct(met)
        else:
            self._follow(met)

    def _wait(self, look: Callable[[], T | None], seconds: float) -> T:
        """Return what ``look`` finds; TimeoutError if it finds nothing in time."""
        deadline = time.monotonic() + seconds
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND))
        return found

    def _publish(self, control: Any, order: dict[str, Any]) -> None:
        control.publish(f"order/{self._order}", json.dumps(order).encode())
        self._order += 1

    # ---- the rank that conducts

    def _gather(self, meeting: Meeting, seconds: float) -> None:
        """Read the facts of the other ranks until all are there or time is up."""
        deadline = time.monotonic() + seconds
        while self.missing:
            for rank in self.missing:
                if (text := meeting.control.lookup(f"facts/{rank}")) is not None:
                    self._take(rank, text)
            if self.missing:
                names = ", ".join(map(str, self.missing[:8]))
                self.doing = f"waiting for rank {names}" + " and others" * (len(self.missing) > 8)
                if time.monotonic() > deadline:
                    return
                time.sleep(max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND))

    def _take(self, rank: int, text: bytes) -> None:
        try:
            facts = Facts.from_json(text)
            if facts.rank != rank:
                raise WireFormatError(f"rank {rank} says that it is rank {facts.rank}")
        except WireFormatError as problem:
            self.failures.append(f"rank {rank}: {printable(str(problem))}")
            facts = replace(
                Facts(protocol=-1), place=replace(self._own.place, rank=rank, host=f"of rank {rank}")
            )
        self.facts[rank] = facts

    def _conduct(self, meeting: Meeting) -> None:
        self._gather(meeting, self._seconds)
        ranks = [self.facts[rank] for rank in sorted(self.facts)]
        if self.missing or self.failures or not comparison.comparable(ranks):
            self.is_complete = not self.missing
            return
        self.measured_findings.append(ok("meeting", f"the ranks met through {place_of(self._launch)}"))
        leaders = [members[0].rank for members in comparison.hosts_of(ranks).values()]
        schedule = pairs.rounds(leaders)
        self.deadline = time.monotonic() + (2 * len(schedule) + 3) * _ORDER_SECONDS
        for number, each in enumerate(schedule):
            self.doing = f"measuring links between hosts: round {number + 1} of {len(schedule)}"
            self.links += self._order_pairs(meeting, each)
        for again in pairs.doubtful(self.links):  # what is slow only once is no finding
            self.doing = f"measuring again: ranks {again.a} and {again.b}"
            (second,) = self._order_pairs(meeting, [(again.a, again.b)])
            self.links[self.links.index(again)] = again.better(second)
        self.measured_findings += pairs.judge(self.links, self.facts)
        if worst(self.findings()) is Level.ERROR:
            found = "not measured, because an error was found before"
            self.measured_findings.append(ok("collectives", found))
        else:
            self.doing = "measuring an allreduce and an all-to-all"
            hosts = [facts.place.host for facts in ranks]
            self._publish(meeting.control, {"collectives": hosts})
            self.rates = self._collectives(meeting, hosts)
        self.is_complete = True

    def _order_pairs(self, meeting: Meeting, chosen: list[Pair]) -> list[Link]:
        number = self._order
        self._publish(meeting.control, {"pairs": chosen})
        self._pairs(meeting, number, chosen)
        return [self._result(meeting, number, pair) for pair in chosen]

    def _result(self, meeting: Meeting, number: int, pair: Pair) -> Link:
        a, b = pair
        attempts, told = {}, {}
        for rank, other in ((a, b), (b, a)):
            key, text = f"result/{number}/{rank}", b""
            try:
                text = self._wait(lambda key=key: meeting.control.lookup(key), _ORDER_SECONDS)  # type: ignore[misc]
                told[rank] = found = json.loads(text)
                attempts[rank, other] = [
                    Attempt(printable(str(address)), Answer[answer]) for address, answer in found["attempts"]
                ]
            except TimeoutError:
                raise TransportError(f"{self.facts[rank].where} did not measure its link in time") from None
            except (ValueError, KeyError, TypeError) as broken:
                raise WireFormatError(f"rank {rank} sent {text!r:.80} as a measured link") from broken
        problem = printable(str(told[a].get("problem") or told[b].get("problem") or ""))
        if problem or not all(isinstance(told[rank].get("rate"), float) for rank in pair):
            return Link(a, b, problem=problem, attempts=attempts)
        return Link(a, b, float(told[a]["latency"]), told[a]["rate"], told[b]["rate"], "", attempts)

    # ---- those that follow, and what all of them do

    def _follow(self, meeting: Meeting) -> None:
        self.doing = "waiting for rank 0"
        patience = self._seconds + _END_SECONDS
        while True:
            key = f"order/{self._order}"
            try:
                text = self._wait(lambda key=key: meeting.control.lookup(key), patience)  # type: ignore[misc]
            except TimeoutError:
                self._without_rank_0(meeting)
                return
            order = json.loads(text)
            number, self._order = self._order, self._order + 1
            self.deadline = time.monotonic() + 3 * _ORDER_SECONDS
            patience = 2 * _ORDER_SECONDS
            if "end" in order:
                self.code, self.reports = int(order["end"]), False
                return
            if "pairs" in order:
                self._pairs(meeting, number, [(int(a), int(b)) for a, b in order["pairs"]])
            else:
                with suppress(TransportError):  # rank 0 notices, too
                    self._collectives(meeting, [str(host) for host in order["collectives"]])

    def _without_rank_0(self, meeting: Meeting) -> None:
        """Report on the ranks that came, if this is the first of them but for rank 0, which gives no orders."""
        self.has_met = True
        self._gather(meeting, 0.0)
        came = self.facts.pop(0, None)
        if self._own.rank != min(self.facts):
            with suppress(TimeoutError):
                order = self._wait(lambda: meeting.control.lookup(f"order/{self._order}"), 2 * _END_SECONDS)
                self.code, self.reports = int(json.loads(order)["end"]), False
            return
        if came is not None:
            raise TransportError(f"{came.where} came, and gives no orders")

    def _pairs(self, meeting: Meeting, number: int, chosen: list[Pair]) -> None:
        """Take part in the pairs that this rank is in, and publish what was found."""
        own = self._own.rank
        for a, b in chosen:
            if own in (a, b):
                peer = b if own == a else a
                result = json.dumps(self._pair(meeting, number, peer))
                meeting.control.publish(f"result/{number}/{own}", result.encode())

    def _pair(self, meeting: Meeting, number: int, peer: int) -> dict[str, Any]:
        own, control = self._own.rank, meeting.control
        theirs = self.facts.get(peer)
        if theirs is None:  # only rank 0 has read all facts
            self._take(peer, self._wait(lambda: control.lookup(f"facts/{peer}"), _ANSWER_SECONDS))
            theirs = self.facts[peer]
        connection, attempts = links.knock(own, theirs.network)
        control.publish(f"knock/{number}/{own}", b"1" if connection else b"0")
        found: dict[str, Any] = {"attempts": [(one.address, one.answer.name) for one in attempts]}
        try:
            other = self._wait(lambda: control.lookup(f"knock/{number}/{peer}"), _ANSWER_SECONDS) == b"1"
            mine, came = (connection is not None), other
            # Both know which connections there are, and take that of the lower rank, if there is one.
            if mine and (own < peer or not came):
                chosen = connection
            elif came:
                chosen = self._door.take(peer, _ANSWER_SECONDS)
            elif attempts:
                return found
            else:
                return {**found, "problem": f"rank {peer} has no address that other hosts can reach"}
            assert chosen is not None
            measured = links.measure(chosen, leads=own < peer)
        except TimeoutError:
            return {**found, "problem": f"rank {peer} did not say whether it could connect"}
        except TransportError as problem:
            return {**found, "problem": str(problem)}
        finally:
            if connection is not None:
                connection.close()
        return {**found, "latency": measured.latency_seconds, "rate": measured.bytes_per_second}

    def _collectives(self, meeting: Meeting, hosts: list[str]) -> list[rates.Rate]:
        """Measure collectives over the transport that the settings name. ``hosts``: that of each rank. Collective."""
        try:
            network = meeting.network(_GROUP_SECONDS)
            config = replace(Config.resolve(), timeout_seconds=_GROUP_SECONDS)
            if config.transport == AUTO:
                config = replace(config, transport=network.engine)
            runtime = Runtime(self._launch, config, network)
            runtime.topology = Topology.of(hosts)
            transport = make_transport(runtime, runtime.everyone)
            try:
                found = rates.measure(transport)
            except BaseException:
                transport.abandon()
                raise
            transport.close()
            network.close()
        except GradcompError as problem:
            advice = "See whether the hosts can reach each other at any port on the interface in use."
            self.measured_findings.append(error("collectives", str(problem), advice))
            return []
        text = "; ".join(f"{one.collective} {pairs.mbit(one.sent_per_second)}" for one in found)
        self.measured_findings.append(ok("collectives", f"each rank sends over {config.transport}: {text}"))
        return found
