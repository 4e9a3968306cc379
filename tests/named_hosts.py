"""Hosts made of network namespaces, with names, for launchers to start ranks on; and a Slurm on two of them."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from launching import clean_environment

_START_SECONDS = 20.0


class NamedHosts:
    """Network namespaces that look like hosts to a launcher: each has its name and knows the others', and ssh leads in.

    The launchers call the ssh that they find on PATH. This one takes ssh's arguments and runs the command inside the
    namespace, with the few variables that a login would have.
    """

    def __init__(self, names: Mapping[str, str], addresses: Mapping[str, str], directory: Path) -> None:
        """``names`` and ``addresses``: the namespace and the address of each host."""
        self.addresses = dict(addresses)
        self._directory = directory
        table = directory / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{addresses[name]} {name}" for name in names)]
        table.write_text("\n".join(lines) + "\n")
        inside = f'mount --bind {shlex.quote(str(table))} /etc/hosts && hostname "$0" && exec "$@"'
        cases = "\n".join(f"    {name}) namespace={namespace} ;;" for name, namespace in names.items())
        self._script(
            "enter",
            f"""
            #!/bin/sh
            # enter HOST COMMAND...
            case $1 in
            {cases}
                *) echo "ssh: Could not resolve hostname $1" >&2; exit 255 ;;
            esac
            exec ip netns exec $namespace unshare --uts --mount sh -c {shlex.quote(inside)} "$@"
        """,
        )
        self._script(
            "ssh",
            f"""
            #!/bin/sh
            # ssh [OPTIONS] HOST [OPTIONS] COMMAND...
            options() {{
                skip=0
                while :; do
                    case $1 in
                        -o | -p | -i | -l) skip=$((skip + 2)); shift 2 ;;
                        -*) skip=$((skip + 1)); shift ;;
                        *) break ;;
                    esac
                done
            }}
            options "$@"; shift $skip
            host=$1; shift
            options "$@"; shift $skip
            cd /
            exec env -i HOME="$HOME" PATH=/usr/sbin:/usr/bin:/sbin:/bin {directory}/enter $host sh -c "$*"
        """,
        )

    def _script(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
        path.chmod(0o755)

    def on(self, host: str) -> list[str]:
        """The command that runs another one on a host."""
        return [str(self._directory / "enter"), host]

    def environment(self, path: str) -> dict[str, str]:
        """PATH with this ssh in front."""
        return {"PATH": f"{self._directory}:{path}"}


class SlurmCluster:
    """slurmctld on the first host, slurmd on each. A context manager; ``root``: where Slurm is installed."""

    def __init__(self, root: Path, hosts: NamedHosts, directory: Path) -> None:
        self._root, self._hosts, self._directory = root, hosts, directory
        self._plugins = next(root.glob("usr/lib/*/slurm-wlm"))
        self._daemons: list[subprocess.Popen[Any]] = []

    @staticmethod
    def program(root: Path, name: str) -> Iterator[Path]:
        """Slurm's program of this name, under one of Debian's names for it; nothing if it is not there."""
        found = (
            root / place / (name + suffix) for place in ("usr/sbin", "usr/bin") for suffix in ("", "-wlm")
        )
        return (path for path in found if path.exists())

    def _program(self, name: str) -> str:
        return str(next(self.program(self._root, name)))

    def __enter__(self) -> Self:
        names = list(self._hosts.addresses)
        self._configure(names)
        try:
            self._start(names[0], "slurmctld", "-D")
            for name in names:
                self._start(name, "slurmd", "-D", "-d", self._program("slurmstepd"))
            self._wait_for_nodes(len(names))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(5.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def srun(self) -> list[str]:
        """The command of srun, on the first host."""
        return [*self._hosts.on(next(iter(self._hosts.addresses))), self._program("srun")]

    def environment(self) -> dict[str, str]:
        """What Slurm's programs need to find this Slurm."""
        return {
            "SLURM_CONF": str(self._directory / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{self._plugins.parent}:{self._plugins}",
        }

    def _configure(self, names: list[str]) -> None:
        (self._directory / "state").mkdir()
        first = names[0]
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{first}({self._hosts.addresses[first]})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "StateSaveLocation": self._directory / "state",
            "SlurmdSpoolDir": self._directory / "spool-%n",
            "SlurmctldPidFile": self._directory / "slurmctld.pid",
            "SlurmdPidFile": self._directory / "slurmd-%n.pid",
            "PluginDir": self._plugins,
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/linear",
            "MpiDefault": "none",
            "ReturnToService": "2",
            "SlurmdParameters": "config_overrides",  # CPUs by this file, not as many as there are
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [f"NodeName={n} NodeAddr={self._hosts.addresses[n]} CPUs=4 State=UNKNOWN" for n in names]
        lines += ["PartitionName=all Nodes=ALL Default=YES State=UP"]
        (self._directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 wants a mount
        (self._directory / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self, host: str, program: str, *arguments: str) -> None:
        with (self._directory / f"{program}-{host}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*self._hosts.on(host), self._program(program), *arguments],
                    env={**clean_environment(), **self.environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait_for_nodes(self, count: int) -> None:
        command = [
            *self._hosts.on(next(iter(self._hosts.addresses))),
            self._program("sinfo"),
            "-h",
            "-N",
            "-o",
            "%T",
        ]
        deadline = time.monotonic() + _START_SECONDS
        states = ""
        while states.split() != ["idle"] * count:
            if time.monotonic() > deadline:
                logs = [log.read_text(errors="replace") for log in self._directory.glob("*.log")]
                raise RuntimeError(f"Slurm does not start, its nodes are {states!r}:\n" + "\n".join(logs))
            time.sleep(0.2)
            states = subprocess.run(
                command,
                env={**clean_environment(), **self.environment()},
                capture_output=True,
                text=True,
                check=False,
            ).stdout
