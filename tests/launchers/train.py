"""The script that every launcher starts, unchanged: a few compressed steps, then who this rank is and what it has.

    LAUNCHER ... python train.py DIRECTORY

Each rank writes DIRECTORY/<rank>.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import gradcomp.torch as gc
from gradcomp.job.runtime import current

STEPS = 5


def main() -> None:
    gc.init(timeout_seconds=60)
    torch.manual_seed(gc.rank())  # every rank starts elsewhere and sees data of its own
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression="quantize:bits=4",
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(16, 64)), torch.randn(16, 8)).backward()
        optimizer.step()
    launch = current().launch
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    report = {
        "place": [
            *(gc.rank(), gc.size(), gc.local_rank(), gc.local_size()),
            *(gc.cross_rank(), gc.cross_size()),
        ],
        "launcher": launch.launcher,
        "host": launch.host,
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "network": str(Path("/proc/self/ns/net").readlink()),
        "parameters": digest,
        "ratio": optimizer.statistics().ratio,
        "horovod_was_imported": "horovod" in sys.modules,
        "transports": [type(exchanger.pipeline.transport).__name__ for exchanger in current().exchangers],
    }
    (Path(sys.argv[1]) / f"{gc.rank()}.json").write_text(json.dumps(report))
    gc.shutdown()


if __name__ == "__main__":
    main()
