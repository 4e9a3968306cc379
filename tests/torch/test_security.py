"""A stranger who reaches the store's port, a rank whose texts and numbers are hostile: jobs go on, or say why."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import preloaded
import pytest
from launching import Finished, run_ranks, run_torchrun
from torch.distributed import PrefixStore, TCPStore

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import gradcomp.torch as gc
import gradcomp.job.objects

directory = Path(sys.argv[1])

def listening():
    '''Local addresses, in hexadecimal, of the TCP sockets on which this process listens.'''
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(fields[1].partition(":")[0])
    return found

def wait_for(name):
    while not (directory / name).exists():
        time.sleep(0.05)

gc.init(timeout_seconds=20, stall_warning_seconds=1, log_level="warning")
rank = gc.rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()

step()
said = {"listening": listening()}
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
(directory / f"ready-{rank}").write_text(str(store.port))
wait_for("attacked")
if rank == 1:
    time.sleep(2)  # long enough for the other rank to look, to warn, and to ask where this one is
step()
if rank == 1:
    time.sleep(1.5)
gc.barrier()
said["went on"] = True
if "hostile" not in sys.argv:
    print(json.dumps(said), flush=True)
    sys.exit()

# Rank 1 turns hostile.
class Long(bytes):
    __len__ = lambda self: 1 << 40
gradcomp.job.objects._encoded = lambda obj, encode: (Long(), None)
try:
    gc.broadcast_object(1, root_rank=1)
except Exception as error:
    said["length"] = [type(error).__name__, str(error)]
try:
    if rank == 1:
        print(json.dumps(said), flush=True)
        raise ValueError("\\x1b]0;title\\x07 boom\\n" + 100_000 * "!")
    step()
except gc.TransportError as error:
    said["abort"] = str(error)
print(json.dumps(said), flush=True)
"""


def spoil(port: int, wrong: Callable[[str], str]) -> None:
    """What a stranger does who knows every key: stop the job, ask nonsense, lie about positions."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)
    ranks = hashlib.sha256(repr((0, 1)).encode()).hexdigest()[:16]
    store = PrefixStore(f"gradcomp/0/1/{ranks}", store)
    for key, value in {
        "exchanger/all-0/abort": "\x1b[2Jstranger",
        "abort": "\x1b[2Jstranger",
        "user/all/abort": "\x1b[2Jstranger",
        "question": 5000 * "9",
        "at/1": '[1, "stranger", {"exchanger/all-0": [99, 0, 0]}]',
    }.items():
        store.set(key, wrong(value))


def attacked(
    run: Callable[..., list[Finished]], directory: Path, wrong: Callable[[str], str], *then: str
) -> list[Finished]:
    """The ranks' ends, with an attack on their store between two steps."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, PROGRAM, 2, arguments=(str(directory), *then))
        ready = [directory / f"ready-{rank}" for rank in range(2)]
        while not job.done() and not all(file.exists() and file.read_text() for file in ready):
            time.sleep(0.05)
        if not job.done():
            spoil(int(ready[0].read_text()), wrong)
            (directory / "attacked").touch()
        return job.result()


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    forks = functools.partial(run_ranks, imported=preloaded.TORCH)
    return attacked(forks, tmp_path_factory.mktemp("by-hand"), lambda value: value, "hostile")


def said(result: Finished) -> dict:
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_a_job_on_one_host_listens_on_loopback_only(by_hand: list[Finished]) -> None:
    assert {address for result in by_hand for address in said(result)["listening"]} == {"0100007F"}


def test_a_strangers_values_stop_nothing_and_are_reported_once(by_hand: list[Finished]) -> None:
    for result in by_hand:
        assert said(result)["went on"]
        assert result.stderr.count("is not signed") == 1
        assert "stranger" not in result.stderr
    # Signed questions are answered beside a stranger's.
    assert re.search(r"rank 0 has waited .* rank 1 .*has only reached step 1", by_hand[0].stderr)


def test_an_absurd_length_is_a_typed_error_and_what_peers_say_is_shown_escaped_and_bounded(
    by_hand: list[Finished],
) -> None:
    for result in by_hand:
        kind, message = said(result)["length"]
        assert kind == "WireFormatError"
        assert str(1 << 40) in message
    message = said(by_hand[0])["abort"]
    assert message.isprintable()
    assert r"ValueError: \x1b]0;title\x07 boom\n!!!" in message
    assert len(message) < 5000


@pytest.mark.full
def test_torchruns_store_is_read_with_a_secret_too(tmp_path: Path) -> None:
    """Its ranks share a host, so a file of rank 0's carries one. The stranger's values have the form of signed ones."""
    results = attacked(run_torchrun, tmp_path, lambda value: 64 * "0" + ":" + value)
    for result in results:
        assert said(result)["went on"]
        assert result.stderr.count("is not signed") == 1
