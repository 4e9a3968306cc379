"""The harness itself: what it draws can be, what it calls bad is bad, and forked ranks end as interpreters do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from faults.draw import COMPRESSIONS, FAULTS, NEEDS_ROOT, REDUCTIONS, STACKS, Trial, draw, valid
from faults.judge import Ended, judge
from faults.launch import HERE, _start, _wait


def trial(fault: str = "nothing", stack: str = "torch", victim: int = 1) -> Trial:
    return Trial(0, stack, "none", "sra", fault, victim=victim)


def end(*history: str, status: int | None = 0) -> Ended:
    return Ended(status, [{"event": "end", "history": list(history)}])


def error(kind: str, *history: str, status: int | None = 1) -> Ended:
    typed = kind == "TransportError"
    said = {"event": "error", "kind": kind, "typed": typed, "text": "", "history": list(history)}
    return Ended(status, [said])


def at(second: float, one: Ended) -> Ended:
    return replace(one, said=[said | {"at": second} for said in one.said])


told = partial(error, "TransportError")
TYPED, INJECTED = told(), error("InjectedFault")
UNKNOWN = replace(error("UnknownError"), stderr="faults.rank.InjectedFault: boom")
WELL = end("a", "b")
STRUCK = replace(WELL, said=[{"event": "fault"}, *WELL.said])

# fmt: off
VERDICTS = {
    "all finish alike": (trial(), [WELL] * 3, "equal"),
    "survivors are told": (trial("kill"), [TYPED, Ended(-9), TYPED], "typed"),
    "survivors finish": (trial("kill"), [WELL, Ended(-9), WELL], "equal"),
    "the victim's own error": (trial("exception in backward"), [TYPED, INJECTED, TYPED], "typed"),
    "one rank finished before": (trial("uneven end"), [TYPED, end("a"), TYPED], "typed"),
    "the launcher ends them": (trial("kill", "mpi"), [Ended(-9), Ended(-9), Ended(-15)], "launcher"),
    "the launcher ends what others had reported":
        (trial("stop 16 s", "mpi"), [TYPED, Ended(-9), Ended(-9)], "typed"),
    "the launcher ends them without a reason": (trial("stop 16 s", "mpi"), [Ended(-9)] * 3, "untyped"),
    "other parameters": (trial("skip after backward"), [WELL, end("a", "c"), WELL], "silent"),
    "other parameters beside an error": (trial(), [WELL, end("a", "c"), TYPED], "silent"),
    "an error long after":
        (trial("double backward"), [told(*"abcd"), told(*"abxd"), WELL], "silent"),
    "an error at once":
        (trial("double backward"), [told(*"abc"), told(*"abx"), TYPED], "typed"),
    "fewer steps": (trial("skip after backward"), [WELL, end("a"), WELL], "silent"),
    "a drift that the second exchange notices":
        (trial("other rate"), [told(*"abc"), told(*"axy"), TYPED], "typed"),
    "a drift that the third one notices":
        (trial("other rate"), [told(*"abcd"), told(*"axyz"), TYPED], "silent"),
    "an altered message that is used": (trial("message altered"), [WELL, STRUCK, WELL], "silent"),
    "one that did not come": (trial("message altered"), [WELL] * 3, "equal"),
    "one that its sender altered": (trial("message altered by its sender"), [WELL, STRUCK, WELL], "equal"),
    "life without a launcher": (trial("launcher killed"), [WELL, TYPED, TYPED], "hang"),
    "an end that is noticed":
        (trial("ends at once"), [at(3.0, TYPED), at(1.0, WELL), at(3.0, TYPED)], "typed"),
    "an end that is waited for":
        (trial("ends at once"), [at(3.0, TYPED), at(1.0, WELL), at(21.0, TYPED)], "hang"),
    "an abort": (trial("kill"), [Ended(-6), Ended(-9), TYPED], "abort"),
    "a crash of the victim": (trial("kill"), [TYPED, Ended(-11), TYPED], "abort"),
    "killed without a launcher": (trial("kill"), [Ended(-9), Ended(-9), TYPED], "abort"),
    "a hang": (trial("kill"), [Ended(None), Ended(-9), TYPED], "hang"),
    "a hang of the victim": (trial("stop 16 s"), [TYPED, Ended(None), TYPED], "hang"),
    "a hang behind an error": (trial("kill"), [told(status=None), Ended(-9), TYPED], "hang"),
    "another error": (trial("kill"), [error("RuntimeError"), Ended(-9), TYPED], "untyped"),
    "the victim's own error, by TensorFlow's name":
        (trial("exception in backward", "keras"), [TYPED, UNKNOWN, TYPED], "typed"),
    "an injected error elsewhere": (trial("exception in backward"), [INJECTED, INJECTED, TYPED], "untyped"),
    "an end in the middle": (trial("kill"), [Ended(0), Ended(-9), TYPED], "untyped"),
    "a bad status after a good end": (trial(), [end("a", status=1), WELL, WELL], "untyped"),
}
# fmt: on


@pytest.mark.parametrize(("tried", "ranks", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict(tried: Trial, ranks: list[Ended], expected: str) -> None:
    assert judge(tried, ranks).outcome == expected


def test_a_seed_gives_the_same_trial_again() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_everything_is_drawn_and_only_what_can_be() -> None:
    trials = [draw(seed) for seed in range(2000)]
    assert all(valid(one.stack, one.fault, one.moment, one.compression) for one in trials)
    assert {one.fault for one in trials} == set(FAULTS)
    assert {one.compression for one in trials} == set(COMPRESSIONS)
    assert {one.reduction for one in trials} == set(REDUCTIONS)
    possible = {
        (s, f) for s in STACKS for f, at in FAULTS.items() if any(valid(s, f, m) for m in at or ("",))
    }
    assert set(Counter((one.stack, one.fault) for one in trials)) == possible


def test_without_root_nothing_is_drawn_that_needs_it() -> None:
    assert not {draw(seed, privileged=False).fault for seed in range(500)} & set(NEEDS_ROOT)


def test_a_forked_rank_ends_as_an_interpreter_does(tmp_path) -> None:
    """Its exit handlers run, its status is told, and one that is hung up on is ended."""
    program = "import atexit, os, sys, time\natexit.register(print, 'at exit')\n"
    program += (
        "def main():\n    print(os.environ['WHAT'])\n    time.sleep(60 * (os.environ['WHAT'] == 'sleep'))\n"
    )
    program += "    sys.exit(3)\n"
    (tmp_path / "trial_program.py").write_text(program)
    address = str(tmp_path / "socket")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), address, "trial_program"], env=environment
    )
    request = {"env": {}, "network": "", "files": [], "program": "trial_program"}
    request |= {name: str(tmp_path / f"{{rank}}.{name}") for name in ("stdout", "stderr")}
    while not os.path.exists(address):  # noqa: PTH110
        assert server.poll() is None
    try:
        ranks = [_start(address, request, i, {"WHAT": what}) for i, what in enumerate(["end", "sleep"])]
        assert _wait(ranks[:1], 30.0) == [3]
        assert _wait(ranks[1:], 0.1) == [None]
        assert (tmp_path / "0.stdout").read_text() == "end\nat exit\n"
    finally:
        server.kill()
        server.wait()
