"""Processor time of this process by thread: which thread pays for a step, and how often it was woken.

    before = cpu_by_thread.seconds()
    ...                                        # steps
    cpu_by_thread.difference(before)           # {"gradcomp": Used(1.25, 0.31, 5021), "MainThread": ...}

Linux only. The kernel counts in ticks of 10 ms, so a measurement needs many steps. Threads of Python have their
names there, others the kernel's; threads of one name are added. Wake-ups are voluntary context switches.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Used(NamedTuple):
    user_seconds: float
    system_seconds: float
    wakeups: int

    @property
    def seconds(self) -> float:
        return self.user_seconds + self.system_seconds


def seconds() -> dict[str, Used]:
    """What every thread alive has used since it began."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    tick = 1 / os.sysconf("SC_CLK_TCK")
    totals: defaultdict[str, Used] = defaultdict(lambda: Used(0.0, 0.0, 0))
    for task in Path("/proc/self/task").iterdir():
        try:
            stat, status = (task / "stat").read_text(), (task / "status").read_text()
        except OSError:  # the thread has ended meanwhile
            continue
        kernel_name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()  # from the third field of proc(5)'s table on
        wakeups = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        name = named.get(int(task.name), kernel_name)
        total = totals[name]
        user, system = int(fields[11]) * tick, int(fields[12]) * tick
        totals[name] = Used(total.user_seconds + user, total.system_seconds + system, total.wakeups + wakeups)
    return dict(totals)


def difference(before: dict[str, Used]) -> dict[str, Used]:
    """What was used since ``before``, by thread, the busiest first."""
    used = {}
    for name, total in seconds().items():
        then = before.get(name, Used(0.0, 0.0, 0))
        used[name] = Used(*(now - old for now, old in zip(total, then, strict=True)))
    return dict(sorted(used.items(), key=lambda item: -item[1].seconds))
