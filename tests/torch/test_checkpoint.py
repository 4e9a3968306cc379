"""An interrupted job goes on bit for bit, other numbers of ranks lose nothing, what cannot be loaded is an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import preloaded
import pytest
from launching import Finished, run_ranks

from gradcomp.exchange import checkpoint

#: What every program below begins with.
COMMON = '''
import json, logging, os, shutil, signal, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
import gradcomp.torch as gc
from small_torch import fails, same
from torch.nn.parallel import DistributedDataParallel

HALF = 4
FEEDBACK, HOOK = "4 bits nearest", "4 bits nearest under a hook"
KINDS = {
    FEEDBACK: gc.Quantize(4, 32, rounding="nearest"),
    HOOK: gc.Quantize(4, 32, rounding="nearest"),
    "1 bit nearest": gc.Quantize(1, 16, rounding="nearest"),
    "stochastic": gc.Quantize(3, 33),
    "bf16": gc.Compression.bf16,
    "none": gc.Compression.none,
}

class Net(nn.Module):
    """Not registered in the order of use, with a layer that is used in some steps only."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(24, 5)
        self.seldom = nn.Linear(24, 24)
        self.first = nn.Linear(12, 40)
        self.norm = nn.LayerNorm(40)
        self.second = nn.Linear(40, 24)

    def forward(self, x, seldom):
        x = torch.tanh(self.second(self.norm(torch.tanh(self.first(x)))))
        return self.last(self.seldom(x) if seldom else x)

def make(name=FEEDBACK, seed=0):
    """A model, its optimizer, and what has the compression state."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = gc.Policy(KINDS[name], filter=gc.Filter(min_elements=100))
    if name == HOOK:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.003, find_unused_parameters=True)
        state, hook = gc.ddp_comm_hook(ddp, compression)
        ddp.register_comm_hook(state, hook)
        return ddp, optimizer, state
    wrapped = gc.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    return model, wrapped, wrapped

def backward(model, step):
    data = torch.Generator().manual_seed(1000 * step + gc.rank())
    x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
    F.cross_entropy(model(x, step in (1, 6)), y).backward()

def train(model, opt, first, steps):
    for step in range(first, first + steps):
        opt.zero_grad()
        backward(model, step)
        opt.step()

def everything(model, opt, state):
    return {"model": model.state_dict(), "optimizer": opt.state_dict(), "compression": state.compression_state()}

folder = Path(sys.argv[1])
gc.init(slice_elements=256, cold_after_steps=2, timeout_seconds=30, log_level="warning")
if gc.size() > 2:  # what two ranks show of each kind
    KINDS = {FEEDBACK: KINDS[FEEDBACK]}
mine = folder / f"rank{gc.rank()}-of-{gc.size()}"
'''

FIRST_HALF = (
    COMMON
    + """
for name in KINDS:
    model, opt, state = make(name)
    train(model, opt, 0, HALF)
    gc.save(folder / name, state)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, f"{mine} {name} half.pt")
    held = state.compression_state()
    assert held["step"] == HALF
    assert any(value.any() for value in held["residuals"].values()) == ("nearest" in name)
    if name != HOOK:
        assert held["cold"] == ["seldom.bias", "seldom.weight"], held
        assert sorted(held["order"][:2]) == ["last.bias", "last.weight"], held
        assert len(opt.buckets()) > (1 if name == "none" else 5)
    train(model, opt, HALF, HALF)
    torch.save(everything(model, opt, state), f"{mine} {name} whole.pt")

# A save changes nothing.
for name in KINDS.keys() - {HOOK}:
    model, opt, state = make(name)
    train(model, opt, 0, 2 * HALF)
    assert same(everything(model, opt, state), torch.load(f"{mine} {name} whole.pt", weights_only=True)), name
"""
)

SECOND_HALF = (
    COMMON
    + """
for name in KINDS:
    model, opt, state = make(name, seed=9)
    half = torch.load(f"{mine} {name} half.pt", weights_only=True)
    model.load_state_dict(half["model"])
    opt.load_state_dict(half["optimizer"])
    gc.load(folder / name, state)
    train(model, opt, HALF, HALF)
    whole = torch.load(f"{mine} {name} whole.pt", weights_only=True)
    now = everything(model, opt, state)
    for part in whole:
        for key in whole[part]:
            assert same(now[part][key], whole[part][key]), (name, part, key)

    plain_model = Net()
    plain = torch.optim.SGD(plain_model.parameters(), lr=1.0, momentum=0.9)
    plain.load_state_dict(half["optimizer"])
    assert plain.state_dict()["param_groups"][0]["lr"] == 0.05
    assert same(plain.state_dict()["state"], half["optimizer"]["state"])
