"""Gradients are recorded as they are before compression: the same elements of all ranks, in a file on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_torch
import torch
from batch import on_ranks
from small_torch import (
    assert_same_on_all_ranks,
    backward,
    data,
    in_ddp,
    net,
    own_gradients,
    shared_folder,
    small,
    wrap,
)

import gradcomp.torch as gc
from gradcomp.analysis import read


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, steps: range) -> list[list[np.ndarray]]:
    """This rank's own gradients of every step."""
    seen = []
    for step in steps:
        seen.append([gradient.numpy() for gradient in own_gradients(model, step=step)])
        small_torch.train(model, opt, 1, step)
    return seen


def prepared(compression: Any = "none") -> tuple[Path, torch.nn.Module, Any]:
    """A path without a file, a model and its optimizer."""
    model = net()
    return shared_folder() / "run.npz", model, wrap(model, compression)


def everyone(mine: np.ndarray) -> np.ndarray:
    return gc.allgather(torch.from_numpy(mine)[None]).numpy()


@on_ranks(2)
def test_all_ranks_gradients_before_compression_are_recorded():
    path, model, opt = prepared(small("topk:density=0.1"))
    with gc.record_gradients(opt, path, every=3) as recorder:
        seen = train(model, opt, range(8))
    assert recorder.steps == [0, 3, 6]
    own = np.stack([np.concatenate([seen[step][0].ravel(), seen[step][2].ravel()]) for step in (0, 3, 6)])
    expected = everyone(own)
    if gc.rank() == 0:
        recording = read(path)
        assert [layer.name for layer in recording.layers] == ["0.weight", "2.weight"]
        assert (recording.steps.tolist(), recording.ranks, recording.every) == ([0, 3, 6], 2, 3)
        np.testing.assert_array_equal(recording.values, expected.transpose(1, 0, 2))
        assert list(path.parent.iterdir()) == [path]


@on_ranks(2)
def test_some_elements_of_some_layers_are_recorded():
    path, model, opt = prepared()
    with gc.record_gradients(opt, path, every=1, layers=["0.*"], elements=10, seed=7):
        seen = train(model, opt, range(1))
    if gc.rank() == 0:
        recording = read(path)
        assert [layer.name for layer in recording.layers] == ["0.weight", "0.bias"]
        for number, gradient in enumerate(seen[0][:2]):
            positions = recording.sampling.positions[number]
            assert len(positions) == 10
            np.testing.assert_array_equal(recording.of(number, 0)[0], gradient.ravel()[positions])


@on_ranks(2)
def test_training_goes_on_as_without():
    weights = []
    for recorded in (False, True):
        model = net()
        opt = wrap(model, small("quantize:bits=4"))
        if recorded:
            gc.record_gradients(opt, shared_folder() / "run.npz", every=2)
        train(model, opt, range(5))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert_same_on_all_ranks(weights[1])


@on_ranks(2)
def test_a_full_recording_keeps_every_other_step():
    path, model, opt = prepared()
    with gc.record_gradients(opt, path, every=1, layers="2.weight", limit_bytes=5 * 2 * 4 * 48) as recorder:
        train(model, opt, range(11))
    assert recorder.steps == [0, 4, 8]
    if gc.rank() == 0:
        recording = read(path)
        assert (recording.steps.tolist(), recording.every) == ([0, 4, 8], 4)


@on_ranks(2)
def test_append_goes_on_with_a_file_and_drops_what_is_repeated():
    path, model, opt = prepared()
    with gc.record_gradients(opt, path, every=2):
        train(model, opt, range(5))
    state = opt.compression_state()
    first = read(path) if gc.rank() == 0 else None
    train(model, opt, range(5, 6))
    with gc.record_gradients(opt, path, every=2, append=True):
        train(model, opt, range(6, 9))
    if first is not None:
        recording = read(path)
        assert recording.steps.tolist() == [0, 2, 4, 6, 8]
        np.testing.assert_array_equal(recording.values[:3], first.values)
    opt.load_compression_state(state)  # of step 5: steps 6 and 8 come again
    with gc.record_gradients(opt, path, every=2, append=True) as recorder:
        assert recorder.steps == [0, 2, 4]


@on_ranks(2)
def test_a_rank_without_a_gradient_is_nan():
    path, model, opt = prepared()
    with gc.record_gradients(opt, path, every=1, layers="*"):
        part = model[0] if gc.rank() == 1 else model
        backward(part)
        opt.step()
    if gc.rank() == 0:
        recording = read(path)
        assert np.isfinite(recording.of(0, 1)).all()
        assert np.isnan(recording.of(2, 1)).all()
        assert np.isfinite(recording.of(2, 0)).all()


