"""One checkpoint for residuals, model, optimizer and what the user adds; never parts of two moments."""

from __future__ import annotations

from pathlib import Path

import preloaded
import pytest
from launching import Finished, run_ranks

#: What every program below begins with.
COMMON = '''
import os, resource, signal, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
import gradcomp.torch as gc
from small_torch import fails, same
from torch.nn.parallel import DistributedDataParallel

COMPRESSION = gc.Policy(gc.Quantize(4, 32, rounding="nearest"), filter=gc.Filter(min_elements=100))
SGD = {"lr": 0.05, "momentum": 0.9}

def net(seed=0, width=40):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 5))

def make(seed=0, kind=torch.optim.SGD, **arguments):
    model = net(seed)
    opt = gc.DistributedOptimizer(kind(model.parameters(), **(arguments or SGD)), model.named_parameters(), COMPRESSION)
    torch.manual_seed(100 * seed + gc.rank())  # dropout differs between ranks
    return model, opt

def make_hooked(seed=0):
    model = DistributedDataParallel(net(seed))
    state, hook = gc.ddp_comm_hook(model, COMPRESSION)
    model.register_comm_hook(state, hook)
    torch.manual_seed(100 * seed + gc.rank())
    return model, torch.optim.SGD(model.parameters(), **SGD), state

def train(model, opt, first, steps):
    for step in range(first, first + steps):
        data = torch.Generator().manual_seed(1000 * step + gc.rank())
        x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()

def extra(step):
    return {"step": step, "rank": gc.rank(), "random": torch.get_rng_state()}

def everything(model, opt, state):
    """What the next step depends on; not the buffers, which differ between ranks."""
    return {"model": dict(model.named_parameters()), "optimizer": opt.state_dict(), "state": state.compression_state()}

folder = Path(sys.argv[1])
gc.init(timeout_seconds=30, log_level="warning")
mine = folder / f"rank{gc.rank()}"
'''