"""
)

#: A checkpoint of another number of ranks, in "other", is taken over.
RESIZE = """
if (folder / "other").exists():
    model, opt, _ = make()
    model.load_state_dict(torch.load(folder / "other.pt", weights_only=True)["model"])
    gc.load(folder / "other", opt)
    gc.save(folder / "taken over", opt)
    assert opt.compression_state()["step"] == HALF
    if gc.size() > 1:
        train(model, opt, HALF, 2)
        opt.add_param_group({"params": [nn.Parameter(torch.randn(20, 20))], "names": ["extra"]})
        assert opt.compression_state()["step"] == HALF + 2
        assert "extra" in opt.compression_state()["residuals"]
if gc.size() == 1:
    torch.distributed.init_process_group("gloo")
    ddp, _, state = make(HOOK)
    gc.save(folder / "hook", state, extra={"step": 1})
    assert gc.load(folder / "hook", state) == {"step": 1}
assert "expected what" in fails(gc.ConfigError, lambda: gc.save(folder / "new", nn.Linear(1, 1)))
"""


def ranks(program: str, world: int, folder: Path, **options) -> list[Finished]:
    finished = run_ranks(program, world, arguments=(str(folder),), imported=preloaded.TORCH, **options)
    assert [one.returncode for one in finished] == [0] * world, finished
    return finished


def other(made: Path, folder: Path, name: str = "4 bits nearest") -> None:
    """What one job saved becomes what another takes over, in the form of format 1."""
    format_1(made / name, folder / "other")
    model = folder / "other.pt"
    shutil.copy(made / "rank0-of-2 4 bits nearest half.pt", model)


def format_1(made: Path, folder: Path) -> None:
    """The last checkpoint of a directory, as versions before wrote it: no directory of its own, names with a token."""
    last = made / checkpoint.last(made)
    body = json.loads((last / checkpoint.MANIFEST).read_text())
    del body["digest"], body["parts"], body["parameters"]
    folder.mkdir()
    for file in body["files"]:
        name = file["name"].replace(".safetensors", ".0123456789abcdef.safetensors")
        shutil.copy(last / file["name"], folder / name)
        file["name"] = name
    body["format"] = 1
    text = json.dumps({**body, "digest": checkpoint._digest(body)}, indent=1)
    (folder / checkpoint.MANIFEST).write_text(text)


def last_manifest(folder: Path) -> checkpoint.Manifest:
    return checkpoint.Manifest.from_text(checkpoint.read_manifest(folder / checkpoint.last(folder)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """Checkpoints of jobs of 2 and of 3 ranks, each in its folder."""
    made = {world: tmp_path_factory.mktemp(f"world{world}") for world in (2, 3)}
    for world, folder in made.items():
        ranks(FIRST_HALF, world, folder)
    other(made[2], made[3])
    return made


@pytest.fixture(scope="module")
def resumed(folders) -> dict[int, list[Finished]]:
    """The same jobs, gone on with in new processes; that of 3 ranks has taken over the checkpoint of 2 as well."""
    return {world: ranks(SECOND_HALF + RESIZE, world, folder) for world, folder in folders.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_resumed_is_uninterrupted(resumed, world: int):
    for finished in resumed[world]:
        assert "WARNING" not in finished.stderr
        assert "compression state" not in finished.stderr


# ----------------------------------------------------------------------------------------- other numbers of ranks


def owed(folder: Path) -> dict[str, np.ndarray]:
    """Per layer, the mean of the first residuals and the owners' second ones, in float64."""
    manifest = last_manifest(folder)
    world, names = len(manifest.files), list(manifest.shared.layers)
    total: dict[str, np.ndarray] = {}
    for rank in range(world):
        state = checkpoint.read_rank(folder / checkpoint.last(folder), manifest, rank)
        for name, value in state.first.items():
            total[name] = total.get(name, 0.0) + value.astype(np.float64) / world
        at = 0
        for r in state.ranges:
            total[names[r.layer]].reshape(-1)[r.start : r.end] += state.second[at : at + r.length]
            at += r.length
    return total


def test_other_numbers_of_ranks_keep_the_mean_residual(folders, resumed, tmp_path):
    expected = owed(folders[2] / "4 bits nearest")
    assert all(value.any() for name, value in expected.items() if name != "seldom.weight")
    last = folders[3]
    for world in (1, 2):
        folder = tmp_path / str(world)
        shutil.copytree(last / "taken over", folder / "other")
        shutil.copy(last / "other.pt", folder / "other.pt")
        ranks(COMMON + RESIZE, world, folder)
        (saved,) = (folder / "taken over").iterdir()
        assert len(list(saved.iterdir())) == world + 1
        for made in (last, folder):
            for name, value in owed(made / "taken over").items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-12)
        last = folder


# ------------------------------------------------------------------------------------------------ what goes wrong

