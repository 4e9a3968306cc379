"""Hosts made of network namespaces: what a rank finds there, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import pytest

NAMESPACES = Path("/run/netns")


def own_namespaces(pid: int) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"gradcomp-{pid}-*"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.HostsError, match="root"), hosts.Hosts(2):
        pass


def test_without_iproute2_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None)
    with pytest.raises(hosts.HostsError, match="iproute2"), hosts.Hosts(2):
        pass


@pytest.mark.network
class TestHosts:
    def test_every_rank_is_told_its_place(self, tmp_path):
        code = (
            "import os, pathlib, sys; e = os.environ; "
            "pathlib.Path(sys.argv[1], e['RANK']).write_text(e['WORLD_SIZE'] + e['MASTER_ADDR'])"
        )
        with hosts.Hosts(3) as made:
            assert made.run([sys.executable, "-c", code, str(tmp_path)]) == [0, 0, 0]
            first = made.addresses[0]
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
            "012", f"3{first}"
        )

    def test_ranks_of_a_host_share_it(self, tmp_path):
        code = (
            "import os, pathlib, sys; e = os.environ; "
            "place = [e['WORLD_SIZE'], e['GROUP_RANK'], e['LOCAL_RANK'], e['LOCAL_WORLD_SIZE']]; "
            "pathlib.Path(sys.argv[1], e['RANK']).write_text(' '.join(place) + os.readlink('/proc/self/ns/net'))"
        )
        with hosts.Hosts(2, ranks_per_host=2) as made:
            assert made.run([sys.executable, "-c", code, str(tmp_path)]) == [0] * 4
        found = [(tmp_path / str(rank)).read_text().partition("net:") for rank in range(4)]
        assert [text for text, _, _ in found] == ["4 0 0 2", "4 0 1 2", "4 1 0 2", "4 1 1 2"]
        namespaces = [namespace for _, _, namespace in found]
        assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]

    def test_the_interface_counts_what_was_sent(self):
        code = (
            "import os, socket, sys\n"
            "own = os.environ['HOST_ADDRESSES'].split(',')\n"
            "server = socket.create_server((own[int(os.environ['RANK'])], 1234))\n"
            "if os.environ['RANK'] == '0':\n"
            "    peer, _ = server.accept()\n"
            "    peer.sendall(bytes(1 << 20))\n"
            "    peer.recv(1)\n"
            "else:\n"
            "    import time\n"
            "    for _ in range(500):\n"
            "        try:\n"
            "            peer = socket.create_connection((own[0], 1234))\n"
            "            break\n"
            "        except ConnectionRefusedError:\n"
            "            time.sleep(0.01)\n"
            "    left = 1 << 20\n"
            "    while left:\n"
            "        left -= len(peer.recv(left))\n"
            "    peer.sendall(b'x')\n"
        )
        with hosts.Hosts(2, link="1gbit") as made:
            before = [made.sent_bytes(rank) for rank in range(2)]
            assert made.run([sys.executable, "-c", code], timeout_seconds=60) == [0, 0]
            sent = [made.sent_bytes(rank) - b for rank, b in zip(range(2), before, strict=True)]
        assert 1 << 20 < sent[0] < 1.05 * (1 << 20)
        assert sent[1] < 0.05 * (1 << 20)

    def test_a_failing_rank_ends_the_others(self):
        code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
        with hosts.Hosts(2) as made:
            codes = made.run([sys.executable, "-c", code], grace_seconds=0.2)
        assert codes == [-signal.SIGKILL, 3]

    def test_nothing_stays_after_an_exception(self):
        started = []

        def interrupted():
            with hosts.Hosts(2) as made:
                started.append(made.start(0, [sys.executable, "-c", "import time; time.sleep(600)"]))
                assert own_namespaces(os.getpid())
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert started[0].returncode == -signal.SIGKILL
        assert own_namespaces(os.getpid()) == []

    def command(self):
        """Return the process of the command, once it has made its hosts."""
        command = [sys.executable, hosts.__file__, "--link", "unshaped", "--", "sleep", "600"]
        # Where the tests run in the background of a shell, interrupts are ignored, and that is inherited.
        process = subprocess.Popen(["env", "--default-signal=INT", *command])
        wait_until(lambda: len(own_namespaces(process.pid)) == 3)
        return process

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_command_cleans_up_when_interrupted(self, number):
        process = self.command()
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert own_namespaces(process.pid) == []

    def test_what_a_killed_process_left_is_removed_by_the_next(self):
        process = self.command()
        process.kill()
        process.wait()
        assert own_namespaces(process.pid)
        with hosts.Hosts(1):
            assert own_namespaces(process.pid) == []
