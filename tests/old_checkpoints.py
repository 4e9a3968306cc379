"""Checkpoints of every compressor, written by the code before the exchange became one package, and how to resume them.

``python tests/old_checkpoints.py write FOLDER``, on two ranks, trains and saves; ``resume FOLDER`` loads and goes on.
``torch/golden/checkpoints.zip`` holds what commit 0323b8b wrote. ``write FOLDER nets`` and ``resume FOLDER nets`` do
the same with ``NETS``; ``torch/golden/nets.zip`` holds what commit 65207520 wrote, whose decoders had four
deconvolutions.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import gradcomp.torch as gc
from gradcomp.compress import from_string
from gradcomp.contrib.lgc.autoencoder import Autoencoder

COMPRESSIONS = (
    "adacomp", "best_rank:rank=2", "block_float", "cast:dtype=bfloat16,feedback=true", "clt_k:density=0.1",
    "codebook:levels=0.25/1.0", "density_schedule[topk]:levels=0.3/0.1,steps_per_level=2",
    "dgc:density=0.1,momentum_factor=0.9,warmup_steps=2", "ef21[topk:density=0.1]",
    "error_feedback[quantize:bits=3]", "global_topk:density=0.1", "lgc:density=0.05,least_parameters=0",
    "local_clip[topk:density=0.1]:max_norm=0.5", "momentum_correction[topk:density=0.1]:factor=0.5", "none",
    "nuqsgd", "one_bit", "powersgd:rank=2", "quantize:bits=4,rounding=nearest", "quantize:bits=3",
    "random_block:density=0.1", "random_k:density=0.1", "redsync:density=0.1", "sidco:density=0.1",
    "scaled_sign", "signum", "spectral_atomo:rank=2", "terngrad", "threshold:threshold=0.5",
    "topk:density=0.1", "two_level_selection[topk:density=0.1]", "unbiased_rank:rank=2",
    "warmup[topk:density=0.1]:steps=2",
)  # fmt: skip
#: LGC while its nets are trained, and when it sends codes.
NETS = (
    "lgc:density=0.2,learning_rate=0.01,warmup_steps=1,train_steps=5,ends=false,least_parameters=0,train_share=1.0",
    "lgc:form=server,density=0.2,warmup_steps=1,train_steps=2,ends=false,least_parameters=0,train_share=1.0",
)
STEPS = 4


def train(model: torch.nn.Linear, opt: torch.optim.Optimizer, first: int) -> None:
    """Take steps on gradients that are the same on every machine."""
    for step in range(first, first + STEPS):
        draws = np.random.default_rng((step, gc.rank()))
        opt.zero_grad()
        loss = sum(
            (p * torch.tensor(draws.integers(-64, 65, p.shape) / 64.0).float()).sum()
            for p in model.parameters()
        )
        loss.backward()
        opt.step()


def values(model: torch.nn.Linear) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def make_narrow() -> None:
    """Let nets begin with 8 channels a layer and zeros for the others, so that their checkpoints are small files."""
    draw = Autoencoder.first_weights

    def narrow(self: Autoencoder, seed: int) -> np.ndarray:
        drawn = draw(self, seed)
        for i, weights in enumerate(self.layers(drawn)):
            rows, columns = weights.shape
            channels = columns // 3 if columns % 3 == 0 else columns
            inside = np.arange(columns) % channels < 8
            inside |= np.arange(columns) >= 32 if i == 9 else False  # innovations
            weights[:] = np.where(inside & (np.arange(rows) < 8)[:, None], 2 * weights, np.float32(0))
        return drawn

    Autoencoder.first_weights = narrow


def main(what: str, folder: Path, which: str = "") -> None:
    gc.init(timeout_seconds=60)
    if which == "nets" and what == "write":
        make_narrow()
    for number, text in enumerate(NETS if which == "nets" else COMPRESSIONS):
        torch.manual_seed(0)
        model = torch.nn.Linear(24, 20, bias=False)
        policy = gc.Policy(from_string(text), filter=gc.Filter(min_elements=1))
        opt = gc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters(), policy
        )
        directory = folder / str(number)
        if what == "write":
            train(model, opt, 0)
            gc.save(directory, opt)
            half = values(model)
            train(model, opt, STEPS)
            if gc.rank() == 0:
                np.savez_compressed(directory / "parameters.npz", half=half, whole=values(model))
        else:
            saved = np.load(directory / "parameters.npz")
            torch.nn.utils.vector_to_parameters(torch.from_numpy(saved["half"]), model.parameters())
            gc.load(directory, opt)
            train(model, opt, STEPS)
            np.testing.assert_allclose(values(model), saved["whole"], rtol=1e-5, atol=1e-6, err_msg=text)
    gc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
