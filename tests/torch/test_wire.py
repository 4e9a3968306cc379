"""Bytes that gradcomp counts against bytes that the network counts."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator

import preloaded
import pytest
from launching import run_ranks

#: Ethernet, IPv4 and TCP with time stamps, in front of every packet's payload.
HEADER_BYTES = 14 + 20 + 32

PROGRAM = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(os.open("/run/netns/NAMESPACE", os.O_RDONLY), 0x40000000) == 0

import torch
import torch.distributed as dist
import gradcomp.torch as gc

def counted():
    dist.barrier()
    with open("/proc/net/dev") as table:
        (line,) = [line for line in table if line.strip().startswith("lo:")]
    fields = line.split(":")[1].split()
    dist.barrier()
    return int(fields[0]), int(fields[1])

gc.init(log_level="warning", fingerprint_steps=0, statistics_every_steps=0)
for compression in ("none", "bf16", "quantize:bits=4"):
    weight = torch.nn.Parameter(torch.zeros(1000, 1000))
    rest = torch.nn.Parameter(torch.zeros(777))
    optimizer = torch.optim.SGD([weight, rest], lr=0.1)
    optimizer = gc.DistributedOptimizer(optimizer, [("w", weight), ("b", rest)], compression)
    gradient = torch.randn(1000, 1000)
    for step in range(6):
        if step == 1:
            before, sent = counted(), optimizer.statistics().wire_bytes
        optimizer.zero_grad()
        ((weight * gradient).sum() + rest.sum()).backward()
        optimizer.step()
    after = counted()
    sent = torch.tensor([optimizer.statistics().wire_bytes - sent])
    dist.all_reduce(sent)
    if dist.get_rank() == 0:
        print(json.dumps([compression, sent.item(), after[0] - before[0], after[1] - before[1]]), flush=True)
"""


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, tuple[int, int]]]:
    """By compression: payload bytes that two ranks counted, and that the loopback of a namespace of their own did."""
    name = f"gradcomp-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        finished = run_ranks(PROGRAM.replace("NAMESPACE", name), 2, imported=preloaded.TORCH)
        assert all(end.returncode == 0 for end in finished), finished[0].stderr + finished[1].stderr
        rows = [json.loads(line) for line in finished[0].stdout.splitlines()]
        yield {key: (sent, nbytes - HEADER_BYTES * packets) for key, sent, nbytes, packets in rows}
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.network
@pytest.mark.parametrize("compression", ["none", "bf16", "quantize:bits=4"])
def test_the_wire_counter_agrees_with_the_interface(counts, compression):
    ours, the_interfaces = counts[compression]
    # Ranks that wait on a slow host ask each other meanwhile, which is not counted.
    assert 0.98 * ours < the_interfaces < 1.02 * ours + 200_000


@pytest.mark.network
def test_four_bits_send_an_eighth_and_their_scales(counts):
    dense, coded = counts["none"][0], counts["quantize:bits=4"][0]
    assert dense / coded == pytest.approx(32 / (4 + 64 / 512), rel=0.02)
