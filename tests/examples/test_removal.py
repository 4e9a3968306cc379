"""The code of the page "Remove gradcomp": a run with residuals goes on where gradcomp cannot be imported."""

from __future__ import annotations

import json
from pathlib import Path

import preloaded
from documented import ROOT, blocks
from launching import run_ranks

PAGE = ROOT / "docs/remove.md"

START = """
import json, os, sys
import torch

directory, page = sys.argv[1], json.loads(sys.argv[2])
os.chdir(directory)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
torch.manual_seed(1 + rank)
batches = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(8)]
loader = batches[4:6]

def train(ddp, steps):
    for inputs, targets in steps:
        opt.zero_grad()
        criterion(ddp(inputs), targets).backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
"""

WITH = """
import gradcomp.torch as gc

gc.init()
gc.broadcast_parameters(model.state_dict(), root_rank=0)
opt = gc.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression="topk:density=0.05")

def residuals():
    return sum(float(r.abs().sum()) for r in opt.compression_state()["residuals"].values())

train(model, batches[:4])
gc.save("checkpoint", opt, model=model)
before = residuals()
if rank == 0:
    torch.save([model.state_dict(), opt.state_dict()], "held.pt")
exec(page[0])
assert before > 0 and residuals() == 0
end = train(model, batches[6:])
if rank == 0:
    torch.save(end, "end.pt")
gc.shutdown()
"""

WITHOUT = """
sys.modules["gradcomp"] = None  # an import of it is an error
import torch.distributed as dist

dist.init_process_group("gloo")
exec(page[2])
states, optimizer = torch.load("held.pt")
assert all(torch.equal(states[name], found) for name, found in model.state_dict().items())
assert all(torch.equal(s["momentum_buffer"], opt.state_dict()["state"][i]["momentum_buffer"])
           for i, s in optimizer["state"].items())
exec(page[1])
assert not torch.equal(states["0.weight"], model.state_dict()["0.weight"])
ended = train(torch.nn.parallel.DistributedDataParallel(model), batches[6:])
torch.testing.assert_close(ended, torch.load("end.pt"))
dist.destroy_process_group()
"""


def test_a_run_goes_on_without_gradcomp_as_it_would_have_with_it(tmp_path: Path):
    page = [code for _, code in blocks(PAGE)]
    assert len(page) == 3
    for source, imported in ((WITH, preloaded.TORCH), (WITHOUT, ("batch", "torch._dynamo"))):
        arguments = (str(tmp_path), json.dumps(page))
        for rank in run_ranks(START + source, 2, arguments=arguments, imported=imported):
            assert rank.returncode == 0, rank.stderr