#: Trains on after its saves, and is killed.
KILLED = (
    COMMON
    + """
model, opt = make()
for end in (2, 4):
    train(model, opt, end - 2, 2)
    gc.save(folder / "apart", opt)
    gc.barrier()
    if end == 2:
        gc.save(folder / "whole", opt, model=model, extra=extra(2))
        torch.save(model.state_dict(), folder / "model.pt") if gc.rank() == 0 else None
        gc.barrier()
torch.save(everything(model, opt, opt), f"{mine} whole.pt")

model, opt, state = make_hooked()
train(model, opt, 0, 2)
gc.save(folder / "hook", state, model=model, optimizer=opt, extra=extra(2))
train(model, opt, 2, 2)
torch.save(everything(model.module, opt, state), f"{mine} hook.pt")
gc.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""
)

#: Saved by itself, a model of step 2 and residuals of step 4; the model is loaded before them and after them.
APART = """
weights = torch.load(folder / "model.pt", weights_only=True)
for before in (True, False):
    model, opt = make(seed=9)
    if before:
        model.load_state_dict(weights)
    gc.load(folder / "apart", opt)
    if not before:
        model.load_state_dict(weights)
    started = {name: value.clone() for name, value in model.named_parameters()}
    for _ in range(2):
        text = fails(gc.StateError, lambda: train(model, opt, 4, 1))
        # A bias in front of batch normalisation has a gradient of rounding errors, and of zeros on some processors.
        assert any(f"parameter '0.weight' (and {n} more)" in text for n in (4, 5)) and "at step 4" in text, text
    assert all(torch.equal(value, started[name]) for name, value in model.named_parameters())
    opt.zero_grad()

# With model=, at once, and nothing has changed.
model, opt = make(seed=9)
model.load_state_dict(weights)
with torch.no_grad():
    model[3].bias += 1
before = opt.compression_state()
assert "parameter '0.weight'" in fails(gc.StateError, lambda: gc.load(folder / "apart", opt, model=model))
first = folder / "apart" / min(os.listdir(folder / "apart"))  # of step 2, as all weights but one
text = fails(gc.StateError, lambda: gc.load(first, opt, model=model))
assert "rank 1: parameter '3.bias' is not" in text, text
assert same(opt.compression_state(), before)
"""

#: Saved together: both frontends go on bit for bit, in a new process.
TOGETHER = """
model, opt = make(seed=9)
found = gc.load(folder / "whole", opt, model=model)
assert (found["step"], found["rank"]) == (2, gc.rank()), found
assert opt.compression_state()["step"] == 2
torch.set_rng_state(found["random"])
train(model, opt, 2, 2)
assert same(everything(model, opt, opt), torch.load(f"{mine} whole.pt", weights_only=True))

model, opt, state = make_hooked(seed=9)
fails(gc.ConfigError, lambda: gc.load(folder / "hook", state, model=model))
found = gc.load(folder / "hook", state, model=model, optimizer=opt)
torch.set_rng_state(found["random"])
train(model, opt, 2, 2)
assert same(everything(model.module, opt, state), torch.load(f"{mine} hook.pt", weights_only=True))
gc.load(folder / "hook", state)  # of step 2, and the model is of step 4
assert "parameter '0.weight'" in fails(gc.StateError, lambda: train(model, opt, 4, 1))
"""

#: What does not fit.
WRONG = """
model, opt = make(seed=9)
before = everything(model, opt, opt)
unchanged = lambda: same(everything(model, opt, opt), before)
adam_model, adam = make(kind=torch.optim.Adam, lr=0.1)
for expected, call in {
    "the saved optimizer is a SGD, this one a Adam": lambda: gc.load(folder / "whole", adam, model=adam_model),
    "there is no checkpoint": lambda: gc.load(folder / "nothing", opt, model=model),
    "rank 0: only tensors": lambda: gc.save(folder / "new", opt, extra={"path": folder}),
}.items():
    text = fails(gc.StateError, call)
    assert expected in text and "rank 1:" in text or expected.startswith("there"), text
for call in (
    lambda: gc.save(folder / "new", opt, model=net()),
    lambda: gc.save(folder / "new", opt, model=opt),
    lambda: gc.save(folder / "new", opt, model=model, optimizer=adam),
    lambda: gc.save(folder / "new", opt, extra=[1]),
    lambda: gc.save(folder / "new", opt, keep=-1),
):
    fails(gc.ConfigError, call)
rank_zero_only = {"model": model} if gc.rank() == 0 else {}
fails(gc.PlanMismatchError, lambda: gc.save(folder / "new", opt, **rank_zero_only))
fails(gc.PlanMismatchError, lambda: gc.load(folder / "whole", opt, **rank_zero_only))
assert gc.load(folder / "nothing", opt, model=model, missing_ok=True) is None
assert unchanged()
assert not list(folder.glob("new/*"))

# One directory is for one optimizer.
small = nn.Linear(7, 20)
other = gc.DistributedOptimizer(torch.optim.SGD(small.parameters(), lr=0.1), small.named_parameters(), COMPRESSION)
assert "whose first layer is '0.weight'" in fails(gc.StateError, lambda: gc.save(folder / "whole", other, model=small))
gc.save(folder / "small", other, model=small)
gc.load(folder / "whole", opt, model=model)
gc.load(folder / "small", other, model=small)

# Ranks whose parameters differ have nothing that is worth saving.
with torch.no_grad():
    small.bias += gc.rank()
text = fails(gc.StateError, lambda: gc.save(folder / "small", other, model=small))
assert "parameter 'bias' differs between rank 0 and rank 1" in text, text
"""

#: A disk that is full on one rank, in the midst of its file or of the model.
FULL = """
model, opt = make()
train(model, opt, 0, 1)
gc.save(folder / "full", opt, model=model, extra=extra(1))
saved = everything(model, opt, opt)["model"]
saved = {name: value.detach().clone() for name, value in saved.items()}
train(model, opt, 1, 1)
(whole,) = (folder / "full").iterdir()
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for rank, limit, name in ((1, 100, "rank-1-of-2"), (0, 4000, "model.pt")):
    if gc.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    text = fails(gc.StateError, lambda: gc.save(folder / "full", opt, model=model))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert f"rank {rank}: {name}" in text and "File too large" in text, text
    gc.barrier()
    assert list((folder / "full").iterdir()) == [whole]
assert gc.load(folder / "full", opt, model=model)["step"] == 1
assert same(dict(model.named_parameters()), saved)
train(model, opt, 1, 1)
"""

#: What stays: the new one and two, or as many as keep= says. What killed saves left goes.
KEPT = """
def numbers():
    gc.barrier()
    found = sorted(int(path.name.partition(".")[0]) for path in (folder / "kept").iterdir())
    gc.barrier()
    return found

for step in range(4):
    gc.save(folder / "kept", opt, extra={"step": step})
assert numbers() == [2, 3, 4], numbers()
left = folder / "kept" / "00000009.0123456789abcdef"
if gc.rank() == 0:
    left.mkdir()
    (left / "rank-1-of-2.safetensors").write_text("of a killed save")
    (left / "manifest.json.partial").write_text("of a killed save")
gc.barrier()
assert gc.load(folder / "kept", opt) == {"step": 3}
gc.save(folder / "kept", opt, extra={"step": 4}, keep=0)
assert numbers() == [10], numbers()
assert gc.load(folder / "kept", opt) == {"step": 4}
(folder / "kept" / "model.pt").write_text("the user's own") if gc.rank() == 0 else None
gc.save(folder / "kept", opt, keep=0)
gc.barrier()
assert gc.load(folder / "kept", opt) == {}
assert (folder / "kept" / "model.pt").exists()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a job of two ranks that was killed has left."""
    made: Path = tmp_path_factory.mktemp("killed")
    killed = run_ranks(KILLED, 2, arguments=(str(made),), imported=preloaded.TORCH)
    assert [one.returncode for one in killed] == [-9, -9], killed
    return made


def ranks(program: str, world: int, folder: Path, **options) -> list[Finished]:
    finished = run_ranks(
        COMMON + program, world, arguments=(str(folder),), imported=preloaded.TORCH, **options
    )
    assert [one.returncode for one in finished] == [0] * world, finished
    return finished


def test_a_killed_job_goes_on_bit_for_bit_or_not_at_all(folder):
    ranks(APART + TOGETHER + WRONG + FULL + KEPT, 2, folder)


#: A save of step 20 is killed after every system call that changes the disk. There are checkpoints of steps 8 and 10.
EVERY_CALL = """
import ctypes, shutil

PTRACE_TRACEME, PTRACE_SYSCALL, PTRACE_SETOPTIONS, SYSGOOD, EXITKILL = 0, 24, 0x4200, 1, 0x100000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long

def traced(save, returned):
    '''Run it in a child until it ends, or until ``returned``, called when a system call has, says to kill it.'''
    child = os.fork()
    if child == 0:
        if libc.ptrace(PTRACE_TRACEME, 0, None, None):
            os._exit(77)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            save()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSTOPPED(status):
        libc.ptrace(PTRACE_SETOPTIONS, child, None, SYSGOOD | EXITKILL)
    stops = 0
    while os.WIFSTOPPED(status):
        if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
            stops += 1  # at the entry and at the return of a call
            if stops % 2 == 0 and returned():
                os.kill(child, signal.SIGKILL)
        libc.ptrace(PTRACE_SYSCALL, child, None, None)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)

