"""The engine without processes: ranks are threads, the transport is in memory."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_on_cpu.nccl import hosts_over_nccl, nccl_ranks
from culprits import culprits

from gradcomp import Config, LayerSpec, PlanMismatchError, Policy, Quantize, StateError, TransportError
from gradcomp.core.topology import Topology
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.members import place
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.thread import Engine, in_background, sleep_precisely
from gradcomp.exchange.watchdog import Answer, Watchdog
from gradcomp.reduce.header import APPLIED, DISCARDED
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel, LocalControl, StoreSilentError
from gradcomp.transport.inprocess import World

LAYERS = [LayerSpec("a", (40, 40), "float32"), LayerSpec("b", (30,), "float32")]


class Ranks:
    """N exchangers with engines of their own; ``each(f)`` calls ``f(rank, exchanger)`` on N threads.

    ``of(rank)`` are its settings. Ranks whose plans differ have errors in place of exchangers.
    """

    def __init__(
        self,
        size: int = 2,
        control: ControlChannel | None = None,
        connect: Callable[[int], Sequence[Transport]] = lambda size: World(size).transports(),
        bits: Sequence[int] = (4,) * 4,
        of: Callable[[int], Settings] = lambda rank: Settings(),
        **settings,
    ) -> None:
        control = control or LocalControl()
        self.pool = ThreadPoolExecutor(size)
        self.engines = [Engine() for _ in range(size)]
        self.watchdogs = [Watchdog(control, rank) for rank in range(size)]
        transports, config = connect(size), Config(**settings)

        def build(rank: int) -> Exchanger | PlanMismatchError:
            plan = Policy(Quantize(bits[rank])).plan(LAYERS)
            others = transports[rank], self.watchdogs[rank], config, lambda layer: 0, of(rank)
            try:
                return Exchanger(self.engines[rank], LAYERS, plan, *others)
            except PlanMismatchError as error:
                return error

        self.exchangers = list(self.pool.map(build, range(size)))

    def each(self, work: Callable[[int, Exchanger], object]) -> list[object]:
        return list(self.pool.map(work, range(len(self.exchangers)), self.exchangers))

    def errors(self, work: Callable[[int, Exchanger], object]) -> list[str]:
        def attempt(rank: int, exchanger: Exchanger) -> str:
            try:
                work(rank, exchanger)
            except TransportError as error:
                return str(error)
            return ""

        return self.each(attempt)

    def close(self) -> None:
        for one in (*self.engines, *self.watchdogs):
            one.stop()
        self.pool.shutdown()


@pytest.fixture
def ranks():
    made: list[Ranks] = []

    def make(*arguments, **settings) -> Ranks:
        made.append(Ranks(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def step(rank: int, exchanger: Exchanger) -> list[np.ndarray]:
    gradients = [np.full(layer.size, rank + 1.0, np.float32) for layer in LAYERS]
    exchanger.open()
    for i, gradient in enumerate(gradients):
        exchanger.pipeline.arrivals.submit(
            Submission(i, gradient.ctypes.data, gradient.ctypes.data, gradient)
        )
    exchanger.flush()
    exchanger.wait()
    exchanger.commit()
    return gradients


# ---------------------------------------------------------------------------------------- steps


def test_a_step_leaves_the_mean_in_every_ranks_outputs(ranks):
    for gradients in ranks(3).each(step):
        for gradient in gradients:
            np.testing.assert_allclose(gradient, 2.0, rtol=1e-5)


def test_a_step_over_nccl_leaves_the_same_bytes(ranks):
    found = [[g.tobytes() for g in rank] for rank in ranks(3, connect=nccl_ranks).each(step)]
    assert found == [[g.tobytes() for g in rank] for rank in ranks(3).each(step)]


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "does not come"])
def test_a_sum_inside_a_host_that_loses_a_rank_ends_on_all(ranks, dies: bool):
    def work(rank, exchanger):
        step(rank, exchanger)
        if rank != 3:
            step(rank, exchanger)
        elif dies:
            inside = exchanger._transport._local
            starts = inside._communicator.reduce
            inside._communicator.reduce = lambda *given: (starts(*given), inside.abandon())
            step(rank, exchanger)
        else:
            time.sleep(2.5)
            step(rank, exchanger)

    topology = Topology((0, 0, 1, 1))
    settings = {"of": lambda rank: Settings(topology=topology), "reduction": "hierarchical"}
    world = ranks(4, connect=lambda _: hosts_over_nccl(topology.hosts), timeout_seconds=1.0, **settings)
    *others, lost = world.errors(work)
    if dies:
        assert all("NCCL failed: rank 1 is gone" in text for text in (*others, lost))  # of the host's two
    else:
        assert all("rank 3 has only reached step 1" in text for text in others)
        assert lost.startswith("aborted: ")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")
def test_the_engines_sleeps_are_precise():
    def slack() -> int:
        return ctypes.CDLL(None).prctl(30)  # PR_GET_TIMERSLACK, in nanoseconds

    found = []
    thread = threading.Thread(target=lambda: (sleep_precisely(), found.append(slack())))
    thread.start()
    thread.join()
    assert found == [1000]
    assert slack() > 1000  # another thread's is its own


def test_a_step_without_any_layer_ends(ranks):
    def empty(rank, exchanger):
        exchanger.open()
        exchanger.flush()
        return exchanger.wait().present.any()

    assert ranks().each(empty) == [False, False]


def test_collectives_between_steps_come_in_rank_order(ranks):
    world = ranks(3)
    world.each(step)
    assert world.each(lambda rank, e: e.allgather_bytes(bytes([rank] * rank))) == [[b"", b"\1", b"\2\2"]] * 3


def test_many_steps_and_collectives_between_them_do_not_mix(ranks):
    def work(rank, exchanger):
        for number in range(100):
            step(rank, exchanger)
            total = np.array([rank + number], dtype=np.float64)
            exchanger.allreduce(total)
            assert total[0] == 1 + 2 * number
            assert exchanger.allgather_bytes(b"%d" % number) == [b"%d" % number] * 2

    ranks().each(work)


def test_a_fingerprint_names_the_layer_and_the_ranks(ranks):
    def work(rank, exchanger):
        exchanger._digests = lambda: in_background(lambda: Digests("crc32c", {"a": 7, "b": 8 + (rank == 2)}))
        step(rank, exchanger)  # before which there is nothing to compare
        with pytest.raises(StateError, match=r"after step 1 .* 'b' differs between rank 0 and rank 2"):
            step(rank, exchanger)

    ranks(3).each(work)


def test_ranks_that_did_not_all_apply_a_step_are_named(ranks):
    def work(rank, exchanger):
        step(rank, exchanger)
        exchanger.pipeline.outcome = DISCARDED if rank == 1 else APPLIED
        with pytest.raises(StateError, match=r"rank 0, 2 applied .*; rank 1 threw the means away"):
            step(rank, exchanger)

    ranks(3).each(work)


def test_a_vote_is_yes_if_all_say_yes(ranks):
    world = ranks(3)
    world.each(step)
    assert world.each(lambda rank, e: e.vote(True)) == [True] * 3
    assert world.each(lambda rank, e: e.vote(rank != 1)) == [False] * 3


# ---------------------------------------------------------------------------------------- failure


@pytest.mark.alone
def test_an_abort_is_raised_by_all_soon(ranks):
    def work(rank, exchanger):
        if rank == 1:
            exchanger.abort("enough")
            time.sleep(2)
            with pytest.raises(TransportError, match="enough"):
                exchanger.open()
        else:
            step(rank, exchanger)

    begin = time.monotonic()
    assert ranks().errors(work)[0] == "aborted: enough"
    assert time.monotonic() - begin < 5


def test_a_rank_that_aborted_gives_its_communicator_up(ranks, monkeypatch):
    two = ranks(2)
    ended = []
    for rank, exchanger in enumerate(two.exchangers):
        for how in ("close", "abandon"):
            monkeypatch.setattr(exchanger._transport, how, lambda r=rank, h=how: ended.append((r, h)))
    two.exchangers[0].abort("rank 0 ended with ValueError: no")
    two.exchangers[0].close()
    two.exchangers[1].close()
    assert ended == [(0, "abandon"), (1, "close")]


def test_after_a_failure_every_call_raises_the_same(ranks):
    world = ranks()
    world.exchangers[0].abort("enough")
    for _ in range(2):
        for text in world.errors(lambda rank, e: [step(rank, e) for _ in iter(int, 1)]):
            assert text == "aborted: enough"


def test_an_error_that_comes_while_a_step_is_opened_is_not_lost(ranks):
    """It may come between the check and the wait; the wait must end all the same."""
    world = ranks()
    exchanger = world.exchangers[0]
    opened = exchanger.pipeline.open

    def fail_meanwhile(*arguments):
        opened(*arguments)
        exchanger._progress.stop_with(TransportError("meanwhile"))

    exchanger.pipeline.open = fail_meanwhile
    exchanger.open()
    ended = threading.Event()

    def wait():
        with pytest.raises(TransportError, match="meanwhile"):
            exchanger.wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(10)


class Breaks:
    """A collective that fails after a while."""

    polls = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.polls > 3:
            raise TransportError("the wire broke")
        return False


def test_a_collective_that_fails_ends_the_step_and_closes_its_generator(ranks, monkeypatch):
    world = ranks()
    first = world.exchangers[0]
    monkeypatch.setattr(first._transport, "alltoallv", lambda *_: Breaks())
    here, there = world.errors(step)
    assert "the wire broke" in here
    assert there.startswith("aborted: ")
    assert first.pipeline._running.gi_frame is None


@pytest.mark.parametrize("between", [False, True], ids=["in a step", "between steps"])
def test_a_late_rank_is_named_at_the_deadline(ranks, between: bool):
    def work(rank, exchanger):
        step(rank, exchanger)
        if rank == 1:
            time.sleep(2.5)
        exchanger.allgather_bytes(b"") if between else step(rank, exchanger)

    first, second, third = ranks(3, timeout_seconds=1.0).errors(work)
    for text in (first, third):
        assert "rank 1 has only reached step 1" in text
        if not between:
            assert "rank 1 has only reached step 1, none of whose gradients has come" in text
            assert "step 1, bucket 0, round 0 (a, b)" in text
    assert second.startswith("aborted: ")


@pytest.mark.usefixtures("short_patience")
def test_ranks_that_ask_at_the_same_time_answer_each_other(ranks):
    def work(rank, exchanger):
        if rank == 3:
            world.watchdogs[rank].stop()  # dead
        else:
            step(rank, exchanger)

    world = ranks(4, timeout_seconds=1.0)
    for text in world.errors(work)[:3]:
        assert "no answer from rank 3 (" in text


class Broken(ControlChannel):
    def __init__(self, error: TransportError) -> None:
        self.error = error

    def publish(self, key, value):
        raise self.error

    def lookup(self, key):
        raise self.error


def test_a_store_that_does_not_answer_is_no_reason_to_stop(ranks):
    def work(rank, exchanger):
        for _ in range(3):
            step(rank, exchanger)
            time.sleep(0.6)  # the engine looks at the store meanwhile

    assert ranks(2, Broken(StoreSilentError("silence"))).errors(work) == ["", ""]


def test_a_store_that_is_gone_ends_a_step_under_way(ranks):
    def work(rank, exchanger):
        time.sleep(1.2)  # between steps it may be gone: so does an orderly end look
        if rank == 0:
            step(rank, exchanger)

    first, _ = ranks(2, Broken(TransportError("the store is gone"))).errors(work)
    assert "gone" in first


def test_a_stopped_engine_takes_no_exchanger(ranks):
    world = ranks()
    world.engines[0].stop()
    world.engines[0].stop()
    with pytest.raises(StateError, match="stopped"):
        world.engines[0].add(world.exchangers[0])


# ---------------------------------------------------------------------------------------- positions


#: Positions in the order in which a rank passes them, where bucket b is in its round r at tick b + r.
PASSED = [
    (3, -1, 0),  # between steps
    (3, -1, 1),  # the same, one collective later
    (3, 0, -1),
    (3, 0, 0),
    (3, 1, -1),  # the second bucket's gradients are awaited before the first bucket's second round
    (3, 1, 0),
    (3, 0, 1),
    (3, 1, 1),
    (4, -1, 0),
]


def is_behind(theirs, ours) -> bool:
    control = LocalControl()
    control.publish("at/1", Answer(1, "", {"x": theirs}).encode())
    return "rank 1 has only reached" in culprits(control, ours)


def test_a_rank_is_behind_if_it_has_not_issued_what_we_wait_for():
    for i, ours in enumerate(PASSED):
        others = sorted({0, max(i - 1, 0), i, min(i + 1, len(PASSED) - 1)})
        assert [is_behind(PASSED[k], ours) for k in others] == [k < i for k in others], ours


def test_a_position_in_words():
    assert place((3, -1, 0)) == "step 3, none of whose gradients has come"
    assert place((3, 2, -1)) == "step 3, bucket 2, whose gradients have not all come"
    assert place((3, 2, 1)) == "step 3, bucket 2, round 1"


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize(
    "answer",
    [b'{"not": "a position"}', b'[9, "", {"x": [' + b"9" * 5000 + b", 0, 0]}]"],
    ids=["wrong", "long"],
)
def test_an_answer_that_is_nonsense_is_no_answer(answer: bytes):
    control = LocalControl()
    control.publish("question", b"9" * 5000)
    control.publish("at/1", answer)
    assert "no answer from rank 1" in culprits(control, (0, 0, 0))


def test_ranks_that_differ_are_told_before_anything_is_exchanged(ranks):
    first, second = map(str, ranks(bits=[4, 2]).exchangers)
    assert first == second
    assert "compression of 'a'" in first
