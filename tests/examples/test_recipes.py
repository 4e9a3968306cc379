"""Every block of the page of recipes runs on two ranks, and leaves them with equal parameters."""

from __future__ import annotations

import json
from pathlib import Path

import preloaded
from documented import RECIPES, blocks
from launching import run_ranks

RUN = """
import json, sys
import torch
import gradcomp.torch as gc

start, *blocks = json.loads(sys.argv[1])
for title, block in blocks:
    torch.manual_seed(gc.rank() if gc.is_initialized() else 0)
    names = {}
    exec(start[1] if not gc.is_initialized() else start[1].replace("gc.init()", ""), names)
    torch.manual_seed(100 + gc.rank())
    exec(block, names)
    flat = torch.cat([p.detach().flatten() for p in names["model"].parameters()])
    both = gc.allgather(flat.unsqueeze(0))
    assert torch.equal(both[0], both[-1]), title
    print("ran", title)
"""


def test_every_recipe_runs_on_two_ranks(tmp_path: Path):
    page = blocks(RECIPES)
    source = f"import os; os.chdir({str(tmp_path)!r})\n" + RUN
    done = run_ranks(source, 2, arguments=(json.dumps(page),), imported=preloaded.TORCH)
    for rank in done:
        assert rank.returncode == 0, rank.stderr
        assert [line[4:] for line in rank.stdout.splitlines() if line.startswith("ran ")] == [
            t for t, _ in page[1:]
        ]
