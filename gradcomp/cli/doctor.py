"""``gradcomp doctor`` examines this process, and under a launcher the ranks of its job."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gradcomp.cli.output import Exit, json_option, print_json, show, table
from gradcomp.doctor.examination import examine
from gradcomp.doctor.finding import Finding, Level, merged, ranks_text, worst
from gradcomp.doctor.job import Job
from gradcomp.doctor.pairs import mbit, seconds_text
from gradcomp.version import __version__

_POLL_SECONDS, _END_SECONDS = 0.1, 15.0


class _TerminatedError(BaseException):
    """The launcher ends the job. Like an interrupt, it passes what catches errors."""


@click.command()
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    metavar="SECONDS",
    help="Longest wait for the other ranks; default: 60.",
)
@json_option
def command(seconds: float, as_json: bool) -> int:
    """Say what is wrong with this machine, or under a launcher with the job: torchrun -m gradcomp doctor.

    Alone it looks at this process. Under a launcher it compares all ranks and measures the links between their hosts;
    rank 0 prints. The exit code is 0 if no finding is an error, 4 if one is, and 5 if a rank is missing.
    """
    job: Job | None = None
    ended, interrupted = True, False
    try:
        with _termination():
            launch, own = examine()
            job = Job(launch, own, seconds)
            ended = launch.size == 1 or _run(job)
    except KeyboardInterrupt:
        ended, interrupted = False, True
    except _TerminatedError:
        ended = False
        if job is not None:
            job.measured_findings.append(job.terminated())
    if job is None:
        text = "this process was ended before it was examined: look at the output of the other ranks"
        click.echo(f"gradcomp doctor: {text}", err=True)
        return Exit.INTERRUPTED if interrupted else Exit.NOT_MEASURED
    if job.reports:
        findings = merged(job.findings())
        code = Exit.INTERRUPTED if interrupted else _code(job, findings)
        _print(job, findings, code, as_json)
    else:
        code = Exit(job.code) if job.code in set(Exit) else Exit.NOT_MEASURED
    sys.stdout.flush()
    if job.size > 1 and not (_finished(job, code) and ended):
        # A thread that is inside an engine when the interpreter ends would abort the process.
        os._exit(code)
    return code


def _run(job: Job) -> bool:
    """Run the job's part on a thread, so that this one can always report. Return whether it ended in time."""
    thread = threading.Thread(target=job.run, name="gradcomp-doctor", daemon=True)
    with _progress() as progress:
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            progress(job.doing)
            if time.monotonic() > job.deadline:
                job.measured_findings.append(job.overdue())
                return False
    return True


def _finished(job: Job, code: int) -> bool:
    """Part from the other ranks; return False if that takes too long.

    A launcher that has seen another rank end with this code may send SIGTERM, which would change the code of this one.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = threading.Thread(target=job.finish, args=(int(code),), name="gradcomp-doctor-end", daemon=True)
    thread.start()
    thread.join(_END_SECONDS)
    return not thread.is_alive()


@contextmanager
def _termination() -> Iterator[None]:
    """Report before a launcher's SIGTERM ends this process."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows on a terminal what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda doing: None
        return
    with console.status("") as status:
        yield status.update


def _code(job: Job, findings: list[Finding]) -> Exit:
    if not job.is_complete:
        return Exit.NOT_MEASURED
    return Exit.ERRORS_FOUND if worst(findings) is Level.ERROR else Exit.OK


def _print(job: Job, findings: list[Finding], code: Exit, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(job, findings, code))
        return
    facts = [each for each in findings if each.level is Level.OK]
    wrong = [each for each in findings if each.level is not Level.OK]
    rows = [[each.about, ranks_text(each.ranks, job.size), each.found] for each in facts]
    parts: list[str | Table] = [
        f"gradcomp doctor {__version__}" + f", {job.size} ranks" * (job.size > 1),
        table(["about", "ranks", "found"], rows, left={0, 1, 2}),
    ]
    if job.links:
        parts += ["links between hosts, by their first ranks", _links(job)]
    if job.rates:
        parts.append(_collectives(job))
    if wrong:
        rows = [
            [each.level.name.lower(), each.about, ranks_text(each.ranks, job.size), each.found, each.advice]
            for each in wrong
        ]
        parts.append(table(["", "about", "ranks", "found", "what to do"], rows, left={0, 1, 2, 3, 4}))
    parts.append(_summary(findings, code))
    show(*parts)


def _links(job: Job) -> Table:
    rows = []
    for link in job.links:
        figures = ["-", "-", "-"]
        if link.is_measured:
            figures = [seconds_text(link.latency_seconds), mbit(link.there), mbit(link.back)]
        names = [f"{rank} {job.facts[rank].network.hostname}" for rank in (link.a, link.b)]
        rows.append([*names, *figures])
    return table(["from", "to", "a message", "there", "back"], rows, left={0, 1})


def _collectives(job: Job) -> Table:
    rows = []
    for one in job.rates:
        times = seconds_text(one.seconds), seconds_text(one.small_seconds)
        rows.append([one.collective, f"{one.nbytes / 1e6:.1f} MB", *times, mbit(one.sent_per_second)])
    return table(["collective", "of", "takes", "of few bytes", "each rank sends"], rows, left={0})


def _summary(findings: list[Finding], code: Exit) -> str:
    counts = {level: sum(each.level is level for each in findings) for level in (Level.ERROR, Level.WARNING)}
    words = [f"{count} {level.name.lower()}{'s' * (count > 1)}" for level, count in counts.items() if count]
    missing = "; not all could be measured" if code is Exit.NOT_MEASURED else ""
    return (", ".join(words) or "nothing is wrong") + missing


def _as_json(job: Job, findings: list[Finding], code: Exit) -> dict[str, Any]:
    return {
        "version": __version__,
        "exit": int(code),
        "outcome": code.name.lower(),
        "ranks": job.size,
        "missing": job.missing,
        "findings": [
            {
                "level": each.level.name.lower(),
                "about": each.about,
                "ranks": each.ranks,
                "found": each.found,
                "advice": each.advice,
            }
            for each in findings
        ],
        "links": [
            {
                "from": link.a,
                "to": link.b,
                "latency_seconds": link.latency_seconds,
                "bytes_per_second": link.there,
                "bytes_per_second_back": link.back,
            }
            for link in job.links
            if link.is_measured
        ],
        "collectives": [dataclasses.asdict(one) for one in job.rates],
        "facts": [_facts(job.facts[rank]) for rank in sorted(job.facts)],
    }


def _facts(facts: Any) -> dict[str, Any]:
    shown = dataclasses.asdict(facts)
    del shown["network"]["token"]
    return shown
