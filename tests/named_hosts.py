"""Hosts made of network namespaces, with names: what a launcher needs to start ranks on them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path


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
