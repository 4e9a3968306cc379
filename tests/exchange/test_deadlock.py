"""The proof that ranks wait for each other: against programs that are played out, and graphs written by hand."""

from __future__ import annotations

import _thread
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from gradcomp.exchange.deadlock import Begun, Callers, Need, Snapshot, deadlock
from gradcomp.exchange.watchdog import Answer

ALL, PAIR = (0, 1, 2), (0, 1)


# ---------------------------------------------------------------------------------------- programs played out


@dataclass
class Rank:
    """A program of operations: ``(kind, scope, name)``."""

    program: list[tuple[str, str, str]]
    at: int = 0
    waits: tuple[str, str, int] | None = None  # scope, name, which of that name (or of the scope's steps)
    begun: dict[tuple[str, str], int] = field(default_factory=dict)
    outstanding: dict[str, list[str]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


class Job:
    """Ranks that run at random speeds; scopes whose name begins with "step" are optimizers, the others channels."""

    def __init__(
        self, programs: list[list[tuple[str, str, str]]], members: dict[str, tuple[int, ...]]
    ) -> None:
        self.ranks = [Rank(program) for program in programs]
        self.members = members
        self.log: dict[str, list[str]] = {scope: [] for scope in members}

    def moves(self) -> Iterator[tuple[str, int, str]]:
        for number, rank in enumerate(self.ranks):
            if rank.waits is None:
                if rank.at < len(rank.program):
                    yield "run", number, ""
            elif self.ended(rank):
                yield "wake", number, ""
            for scope, log in self.log.items():
                if number in self.members[scope] and rank.made.get(scope, 0) < len(log):
                    yield "deliver", number, scope

    def ended(self, rank: Rank) -> bool:
        scope, name, which = rank.waits or ("", "", 0)
        if scope.startswith("step"):
            return all(self.ranks[m].begun.get((scope, ""), 0) >= which for m in self.members[scope])
        return self.log[scope][: rank.made.get(scope, 0)].count(name) >= which

    def do(self, move: tuple[str, int, str]) -> None:
        what, number, scope = move
        rank = self.ranks[number]
        if what == "wake":
            rank.waits = None
        elif what == "deliver":
            rank.outstanding[scope].remove(self.log[scope][rank.made.get(scope, 0)])
            rank.made[scope] = rank.made.get(scope, 0) + 1
        else:
            kind, scope, name = rank.program[rank.at]
            rank.at += 1
            if kind in ("call", "begin"):
                rank.begun[scope, name] = rank.begun.get((scope, name), 0) + 1
                rank.outstanding.setdefault(scope, []).append(name)
                self._match(scope, name)
            if kind == "step":
                rank.begun[scope, name] = rank.begun.get((scope, name), 0) + 1
            if kind != "begin":
                rank.waits = scope, name, rank.begun.get((scope, name), 0)

    def _match(self, scope: str, name: str) -> None:
        counts = [self.ranks[m].begun.get((scope, name), 0) for m in self.members[scope]]
        while self.log[scope].count(name) < min(counts):
            self.log[scope].append(name)

    def snapshots(self) -> dict[int, Snapshot]:
        return {number: self.snapshot(rank) for number, rank in enumerate(self.ranks)}

    def snapshot(self, rank: Rank) -> Snapshot:
        begun = {
            scope: Begun(rank.begun.get((scope, ""), 0))
            if scope.startswith("step")
            else Begun(rank.made.get(scope, 0), tuple((name, 0) for name in rank.outstanding.get(scope, ())))
            for scope in self.members
        }
        need = None
        if rank.waits is not None and not self.ended(rank):
            scope, name, which = rank.waits
            key, number = (None, which) if scope.startswith("step") else ((name, 0), begun[scope].number)
            need = Need(scope, self.members[scope], number, key, f"{scope} {name}")
        left = rank.waits is None and rank.at == len(rank.program)
        return Snapshot(0, need, begun, left)


def drawn(seed: int) -> Job:
    """Three ranks whose programs are alike, but for what was left out or swapped here and there."""
    draw = random.Random(seed)
    members = {"step": ALL, "step of two": PAIR, "all": ALL, "pair": PAIR}
    common: list[tuple[str, str, str]] = []
    for _ in range(draw.randint(2, 7)):
        scope = draw.choice(list(members))
        if scope.startswith("step"):
            common.append(("step", scope, ""))
            continue
        name = draw.choice("xyz") + str(len(common))
        common.append((draw.choice(["call", "begin"]), scope, name))
        if common[-1][0] == "begin":
            common.append(("wait", scope, name))
    programs = []
    for rank in range(3):
        program = [op for op in common if rank in members[op[1]]]
        if draw.random() < 0.4 and program:
            del program[draw.randrange(len(program))]
        if draw.random() < 0.4 and len(program) > 1:
            place = draw.randrange(len(program) - 1)
            program[place : place + 2] = program[place + 1], program[place]
        begun: set[tuple[str, str]] = set()
        runs = []
        for kind, scope, name in program:  # a handle that does not exist is not waited for
            if kind != "wait" or (scope, name) in begun:
                runs.append((kind, scope, name))
            begun.add((scope, name))
        programs.append(runs)
    return Job(programs, members)


@pytest.mark.parametrize("part", range(4))
def test_a_proof_is_found_if_and_only_if_no_program_ever_goes_on(part: int) -> None:
    outcomes = set()
    for seed in range(part * 150, (part + 1) * 150):
        job, draw = drawn(seed), random.Random(-1 - seed)
        found, places = None, None
        while moves := list(job.moves()):
            if found is None and (found := deadlock(job.snapshots())) is not None:
                places = [rank.at for rank in job.ranks]
            job.do(draw.choice(moves))
        if found is not None:
            assert places == [rank.at for rank in job.ranks], (seed, found)
        stuck = any(not snapshot.left for snapshot in job.snapshots().values())
        assert (deadlock(job.snapshots()) is not None) == stuck, seed
        outcomes.add(stuck)
    assert outcomes == {False, True}


# ---------------------------------------------------------------------------------------- graphs


def in_step(number: int = 3, calls: Begun | None = None) -> Snapshot:
    """In an optimizer's step of all three ranks."""
    begun = {"step": Begun(number), "all": calls or Begun(0)}
    return Snapshot(9, Need("step", ALL, number, where=f"step {number}"), begun)


def in_call(name: str | None, made: int = 0, steps: int = 2, also: tuple[str, ...] = ()) -> Snapshot:
    """In a call of all three ranks, after ``steps``; calls ``also`` are outstanding."""
    keys = ((name, 0), *((other, 0) for other in also))
    return Snapshot(
        9,
        Need("all", ALL, made, (name, 0), f"allreduce {name!r}"),
        {"step": Begun(steps), "all": Begun(made, keys)},
    )


def test_a_call_on_one_rank_and_a_step_on_the_others_is_a_deadlock() -> None:
    text = deadlock({0: in_call(None), 1: in_step(), 2: in_step()}, lambda ranks: f"ranks {ranks}")
    assert text is not None
    assert "ranks [0] waits in allreduce None; ranks [1, 2] wait in step 3." in text


HEALTHY = {
    "a rank computes": {0: in_step(), 1: in_step(), 2: replace(in_call(None), need=None)},
    "all are in the same step": {rank: in_step() for rank in range(3)},
    "all are in the same call": {rank: in_call("x") for rank in range(3)},
    "one is a step ahead": {0: in_step(4), 1: in_step(), 2: in_step()},
    "one has made the call, the others have its last bytes on the way": {
        0: in_step(3, Begun(1)),
        1: in_call("x"),
        2: in_call("x"),
    },
    "the call is outstanding where a rank waits for another": {
        0: in_call("x", also=("y",)),
        1: in_call("y", also=("x",)),
        2: in_call("x", also=("y",)),
    },
    "a call that all have begun is waited for, beside a step that one lacks": {
        0: in_step(3, Begun(0, (("x", 0),))),
        1: in_step(3, Begun(0, (("x", 0),))),
        2: in_call("x"),
    },
    "one of them does not know what it lacks itself": {
        0: replace(in_step(), begun={"step": Begun(2)}),
        1: in_call(None),
        2: in_call(None),
    },
    "all have left": {rank: replace(in_step(), left=True) for rank in range(3)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_where_a_rank_may_go_on_there_is_no_proof(name: str) -> None:
    assert deadlock(HEALTHY[name]) is None


def test_neither_other_calls_nor_a_rank_that_has_left_prevent_a_proof() -> None:
    others = Begun(0, (("y", 0),))
    assert deadlock({0: in_call("x"), 1: in_step(3, others), 2: in_step(3, others)}) is not None
    gone = Snapshot(9, None, {"step": Begun(2), "all": Begun(0)}, left=True)
    assert deadlock({0: in_step(), 1: in_call("x"), 2: gone}) is not None
    finished = replace(gone, begun={"step": Begun(3), "all": Begun(1)})  # what it has begun counts
    assert deadlock({0: in_step(), 1: in_step(), 2: finished}) is None


def test_a_circle_of_process_sets_is_a_deadlock_and_a_chain_is_none() -> None:
    def waits(pair: tuple[int, int]) -> Snapshot:
        return Snapshot(1, Need(str(pair), pair, 0, ("x", 0), str(pair)), {str(pair): Begun(0, (("x", 0),))})

    assert deadlock({0: waits((0, 1)), 1: waits((1, 2)), 2: waits((0, 2))}) is not None
    assert deadlock({0: waits((0, 1)), 1: waits((1, 2)), 2: waits((1, 2))}) is None


def test_an_account_survives_the_way_to_another_rank_and_a_broken_one_is_no_answer() -> None:
    account = in_call("x", also=("y",))
    sent = Answer(3, "allreduce", {"all": (1, -1, 0)}, account).encode()
    received = Answer.parse(sent)
    assert received is not None
    assert received.snapshot == account
    assert Answer.parse(sent.replace(b'"x", 0', b'"x", -1')) is None
    huge = replace(account, begun={"all": Begun(0, tuple((f"{i:0>100}", 0) for i in range(1000)))})
    assert Answer.parse(Answer(3, "", {}, huge).encode()) == Answer(3, "", {})


# ---------------------------------------------------------------------------------------- threads


def test_what_the_only_live_thread_that_has_called_waits_for_is_known() -> None:
    callers, what = Callers(), object()
    with callers.waiting(what):
        assert callers.only() is what
        assert callers.waited >= 0
    assert callers.only() is None
    assert callers.calls == 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(callers.came).result()
        with callers.waiting(what):  # another thread may call what is missing
            assert callers.only() is None
    with callers.waiting(what):  # that thread has ended
        assert callers.only() is what


def test_threads_that_wait_for_different_things_are_no_single_program() -> None:
    callers, done, inside = Callers(), threading.Event(), threading.Event()

    def wait() -> None:
        with callers.waiting(object()):
            inside.set()
            done.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait)
        inside.wait()
        with callers.waiting(object()):
            assert callers.only() is None
        done.set()


def test_a_graphs_op_waits_for_the_program_only_if_that_runs_the_graph() -> None:
    """Ops run on threads that are not Python's: here on one that the module threading does not know."""
    callers, what = Callers(), object()
    ended, inside, computes, runs = (threading.Event() for _ in range(4))
    module: dict[str, object] = {"__name__": "tensorflow.python.eager.execute"}
    exec("def run(graph):\n    graph()", module)
    graph = threading.Lock()
    graph.acquire()

    def op() -> None:
        with callers.waiting(what):
            inside.set()
            ended.wait()

    def program() -> None:
        callers.came()
        computes.wait()
        runs.set()
        module["run"](graph.acquire)  # type: ignore[operator]

    thread = threading.Thread(target=program)
    thread.start()
    _thread.start_new_thread(op, ())
    inside.wait()
    assert callers.only() is None  # the program may call something meanwhile
    computes.set()
    runs.wait()
    deadline = time.monotonic() + 10
    while callers.only() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert callers.only() is what
    graph.release()
    thread.join()
    ended.set()
