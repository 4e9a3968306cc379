"""What a reader pastes first runs as it stands: the whole script, and the four lines for DistributedDataParallel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import preloaded
from documented import README, ROOT, blocks
from launching import run_torchrun

INDEX, DDP, BENCHMARKS = (ROOT / "docs" / name for name in ("index.md", "ddp.md", "benchmarks.md"))

#: The default group of the last run moves nothing, as NCCL's moves no gradient of gradcomp's.
RUN = """
import json, sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

whole, lines = json.loads(sys.argv[1])
names = {}
exec(whole, names)
gc = names["gc"]

def ends_alike(model, ratio):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = gc.allgather(flat.unsqueeze(0))
    assert torch.equal(both[0], both[-1]) and len(both) == 2
    assert ratio > 6, ratio
    gc.shutdown()
    return flat

ends_alike(names["model"], names["opt"].compression_metrics()["gradcomp/ratio"])
dist.Backend.register_backend(
    "quiet", lambda store, rank, size, timeout: FakeProcessGroup._create_internal(rank, size), devices=["cpu"]
)
ended = []
for backend in ("gloo", "quiet"):
    dist.init_process_group(backend)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    names = {"model": torch.nn.parallel.DistributedDataParallel(net)}
    exec(lines, names)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        opt.zero_grad()
        names["model"](torch.randn(8, 64)).square().mean().backward()
        opt.step()
    ended.append(ends_alike(net, names["state"].compression_metrics()["gradcomp/ratio"]))
    dist.destroy_process_group()
assert torch.equal(*ended)
"""


def only(page: Path, word: str) -> str:
    """The one block of Python on a page that has this word."""
    (found,) = (code for _, code in blocks(page) if word in code)
    return found


def test_the_pages_show_the_same_script_and_the_same_four_lines():
    assert only(README, "DistributedSampler") == only(INDEX, "DistributedSampler")
    lines = only(DDP, "ddp_comm_hook")
    assert lines == only(README, "ddp_comm_hook") == only(INDEX, "ddp_comm_hook")
    assert len([line for line in lines.splitlines() if line]) == 4


def test_they_run_under_torchrun_as_pasted():
    page = json.dumps([only(README, "DistributedSampler"), only(README, "ddp_comm_hook")])
    for rank in run_torchrun(RUN, 2, arguments=(page,), imported=preloaded.TORCH):
        assert rank.returncode == 0, rank.stderr


def test_the_figures_of_the_first_pages_are_those_of_one_run():
    """The table is the same on all three pages, and the sentence above it names its figures and its hosts."""
    tables = [
        re.findall(r"^\| links .*(?:\n\|.*)+", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (README, INDEX, BENCHMARKS)
    ]
    assert tables[0] == tables[1] == tables[2]
    (table,) = tables[0]
    (row,) = re.findall(r"^\| 1 Gbit/s .*$", table, re.MULTILINE)
    _, ddp, _, four = re.findall(r"([\d,]+) ms", row)
    for page in (README, INDEX):
        sentence = " ".join(page.read_text(encoding="utf-8").split("\n\n")[1].split())
        assert "two network namespaces of one machine" in sentence
        assert f"took {four} ms with 4 bits per value, and {ddp} ms with" in sentence
