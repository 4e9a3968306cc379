"""Hosts made of network namespaces: N of them on one bridge, over links of a chosen rate. Needs root and iproute2.

As a library:

    with Hosts(2, link="1gbit", ranks_per_host=2) as hosts:
        codes = hosts.run([sys.executable, "train.py"])        # four ranks

As a command, one rank of COMMAND per host, or more:

    python benchmarks/hosts.py --hosts 2 --link 100mbit -- python train.py
    python benchmarks/hosts.py --clean

Every rank finds the variables that torchrun would set (RANK, WORLD_SIZE, MASTER_ADDR, ...), GLOO_SOCKET_IFNAME, and
the addresses of all hosts in HOST_ADDRESSES. A link is a veth pair with a token bucket at both ends: it limits what a
host sends and what it receives, each on its own.

The names of the namespaces hold the process that made them. What a killed process left behind is removed when the next
one makes hosts, or by ``--clean``.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

INTERFACE = "eth0"
PORT = 29500
ADDRESSES_VARIABLE = "HOST_ADDRESSES"
_NAME = re.compile(r"gradcomp-(?P<owner>\d+)-[0-9a-f]{6}-(?:switch|\d+)")
_PR_SET_PDEATHSIG = 1
_TCP_IP_BYTES = 20 + 20 + 12  # headers and the time stamp option


@dataclass(frozen=True)
class Link:
    """The token bucket of a link; none if ``rate`` is None. ``queue``: how long a packet waits in it at most."""

    rate: str | None
    burst: str = ""
    queue: str = "50ms"


LINKS = {
    "10gbit": Link("10gbit", "2500kb"),
    "1gbit": Link("1gbit", "256kb"),
    "100mbit": Link("100mbit", "64kb"),
    "50mbit": Link("50mbit", "64kb"),
    "10mbit": Link("10mbit", "32kb"),
    "unshaped": Link(None),
}


class HostsError(RuntimeError):
    """The hosts cannot be made here; the message says why."""


class Hosts:
    """``count`` hosts of ``ranks_per_host`` ranks; a context manager. Leaving it ends processes and removes them."""

    def __init__(self, count: int, link: str | Link = "unshaped", ranks_per_host: int = 1) -> None:
        self.ranks = count * ranks_per_host
        self._per_host = ranks_per_host
        self.link = LINKS[link] if isinstance(link, str) else link
        self.addresses = tuple(f"10.77.{i // 250}.{i % 250 + 1}" for i in range(count))
        prefix = f"gradcomp-{os.getpid()}-{secrets.token_hex(3)}"
        self.names = tuple(f"{prefix}-{i}" for i in range(count))
        self._switch = f"{prefix}-switch"
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        check_possible()
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            _ip("netns", "add", name)
            # Both ends are born in their namespaces: nothing appears on the machine's own network.
            _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port,
                "netns", self._switch)  # fmt: skip
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address}/16", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self.limit(i, self.link)

    def limit(self, host: int, link: Link) -> None:
        """Give one host's link another rate."""
        if link.rate is not None:
            for namespace, device in ((self.names[host], INTERFACE), (self._switch, f"port{host}")):
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                     link.rate, "burst", link.burst, "latency", link.queue)  # fmt: skip

    def environment(self, rank: int) -> dict[str, str]:
        """What a launcher tells this rank."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank % self._per_host),
            "LOCAL_WORLD_SIZE": str(self._per_host),
            "GROUP_RANK": str(rank // self._per_host),
            "GROUP_WORLD_SIZE": str(len(self.names)),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            ADDRESSES_VARIABLE: ",".join(self.addresses),
        }

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        core: int | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start one rank on its host, on one core if given; ``options`` go to Popen. It dies with this process."""
        own = {**os.environ, **self.environment(rank), **(environment or {})}
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if core is not None:
                os.sched_setaffinity(0, {core})

        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[rank // self._per_host], *command],
            env=own,
            preexec_fn=prepare,  # noqa: PLW1509 - callers start ranks before they start threads
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pin: bool = False,
        timeout_seconds: float | None = None,
        grace_seconds: float = 10.0,
        **options: Any,
    ) -> list[int]:
        """Run the command once per rank and return the exit codes. ``pin``: each rank on a core of its own.

        Once a rank has failed, the others have ``grace_seconds`` to end by themselves. TimeoutExpired after
        ``timeout_seconds``.
        """
        cores = sorted(os.sched_getaffinity(0))
        processes = [
            self.start(rank, command, environment, cores[rank % len(cores)] if pin else None, **options)
            for rank in range(self.ranks)
        ]
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        given_up: float | None = None
        while None in (codes := [process.poll() for process in processes]):
            now = time.monotonic()
            if deadline is not None and now > deadline:
                self.end()
                raise subprocess.TimeoutExpired(list(command), timeout_seconds or 0.0)
            if given_up is None and any(codes):
                given_up = now + grace_seconds
            if given_up is not None and now > given_up:
                self.end()
            time.sleep(0.02)
        return [code for code in codes if code is not None]

    def sent_bytes(self, host: int) -> int:
        """What a host's interface has sent, by its own counter."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.names[host], "cat", path))

    def end(self) -> None:
        """Kill what still runs of the processes started here."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes.clear()

    def close(self) -> None:
        """End the processes and remove the hosts. Safe to call twice, and on hosts that are only half built."""
        self.end()
        for name in (*self.names, self._switch):
            if _namespace_exists(name):
                _remove(name)


