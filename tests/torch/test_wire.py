"""Bytes that gradcomp counts against bytes that the network counts."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from statistics import median

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
    totals = []
    for step in range(9):
        optimizer.zero_grad()
        ((weight * gradient).sum() + rest.sum()).backward()
        optimizer.step()
        totals.append([optimizer.statistics().wire_bytes, *counted()])
    steps = torch.tensor(totals).diff(dim=0)  # the first step also agrees on an order
    sent = steps[:, 0].contiguous()
    dist.all_reduce(sent)
    if dist.get_rank() == 0:
        print(json.dumps([compression, sent.tolist(), *steps[:, 1:].T.tolist()]), flush=True)
"""


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, tuple[float, float]]]:
    """By compression: payload bytes of a step, as two ranks and the loopback of a namespace of their own count them."""
    name = f"gradcomp-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        finished = run_ranks(PROGRAM.replace("NAMESPACE", name), 2, imported=preloaded.TORCH)
        assert all(end.returncode == 0 for end in finished), finished[0].stderr + finished[1].stderr
        rows = [json.loads(line) for line in finished[0].stdout.splitlines()]
        # The median step: a host that is busy may repeat a packet in one of them, or have ranks ask each other.
        yield {
            key: (median(sent), median(n - HEADER_BYTES * p for n, p in zip(nbytes, packets, strict=True)))
            for key, sent, nbytes, packets in rows
        }
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.network
@pytest.mark.parametrize("compression", ["none", "bf16", "quantize:bits=4"])
def test_the_wire_counter_agrees_with_the_interface(counts, compression):
    ours, the_interfaces = counts[compression]
    assert ours == pytest.approx(the_interfaces, rel=0.02)


@pytest.mark.network
def test_four_bits_send_an_eighth_and_their_scales(counts):
    dense, coded = counts["none"][0], counts["quantize:bits=4"][0]
    assert dense / coded == pytest.approx(32 / (4 + 64 / 512), rel=0.02)