WRONG = (
    COMMON
    + """
model, opt, _ = make()
StateError, ConfigError = gc.StateError, gc.ConfigError

def unchanged(call):
    before = opt.compression_state()
    text = call()
    assert same(opt.compression_state(), before)
    return text

train(model, opt, 0, 2)
for case, expected in json.loads((folder / "cases.json").read_text()).items():
    text = unchanged(lambda: fails(StateError, lambda: gc.load(folder / case, opt)))
    assert expected in text, (case, text)

# Another model: one error lists all layers.
other = nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 5))
other_opt = gc.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters(), "fp16")
text = fails(StateError, lambda: gc.load(folder / "good", other_opt))
for part in ("unknown layer 'first.weight'", "unknown layer 'norm.bias'", "missing layer '0.weight'",
             "missing layer '1.bias'", "rank 0", "rank 1"):
    assert part in text, (part, text)
assert other_opt.compression_state()["step"] == 0

# A step open: on all ranks, or on one only.
backward(model, 2)
for call in (lambda: gc.save(folder / "new", opt), lambda: gc.load(folder / "good", opt)):
    assert "rank 0: a step is open" in fails(StateError, call)
assert "a step is open" in fails(StateError, opt.compression_state)
opt.zero_grad()
if gc.rank() == 1:
    with opt.no_sync():
        backward(model, 2)
assert "gc.save: rank 1: a step is open" in fails(StateError, lambda: gc.save(folder / "new", opt))
opt.zero_grad()
assert not (folder / "new").exists()

# An exchange that cannot be accepted any more is no open step: a loss scaler skipped it.
steps = opt._gradcomp.exchanger.pipeline.step
(model.last.weight.sum() * float("nan")).backward()
assert opt.compression_state()["step"] == steps + 1
opt.zero_grad()

# Wrong use, on one rank only.
thing = opt if gc.rank() == 0 else model
assert "rank 1: expected what DistributedOptimizer" in fails(ConfigError, lambda: gc.save(folder / "new", thing))
if gc.rank() == 0:
    text = fails(gc.PlanMismatchError, lambda: gc.save(folder / "new", opt))
else:
    text = fails(gc.PlanMismatchError, lambda: gc.load(folder / "good", opt))
assert "gc.save" in text and "gc.load" in text
(folder / "occupied").write_text("") if gc.rank() == 0 else None
gc.barrier()
text = fails(StateError, lambda: gc.save(folder / "occupied", opt))
assert "rank 1: " in text and "File exists" in text, text

# Ranks at different steps.
state = opt.compression_state()
if gc.rank() == 1:
    opt.load_compression_state({**state, "step": 77})
assert "not at the same step" in fails(StateError, lambda: gc.save(folder / "new", opt))
assert "state of rank" in fails(StateError, lambda: opt.load_compression_state({**state, "rank": 1 - gc.rank()}))
for hostile in (None, {}, [], {**state, "residuals": 3}, {**state, "second_residuals": [1.0]}, {**state, "rank": "0"},
                {**state, "second_residual_ranges": [["first.weight", 0, 1.5]]}, {**state, "residuals": {}}):
    fails(StateError, lambda: opt.load_compression_state(hostile))
torch.save(state, f"{mine} state.pt")
opt.load_compression_state(torch.load(f"{mine} state.pt", weights_only=True))
assert same(opt.compression_state(), state)

# After all that, good ones still load, and the next save takes their place.
gc.load(folder / "good", opt)
assert opt.compression_state()["step"] == HALF
half = torch.load(folder / "good.pt", weights_only=True)["model"]
model.load_state_dict(half)
assert not list(folder.glob("new/*"))

# One of format 1 still loads, counts as the oldest, and goes when its time has come.
old = folder / "old"
gc.load(old, opt)
assert opt.compression_state()["step"] == HALF
(old / "rank-1-of-2.fedcba9876543210.safetensors").write_text("of a killed save")
gc.save(old, opt, keep=1)
gc.barrier()
assert (old / "manifest.json").exists() and len(list(old.iterdir())) == 5, list(old.iterdir())
gc.save(old, opt, keep=1)
gc.barrier()
assert len(list(old.iterdir())) == 2, list(old.iterdir())

# Only the optimizer's state: said once.
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("gradcomp").addHandler(handler)
train(model, opt, HALF, 1)
gc.broadcast_optimizer_state(opt)
train(model, opt, HALF + 1, 1)
assert not heard, heard
for _ in range(2):
    opt.load_state_dict(opt.state_dict())
    model.load_state_dict(half)
    gc.load(folder / "good", opt)
    train(model, opt, HALF, 1)
    gc.load(folder / "good", opt)
    opt.load_state_dict(opt.state_dict())
    model.load_state_dict(half)
    train(model, opt, HALF, 1)
assert not heard, heard
opt.load_state_dict(opt.state_dict())
train(model, opt, HALF, 2)
assert len(heard) == 1 and "start again from zero" in heard[0], heard
"""
)