@dataclass(frozen=True)
class Traffic:
    """What an interface has sent, and what of it TCP had sent before, if that was full packets."""

    sent_bytes: int
    sent_packets: int
    resent_bytes: int

    @staticmethod
    def now(interface: str = INTERFACE) -> Traffic:
        """The counters of the calling process's own host. Bytes include all headers; those resent none."""
        device = Path("/sys/class/net", interface)
        names, values = (
            line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"
        )
        segment_bytes = int((device / "mtu").read_text()) - _TCP_IP_BYTES
        return Traffic(
            int((device / "statistics/tx_bytes").read_text()),
            int((device / "statistics/tx_packets").read_text()),
            int(values[names.index("RetransSegs")]) * segment_bytes,
        )

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.sent_packets - earlier.sent_packets,
            self.resent_bytes - earlier.resent_bytes,
        )

    @property
    def is_certain(self) -> bool:
        """False where TCP sent much again: a queue in front of the interface may have dropped what was sent first."""
        return self.resent_bytes <= self.sent_bytes / 20

    def payload_bytes(self, packet_bytes: float) -> float:
        """Without ``packet_bytes`` of headers in each packet, and without what was sent again."""
        return self.sent_bytes - self.resent_bytes - packet_bytes * self.sent_packets


def run_task(
    made: Hosts, script: str, task: Any, timeout_seconds: float | None = None
) -> list[dict[str, Any]]:
    """Run ``script --task TASK --out FILE`` on every rank of these hosts; what each rank wrote beside FILE."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-task-") as directory, made:
        out = Path(directory) / "out"
        command = [sys.executable, script, "--task", json.dumps(dataclasses.asdict(task)), "--out", str(out)]
        codes = made.run(command, timeout_seconds=timeout_seconds, pin=True)
        if any(codes):
            raise SystemExit(f"a rank failed; exit codes {codes}")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(made.ranks)]


def parse(parser: argparse.ArgumentParser, run_rank: Callable[[str, Path], None]) -> argparse.Namespace:
    """Parse a command's arguments. A rank of :func:`run_task` gets its task and the path of its file, and exits."""
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run_rank(options.task, options.out)
        sys.exit(0)
    return options


def addresses() -> list[str]:
    """The addresses of all hosts, for a rank that :class:`Hosts` started."""
    return os.environ[ADDRESSES_VARIABLE].split(",")


def check_possible() -> None:
    """Raise HostsError that says why hosts cannot be made here."""
    if sys.platform != "linux":
        raise HostsError("hosts made of network namespaces need Linux")
    if os.geteuid() != 0:
        raise HostsError("hosts made of network namespaces need root: run the command as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise HostsError(f"hosts made of network namespaces need iproute2: there is no `{tool}`")


def remove_stale() -> list[str]:
    """Remove the hosts of processes that are gone; returns the names of their namespaces."""
    directory = Path("/run/netns")
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    stale = [
        name for name in names if (m := _NAME.fullmatch(name)) and not Path(f"/proc/{m['owner']}").exists()
    ]
    for name in stale:
        _remove(name)
    return stale


def exit_code(measure: Callable[[], int | None]) -> int:
    """Run a command's work, such that hosts are removed however it ends; its exit status, 0 for None."""
    exit_on_termination()
    try:
        return measure() or 0
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def exit_on_termination() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that ``with`` blocks clean up. For the main thread of a command."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def _remove(name: str) -> None:
    """Kill what runs in a namespace, then delete it; its ends of the links go with it."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _namespace_exists(name: str) -> bool:
    return Path("/run/netns", name).exists()


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host (default: 1)")
    parser.add_argument("--link", choices=LINKS, default="1gbit", help="rate of every link (default: 1gbit)")
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    parser.add_argument("--clean", action="store_true", help="remove what killed processes left, and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    options = parser.parse_args()
    exit_on_termination()
    try:
        check_possible()
        if options.clean:
            removed = remove_stale()
            print("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
            return 0
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        if not command:
            parser.error("there is no command to run; give one after --")
        with Hosts(options.hosts, options.link, options.ranks_per_host) as hosts:
            codes = hosts.run(command, pin=options.pin)
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
