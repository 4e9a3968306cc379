"""One rank gets SIGTERM at a random moment: all ranks read it after the same step, save, leave, and go on later."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sharded_models
import torch
from batch import on_ranks
from small_torch import NEAREST, backward, bits_of, hooked, initialised, net, optimized, shared_folder

import gradcomp.torch as gc
from gradcomp.job import preemption

STEPS = 24


@contextmanager
def job(*, handles: bool = True) -> Iterator[list[int]]:
    """A job of processes that were told nothing. Yields the signals that the program's own handler has got."""
    preemption.process.requested = False
    with initialised():
        got: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        if handles:
            gc.handle_preemption()
        yield got
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Run:
    """A model in training; ``answers`` has what ``preempted()`` said after every pass."""

    passes = 1

    def __init__(self, seed: int = 0) -> None:
        self.model, self.optimizer, self.state = self.make(net(seed))
        self.answers: list[bool] = []

    def make(self, model: torch.nn.Module) -> Any:
        raise NotImplementedError

    def step(self, step: int) -> None:
        for number in range(self.passes):
            backward(self.model, self.passes * step + number)
            self.answers.append(gc.preempted())
        self.optimizer.step()
        self.answers.append(gc.preempted())
        self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        return bits_of(self.model.parameters())

    def save(self, folder: Any) -> None:
        apart = {} if self.optimizer is self.state else {"optimizer": self.optimizer}
        gc.save(folder, self.state, model=self.model, **apart)

    def load(self, folder: Any) -> None:
        apart = {} if self.optimizer is self.state else {"optimizer": self.optimizer}
        gc.load(folder, self.state, model=self.model, **apart)


class Wrapped(Run):
    arguments: Any = {}

    def make(self, model: torch.nn.Module) -> Any:
        return optimized(model, NEAREST, options={"momentum": 0.9}, **self.arguments)


class Exact(Run):
    def make(self, model: torch.nn.Module) -> Any:
        return optimized(model)


class Accumulated(Wrapped):
    passes = 3
    arguments: Any = {"backward_passes_per_step": 3}

    def step(self, step: int) -> None:
        before = gc.preempted()
        super().step(step)
        assert self.answers[-4:-2] == [before, before], "a pass without an exchange changes nothing"


class Forward(Wrapped):
    arguments: Any = {"finish": "forward"}


class Skips(Wrapped):
    """Rank 0 gives up every third step, and the others skip it with it."""

    arguments: Any = {"on_skip": "agree"}

    def step(self, step: int) -> None:
        if step % 3 or gc.rank():
            super().step(step)
            return
        backward(self.model, step)
        self.optimizer.zero_grad()
        self.answers += [gc.preempted()] * 2


class Hooked(Run):
    def make(self, model: torch.nn.Module) -> Any:
        return hooked(model, NEAREST, options={"momentum": 0.9})


class Zero(Run):
    def make(self, model: torch.nn.Module) -> Any:
        optimizer = gc.ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        return model, optimizer, optimizer


class Sparse(Run):
    """All layers are sparse, so no exchange has headers."""

    def __init__(self, seed: int = 0) -> None:
        self.model = torch.nn.EmbeddingBag(50, 4, sparse=True)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = gc.DistributedOptimizer(optimizer, self.model.named_parameters())
        self.answers = []

    def step(self, step: int) -> None:
        rows = torch.randint(50, (3, 5), generator=torch.Generator().manual_seed(step + 100 * gc.rank()))
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        self.answers.append(gc.preempted())
        self.optimizer.zero_grad()


class Sharded(Run):
    def __init__(self, seed: int = 0) -> None:
        self.case = sharded_models.Case()
        self.trained = sharded_models.train(self.case, 0, sharded_models.COARSE)
        self.answers = []

    def step(self, step: int) -> None:
        sharded_models.go_on(self.trained, self.case, range(step, step + 1))
        self.answers.append(gc.preempted())


RESUMED = {
    "optimizer": Wrapped,
    "accumulated": Accumulated,
    "forward": Forward,
    "hook": Hooked,
    "exact": Exact,
}
KINDS = {**RESUMED, "skips": Skips, "zero": Zero, "sparse": Sparse, "fsdp": Sharded}


def interrupted(run: Run, told: set[int], name: str) -> int:
    """Train until all ranks are preempted, and return the number of steps; some get SIGTERM at a random moment."""
    drawn = random.Random(f"{name} {gc.size()}")
    begin, delay = drawn.randrange(2, 6), drawn.uniform(0, 0.005)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM))
    for step in range(STEPS):
        if step == begin and gc.rank() in told:
            timer.start()
        if step == begin + 10 and gc.rank() in told:
            timer.join()
        run.step(step)
        if gc.preempted():
            break
    assert gc.preempted()
    assert step >= begin
    assert run.answers == sorted(run.answers)
    everyone = gc.allgather_object(run.answers)
    assert everyone == [run.answers] * gc.size()
    return step + 1


def check(kind: str, told: set[int]) -> None:
    with job() as got:
        run = KINDS[kind]()
        done = interrupted(run, told, kind)
        assert len(got) == (gc.rank() in told)
        if kind not in RESUMED:
            return
        folder = shared_folder()
        run.save(folder)
    with job():
        resumed, whole = KINDS[kind](seed=9), KINDS[kind]()
        resumed.load(folder)
        for step in range(done, STEPS):
            resumed.step(step)
        for step in range(STEPS):
            whole.step(step)
        assert resumed.bits() == whole.bits()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_two_ranks_leave_after_the_same_step_and_go_on_bit_for_bit(kind):
    check(kind, {1})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_three_ranks_do_too(kind):
    check(kind, {0} if kind == "hook" else {2})


@on_ranks(3)
def test_all_may_get_the_signal():
    check("optimizer", {0, 1, 2})


@on_ranks(3)
def test_a_rank_that_has_joined_hears_of_it_in_join():
    with job():
        run = Wrapped()
        for step in range(6 if gc.rank() == 0 else 40):
            if step == 10 and gc.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step(step)
            if gc.preempted():
                break
        assert step == (5 if gc.rank() == 0 else 10)
        gc.join()
        assert gc.preempted()
        gc.broadcast_parameters(run.model.state_dict(), root_rank=1)
        run.save(shared_folder())


@on_ranks(3)
def test_exchanges_of_some_ranks_tell_nobody():
    """Else these ranks would leave, and the others would wait for them."""
    with job():
        some = optimized(net(), NEAREST, process_set=gc.ProcessSet([0, 1]))
        everyone = Wrapped()
        if gc.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        for step in range(3):
            backward(some[0], step)
            some[1].step()
            some[1].zero_grad()
            assert not gc.preempted()
        everyone.step(0)
        assert gc.preempted()


@on_ranks(2)
def test_one_rank_that_handles_the_signal_is_enough():
    with job(handles=gc.rank() == 1):
        run = Exact()
        if gc.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        run.step(0)
        assert run.answers == [True, True]


@on_ranks(2)
def test_the_next_job_of_the_same_processes_begins_anew():
    with job():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not gc.preempted()
        Exact().step(0)
        assert gc.preempted()
        gc.shutdown()
        with pytest.raises(gc.StateError, match="not initialised"):
            gc.preempted()
        gc.init(timeout_seconds=20.0, log_level="warning")
        assert not gc.preempted()


@on_ranks(1)
def test_a_world_of_one_knows_at_once():
    with job():
        run = Wrapped()
        run.step(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert gc.preempted()
        run.step(1)
        assert run.answers == [False, False, True, True]
