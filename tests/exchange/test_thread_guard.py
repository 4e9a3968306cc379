"""Whatever is raised on the engine's thread ends the exchange with a typed error on every rank, and hangs none."""

from __future__ import annotations

import preloaded
import pytest
from exchange.test_engine import ranks, step
from launching import run_ranks

from gradcomp import StateError, TransportError
from gradcomp.core.errors import GradcompError
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.watchdog import Answer
from gradcomp.transport.control import count_of, numbers_of

__all__ = ["ranks"]  # the fixture

PROGRAM = """
import logging, time
import torch
import gradcomp.torch as gc
from gradcomp.job import runtime

gc.init(timeout_seconds=60, stall_warning_seconds=1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step():
    opt.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()

step()
if gc.rank() == 1:
    control = runtime.current().make_control()
    for key in ("question", "at/0", "at/1", "exchanger/all-0/left"):
        control.publish(key, b"1" * 5000)
time.sleep(1.5)  # the engine looks at the store meanwhile
step()
print("went on", flush=True)

class Raises(logging.Handler):
    def emit(self, record):
        raise OSError("the log is full")

if gc.rank() == 0:
    logging.getLogger("gradcomp").addHandler(Raises())
else:
    time.sleep(3)
try:
    step()
except gc.GradcompError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def ended():
    return run_ranks(PROGRAM, 2, timeout=60, imported=preloaded.TORCH)


def test_a_long_number_in_the_store_is_ignored(ended):
    for end in ended:
        assert end.stdout.startswith("went on"), end.stderr[-3000:]


def test_a_log_handler_that_raises_ends_the_exchange_on_every_rank(ended):
    for end, kind in zip(ended, ("StateError", "TransportError"), strict=True):
        assert end.returncode == 0, end.stderr[-3000:]
        assert kind in end.stdout
        assert "OSError: the log is full" in end.stdout


# ---------------------------------------------------------------------------------------- in one process


class Listener:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def bucket_complete(self, bucket):
        raise self.error

    def failed(self, error):
        raise self.error


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("it cannot be said")


def exchange(rank: int, exchanger: Exchanger) -> GradcompError:
    try:
        while True:
            step(rank, exchanger)
    except GradcompError as error:
        return error


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom"), Unspeakable()])
def test_a_listener_that_raises_ends_the_exchange_on_every_rank(ranks, error):
    world = ranks(of=lambda rank: Settings(listener=None if rank else Listener(error)))
    first, second = world.each(exchange)
    assert isinstance(first, StateError)
    assert isinstance(second, TransportError)
    for raised in (first, second):
        assert type(error).__name__ in str(raised)


def test_a_wait_ends_when_the_engine_does(ranks):
    world = ranks(1)
    (exchanger,) = world.exchangers
    exchanger.open()
    world.engines[0].stop()
    with pytest.raises(StateError, match="the engine's thread has ended"):
        exchanger.wait()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"-1",
        b"1" * 16,
        b"1" * 5000,
        b"\xff",
        b"[" * 40,
        b"[" * 10**6,
        b"[1, 2]",
        b"[1, 2, 3.0]",
        b"[true, 2, 3]",
    ],
)
def test_what_is_no_number_in_the_store_is_none(value):
    assert count_of(value) == 0
    assert numbers_of(value, 3) is None
    assert Answer.parse(value) is None


def test_what_is_in_the_store_is_read():
    assert (count_of(None), count_of(b"12")) == (0, 12)
    assert numbers_of(b"[1, -2, 3]", 3) == [1, -2, 3]
    answer = Answer(3, "allreduce, call 1", {"user/all": (1, -1, 0), "exchanger/all-0": (2, 0, 1)})
    assert Answer.parse(answer.encode()) == answer


@pytest.mark.parametrize(
    "value",
    [
        b'["1", "", {}]',
        b'[-1, "", {}]',
        b"[1, 2, {}]",
        b'[1, "", []]',
        b'[1, "", {"x": [1, 2]}]',
        b'[1, "", {"x": [1, 2, 3.0]}]',
        b'[1, "", {"x": [1, 2, %s]}]' % (b"9" * 4000),
        b'[1, "%s", {}]' % (b"x" * 10**5),
    ],
)
def test_what_is_no_answer_is_none(value):
    assert Answer.parse(value) is None