@on_ranks(2)
def test_a_step_that_is_thrown_away_is_recorded_too():
    path, model, opt = prepared()
    with gc.record_gradients(opt, path, every=1) as recorder:
        for _ in range(2):
            backward(model)
            opt.zero_grad()
    assert recorder.steps == [0, 1]


@on_ranks(2)
def test_gradients_under_distributed_data_parallel_are_recorded():
    path = shared_folder() / "run.npz"
    model = net()
    ddp, state = in_ddp(model)
    with gc.record_gradients(state, path, every=1) as recorder:
        backward(ddp)
    assert recorder.steps == [0]
    if gc.rank() == 0:
        np.testing.assert_array_equal(read(path).of(0, 0)[0], own_gradients(net())[0].numpy().ravel())


@on_ranks(2)
def test_gradients_of_two_bytes_are_recorded_as_float32():
    path = shared_folder() / "run.npz"
    model = net().to(torch.bfloat16)
    opt = wrap(model)
    with gc.record_gradients(opt, path, every=1):
        model(data(0).bfloat16()).float().square().mean().backward()
        opt.zero_grad()
    if gc.rank() == 0:
        values = read(path).values
        assert np.isfinite(values).all()
        assert (torch.from_numpy(values.copy()).bfloat16().float().numpy() == values).all()


@on_ranks(2)
def test_a_disk_that_is_full_ends_the_recording_on_all_ranks():
    path, model, opt = prepared()
    recorder = gc.record_gradients(opt, path, every=1)
    if gc.rank() == 0:
        path.unlink()
        path.mkdir()  # a rename to it fails
        logging.getLogger("gradcomp").setLevel(logging.ERROR)
    train(model, opt, range(4))
    assert len(recorder.steps) < 4
    assert opt._exchanger_or_none().recorder is None
    assert_same_on_all_ranks(model.parameters())


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], type[Exception], str]] = {
    "every": (lambda path: {"every": 0}, gc.ConfigError, "every must be"),
    "elements": (lambda path: {"elements": True}, gc.ConfigError, "elements must"),
    "layers": (lambda path: {"layers": "x*"}, gc.ConfigError, r"no layer matches 'x\*'"),
    "path": (lambda path: {"path": path if gc.rank() == 0 else None}, gc.ConfigError, "got None"),
    "optimizer": (lambda path: {"opt": object()}, gc.ConfigError, "got object"),
    "limit": (lambda path: {"limit_bytes": 100}, gc.ConfigError, "fewer elements"),
    "no directory": (
        lambda path: {"path": path / "missing" / "run"},
        gc.ConfigError,
        "cannot write the recording",
    ),
    "ranks differ": (lambda path: {"every": 1 + gc.rank()}, gc.PlanMismatchError, "every="),
    "one rank": (
        lambda path: {} if gc.rank() else {"opt": object()},
        gc.ConfigError,
        "rank 0: expected what DistributedOptimizer",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_on_all_ranks(case: str):
    arguments, error, message = BAD[case]
    path, model, opt = prepared()
    given = {"opt": opt, "path": path, **arguments(path)}
    with pytest.raises(error, match=message):
        gc.record_gradients(given.pop("opt"), given.pop("path"), **given)
    assert not list(path.parent.iterdir())
    train(model, opt, range(2))
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_files_that_cannot_be_continued_are_refused():
    path = shared_folder() / "run.npz"
    opt = wrap(net())
    gc.record_gradients(opt, path, every=4).close()
    with pytest.raises(gc.ConfigError, match="exists: append=True"):
        gc.record_gradients(opt, path)
    with pytest.raises(gc.ConfigError, match="other layers, elements or ranks"):
        gc.record_gradients(opt, path, every=4, append=True, layers="0.bias")
    with pytest.raises(gc.ConfigError, match="times a power of two"):
        gc.record_gradients(opt, path, every=3, append=True)
    gc.record_gradients(opt, path, every=2, append=True)
    with pytest.raises(gc.StateError, match="recorded already"):
        gc.record_gradients(opt, path, every=2, append=True)


@on_ranks(1)
def test_a_world_of_one_has_nothing_to_record():
    opt = wrap(net())
    with pytest.raises(gc.ConfigError, match="a world of one rank"):
        gc.record_gradients(opt, shared_folder() / "run.npz")