def contents():
    return sorted((str(path), path.stat().st_size, path.stat().st_ino) for path in work.rglob("*"))

model, opt = make()
assert gc.load(folder / "whole", opt, model=model)["rank"] == 0  # of two ranks
state = opt.compression_state()
train(model, opt, 2, 1)

def put(step):
    with torch.no_grad():
        model[0].weight.fill_(step)
    opt.state[model[0].weight]["momentum_buffer"].fill_(step)
    opt.load_compression_state({**state, "step": step, "residuals": {
        name: torch.full_like(value, step) for name, value in state["residuals"].items()}})

def held(extra):
    values = [model[0].weight, opt.state[model[0].weight]["momentum_buffer"]]
    now = opt.compression_state()
    values += now["residuals"].values()
    return {now["step"], extra["step"]} | {value for tensor in values for value in tensor.unique().tolist()}

def save(where, step):
    gc.save(where, opt, model=model, extra={"step": step}, keep=1)

base, work = folder / "base", folder / "work"
for step in (8, 10):
    put(step)
    save(base, step)
(base / "00000007.0123456789abcdef").mkdir()
(base / "00000007.0123456789abcdef" / "model.pt").write_text("of a killed save")

def fresh(step):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work)
    put(step)

# A save is killed after each call that changes something: after the others the disk is as before them. Changes are
# counted, not calls: how often a thread waits for another one differs from run to run.
def after(change):
    before, changes = contents(), 0
    def returned():
        nonlocal before, changes
        now = contents()
        changes += now != before
        before = now
        return changes == change
    return returned

outcomes, count = [], 0
while True:
    fresh(20)
    count += 1
    ended = traced(lambda: save(work, 20), after(count))
    if ended == 77:
        sys.exit(77)
    if ended == 0:
        break
    assert ended == -signal.SIGKILL, ended
    put(1)
    found = held(gc.load(work, opt, model=model))
    assert found in ({10}, {20}), (count, found)
    outcomes += found
    if count % 4 == 0:
        put(30)
        save(work, 30)
        assert len(list(work.iterdir())) == 2, list(work.iterdir())
        assert held(gc.load(work, opt, model=model)) == {30}
print(count, outcomes)
assert count > 16, count
assert outcomes == sorted(outcomes) and set(outcomes) == {10, 20}, outcomes
"""


def test_a_save_that_is_killed_after_any_system_call_leaves_the_old_checkpoint_or_the_new_one(folder):
    (finished,) = run_ranks(COMMON + EVERY_CALL, 1, arguments=(str(folder),), timeout=150.0)
    if finished.returncode == 77:
        pytest.skip("ptrace is not allowed here")
    assert finished.returncode == 0, finished
