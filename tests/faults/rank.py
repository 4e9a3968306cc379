"""What the programs of all stacks have in common: who this rank is, what it says, and how it fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from faults.draw import MESSAGES, Trial

_DROP = 2  # TC_ACT_SHOT
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_RANDOM


class InjectedFault(Exception):
    """The fault of a trial."""


class Rank:
    """One rank of a trial."""

    def __init__(self) -> None:
        self.trial = Trial(**json.loads(os.environ["TRIAL"]))
        self.number = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
        self.is_victim = self.number == self.trial.victim
        self.step = 0
        self.history: list[str] = []
        self._done = False
        self._until = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """For ``init``: buckets of a few layers, and little patience."""
        transport = {"shm": "shm", "mpi": "mpi", "keras": "mpi"}.get(self.trial.stack, "torch")
        return {
            "timeout_seconds": self.trial.timeout_seconds,
            "stall_warning_seconds": 1.0,
            "log_level": "warning",
            "slice_elements": 64,
            "reduction": self.trial.reduction,
            "transport": transport,
        }

    def compression(self, gc: Any) -> dict[str, Any]:
        """Arguments for the wrapper: every layer is compressed, however small."""
        name = self.trial.compression
        if self.fails("other compression"):
            name = "quantize:bits=2" if name != "topk:density=0.1" else "topk:density=0.3"
        every = gc.Filter(min_elements=1)
        if name != "lgreco":
            return {"compression": gc.Policy(name, filter=every)}
        return {
            "compression": gc.Policy("quantize:bits=4", filter=every),
            "controller": gc.LGreCo(every_steps=3),
        }

    # -- what it says -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """An error is said as an event, and goes its way."""
        try:
            yield
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            typed = "GradcompError" in kinds
            self.say(event="error", kind=kinds[0], typed=typed, text=str(error)[:600], history=self.history)
            raise
        self.say(event="end", history=self.history)

    def say(self, **what: Any) -> None:
        """One line of JSON."""
        print(json.dumps(dict(what, at=time.time(), step=self.step)), flush=True)

    def applied(self, parameters: Iterable[np.ndarray]) -> None:
        """One more step was applied: keep its digest."""
        digest = hashlib.sha256()
        for values in parameters:
            digest.update(np.ascontiguousarray(values).tobytes())
        self.history.append(digest.hexdigest()[:16])

    # -- how it fails -------------------------------------------------------------------------------------------

    def fails(self, *faults: str) -> bool:
        """Whether this rank has one of these faults, which last for the whole run."""
        return self.is_victim and self.trial.fault in faults

    def does(self, *faults: str) -> bool:
        """Whether this rank has one of these faults in this step."""
        return self.fails(*faults) and self.step == self.trial.step

    def has_begun(self, *faults: str) -> bool:
        """Whether this rank has one of these faults, in this step or an earlier one."""
        return self.fails(*faults) and self.step >= self.trial.step

    def tamper(self) -> None:
        """Change a message of the step, if that is the fault: one that arrives, or one that is about to leave.

        What its sender alters may be the same for all who get it, or, in every other trial, for the victim alone.
        """
        if not self.fails(*MESSAGES):
            return
        from gradcomp.kernels.reference_headers import FIXED
        from gradcomp.reduce.header import BucketFlags, Headers

        read, write = Headers.read, Headers.write
        seen: list[bytes] = []  # what has arrived in this step
        passed = self.trial.seed % 3  # so many messages are left as they are

        def strikes() -> bool:
            nonlocal passed
            if self._done or self.step != self.trial.step:
                return False
            passed -= 1
            if passed < 0:
                self._done = True
                self.say(event="fault")
            return self._done

        def flip(buffer: np.ndarray) -> None:
            at = self.trial.seed * 7919 % max(len(buffer), 1)
            buffer[at : at + 1] ^= 1 << self.trial.seed % 8

        def payload(headers: Any, i: int) -> np.ndarray:
            begin = headers._header.nbytes
            return headers._buffers[i][begin:][: int(headers._fields["payload_bytes"][i])]

        def arrives(headers: Any, i: int, header_id: Any, round_number: int) -> None:
            whole = headers._buffers[i][: headers._lengths[i]]
            if self.trial.fault == "message altered" and strikes():
                flip(whole)
            if self.trial.fault == "message misdelivered" and self.step == self.trial.step:
                own = whole.tobytes()
                others = [other for other in seen if len(other) == len(own) and other != own]
                seen.append(own)
                if others and strikes():
                    whole[:] = np.frombuffer(others[-1], np.uint8)
            if self.trial.fault == "message altered by its sender" and self.trial.seed % 2 and strikes():
                flip(payload(headers, i))
                fixed = whole[: FIXED.itemsize].copy().view(FIXED)[0]
                states = whole[FIXED.itemsize :][: int(fixed["layers"]) + 1].copy()
                sender = headers.senders[i]
                again = Headers(headers._header, [(whole, headers._chunks[i], sender)])
                write(again, header_id, round_number, BucketFlags(states, sender, int(fixed["fingerprint"])))

        def reads(headers: Any, header_id: Any, round_number: int, *rest: Any) -> Any:
            for i in range(len(headers._buffers)):
                arrives(headers, i, header_id, round_number)
            return read(headers, header_id, round_number, *rest)

        def writes(headers: Any, *rest: Any) -> Any:
            for i in range(len(headers._buffers)):
                if (
                    self.trial.fault == "message altered by its sender"
                    and not self.trial.seed % 2
                    and strikes()
                ):
                    flip(payload(headers, i))
            return write(headers, *rest)

        Headers.read, Headers.write = reads, writes  # type: ignore[method-assign]

    def outlive_launcher(self) -> bool:
        """Whether this is a rank whose launcher is dead, and which is to go on: a tenth of a second is over then."""
        if self.trial.fault != "launcher killed" or self.step < self.trial.step:
            return False
        if not self._done:
            self._done, self._until = True, time.monotonic() + 25.0
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.1)
        return time.monotonic() < self._until

    def at(self, moment: str) -> None:
        """The program is at this moment of a step: fail if it is time."""
        trial = self.trial
        timer = moment == "forward" and trial.moment == "timer"
        if self._done or self.step != trial.step or (moment != trial.moment and not timer):
            return
        if trial.fault == "exception in a logging handler":
            self._done = True
            if self.is_victim:
                logging.getLogger("gradcomp").addHandler(_Raising())
            elif self.number == (trial.victim + 1) % 3:
                time.sleep(trial.stopped_seconds)  # the others warn about it
            return
        if not self.is_victim or trial.fault not in _ACTIONS:
            return
        self._done = True
        self.say(event="fault")
        _ACTIONS[trial.fault](trial.delay if timer else 0.0)


class _Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise InjectedFault("a logging handler raises")


def _beside(script: str) -> None:
    """Run a shell script that this rank does not wait for."""
    nothing = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", script], stdin=nothing, stdout=nothing, stderr=nothing)


def _signal(number: int, seconds: float = 0.0) -> Any:
    """Send itself a signal, here or after a delay; one that stops it is followed by SIGCONT."""

    def send(delay: float) -> None:
        own = os.getpid()
        if seconds:
            _beside(f"sleep {delay + seconds}; kill -CONT {own}")
        if delay:
            _beside(f"sleep {delay}; kill -{int(number)} {own}")
        else:
            os.kill(own, number)

    return send


def _raise(_: float) -> None:
    raise InjectedFault("boom")


def _link_down(seconds: float) -> Any:
    def down(_: float) -> None:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        if seconds:
            _beside(f"sleep {seconds}; ip link set eth0 up")

    return down


def _lose(_: float) -> None:
    """Drop 5% of what leaves and of what arrives, by a filter that draws a number for each packet."""
    rest = int(0.95 * 2**32)
    program = f"4,32 0 0 {_RANDOM},53 0 1 {rest},6 0 0 {_DROP},6 0 0 0"
    subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "clsact"], check=True)
    for way in ("ingress", "egress"):
        subprocess.run(
            ["tc", "filter", "add", "dev", "eth0", way, "bpf", "da", "bytecode", program], check=True
        )


_ACTIONS = {
    "kill": _signal(signal.SIGKILL),
    "term": _signal(signal.SIGTERM),
    "stop 3 s": _signal(signal.SIGSTOP, 3),
    "stop 16 s": _signal(signal.SIGSTOP, 16),
    "exception in backward": _raise,
    "exception in a hook": _raise,
    "link down": _link_down(0.0),
    "link down 2 s": _link_down(2.0),
    "link loses 5%": _lose,
}


def full_directory() -> str:
    """Where the harness has mounted a file system without room."""
    return os.environ["FULL_DIRECTORY"]


def refuse_single_process() -> None:
    """A trial is one of several processes."""
    if "TRIAL" not in os.environ:
        sys.exit("this program is started by tests/faults/run.py")