def damaged(good: Path, folder: Path) -> dict[str, str]:
    """Copies of a checkpoint, each broken in its own way; and what the error must say."""
    expected: dict[str, str] = {}

    def case(name: str, text: str) -> Path:
        expected[name] = text
        return Path(shutil.copytree(good, folder / name))

    def edited(name: str, text: str, *, sealed: bool = True, **changes) -> None:
        path = case(name, text) / checkpoint.MANIFEST
        body = {**json.loads(path.read_text()), **changes}
        if sealed:
            del body["digest"]
            body["digest"] = checkpoint._digest(body)
        path.write_text(json.dumps(body))

    whole = json.loads((good / checkpoint.MANIFEST).read_text())
    files = whole["files"]
    expected["nothing"] = "there is no checkpoint in"
    for path in case("no manifest", "there is no checkpoint in").glob("manifest.json"):
        path.unlink()
    for name, text in {"empty": b"", "binary": b"\xff\0\1", "deep": b"[" * 10**6}.items():
        path = case(f"{name} manifest", "the checkpoint's manifest is damaged") / checkpoint.MANIFEST
        path.write_bytes(text)
    (case("list manifest", "is not that of a gradcomp checkpoint") / checkpoint.MANIFEST).write_text("[1]")
    edited("other kind", "is not that of a gradcomp checkpoint", kind="another")
    edited("other format", "format 99 (of gradcomp '7.0'), this gradcomp", format=99, gradcomp="7.0")
    edited("edited", "does not match its digest", sealed=False, shared={**whole["shared"], "step": 3})
    edited("many ranks", "a file for each of 3 ranks", world=3)
    edited("no ranks", "a file for each of 0 ranks", world=0, files=[])
    edited("no files", "a file for each of 2 ranks", files=None)
    inside = "rank-0-of-2.0123456789abcdef.safetensors/.."
    for name in ("../secret", "/etc/passwd", inside, "rank-0-of-2", "manifest.json", ""):
        case_name = f"escaping {name.replace('/', ' ')}"
        edited(case_name, "impossible file", files=[{**files[0], "name": name}, files[1]])
    edited("endless", "impossible file", files=[{**files[0], "nbytes": 2**60}, files[1]])
    edited("odd files", "malformed file entry", files=[1, 2])
    edited("negative step", "not a compression state", shared={**whole["shared"], "step": -1})
    edited("no layers", "not a compression state", shared={**whole["shared"], "layers": []})
    edited("nothing shared", "not a compression state", shared=None)
    swapped = [{**files[1], "name": files[0]["name"]}, files[1]]
    edited("other rank's file", "rank 0: rank-0-of-2", files=swapped)
    (case("missing file", "rank 1: rank-1-of-2") / files[1]["name"]).unlink()
    path = case("cut file", "does not have the") / files[1]["name"]
    path.write_bytes(path.read_bytes()[:-1])
    path = case("long file", "does not have the") / files[1]["name"]
    path.write_bytes(path.read_bytes() + b"\0")
    path = case("flipped bit", "does not match its checksum") / files[0]["name"]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    return expected


def test_what_cannot_be_saved_or_loaded_is_the_same_error_on_every_rank(folders, tmp_path):
    saves = folders[2] / "4 bits nearest"
    good = Path(shutil.copytree(saves / checkpoint.last(saves), tmp_path / "good"))
    shutil.copy(folders[2] / "rank0-of-2 4 bits nearest half.pt", tmp_path / "good.pt")
    format_1(saves, tmp_path / "old")
    (tmp_path / "cases.json").write_text(json.dumps(damaged(good, tmp_path)))
    ranks(WRONG, 2, tmp_path)


KILLED = (
    COMMON
    + """
from gradcomp.exchange import checkpoint

model, opt, _ = make()
train(model, opt, 0, 2)
gc.save(folder, opt)
gc.barrier()
train(model, opt, 2, 1)
write_files = checkpoint.write_files

def killed(directory, writers):
    write_files(directory, writers)
    os.kill(os.getpid(), signal.SIGKILL)

if gc.rank() == 1:
    checkpoint.write_files = killed
fails(gc.TransportError, lambda: gc.save(folder, opt))
"""
)


def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(tmp_path):
    folder = tmp_path / "checkpoint"
    first, second = run_ranks(KILLED, 2, arguments=(str(folder),), imported=preloaded.TORCH)
    assert second.returncode == -9
    assert first.returncode == 0, first
    assert len(list(folder.iterdir())) == 2  # both saves, of which one has no manifest
    manifest = last_manifest(folder)
    assert manifest.shared.step == 2
    for rank in range(2):
        assert not checkpoint.read_rank(folder / checkpoint.last(folder), manifest, rank).problems()
