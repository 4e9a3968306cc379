"""What handle_preemption does to this process's signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from gradcomp import ConfigError, StateError
from gradcomp.job import preemption
from gradcomp.job.preemption import handle_preemption, restore


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """Signals as they were, and a process that was told nothing."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    restore()
    for number, handler in before.items():
        signal.signal(number, handler)
    preemption.process.requested = False


def told(number: int = signal.SIGUSR1) -> bool:
    os.kill(os.getpid(), number)
    return preemption.process.requested


def test_the_programs_own_handlers_are_called_as_well():
    calls: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append("before"))
    handle_preemption(signal.SIGUSR1)
    handle_preemption(signal.SIGUSR1)
    assert told()
    assert calls == ["before"]
    found = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *given: (calls.append("after"), found(*given)))
    handle_preemption(signal.SIGUSR1)
    preemption.process.requested = False
    assert told()
    assert calls == ["before", "after", "before"]


def test_a_handler_that_raises_decides():
    def leave(*_: object) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGUSR1, leave)
    handle_preemption(signal.SIGUSR1)
    with pytest.raises(SystemExit):
        told()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_default_meanings_are_not_carried_out(number: int):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    handle_preemption(*[] if number == signal.SIGTERM else [number])
    assert told(number)


def test_signals_are_given_back_unless_another_handler_has_taken_them():
    ours, later = (lambda *_: None), (lambda *_: None)
    signal.signal(signal.SIGUSR1, ours)
    handle_preemption(signal.SIGUSR1, signal.SIGTERM)
    signal.signal(signal.SIGTERM, later)
    restore()
    assert signal.getsignal(signal.SIGUSR1) is ours
    assert signal.getsignal(signal.SIGTERM) is later


def test_a_forked_child_can_be_terminated():
    handle_preemption()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM
    assert not preemption.process.requested


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0, 1000, "SIGTERM", [15]])
def test_what_cannot_be_handled_is_refused(number):
    with pytest.raises(ConfigError, match="signals that a process can handle"):
        handle_preemption(signal.SIGUSR1, number)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_that_python_cannot_call_is_refused(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        with pytest.raises(StateError, match="not installed from Python"):
            handle_preemption()


def test_other_threads_are_refused():
    refused: list[type[BaseException]] = []

    def call() -> None:
        try:
            handle_preemption(signal.SIGUSR1)
        except StateError as error:
            refused.append(type(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert refused == [StateError]
