"""Elastic training: ranks die and come, and the others go on from the last commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from batch import on_ranks
from elastic_job import job, telescoped, went_on
from launching import TORCHRUN, run_command

import gradcomp.torch as gc
from gradcomp.cli import main
from gradcomp.job.generations import Limits, Member
from gradcomp.job.jobstore import serve_alone

#: Trains a matrix whose gradient on each rank is known, and says at each commit what was sent and what was not.
TRAINING = """
    import hashlib, json, os, signal, sys
    import torch
    import gradcomp.torch as gc

    compression, steps = sys.argv[1], int(sys.argv[2])
    least, die = int(os.environ.get("LEAST", 1)), int(os.environ.get("DIE", -1))
    gc.init(timeout_seconds=40)
    model = torch.nn.Linear(40, 64)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"controller": os.environ["CONTROLLER"]} if "CONTROLLER" in os.environ else {}
    opt = gc.DistributedOptimizer(opt, model.named_parameters(), compression=compression, **given)
    state = gc.elastic.TorchState(model=model, optimizer=opt, step=0, sizes=[])
    drawn = torch.Generator().manual_seed(os.getpid())


    def say(**values):
        print(json.dumps(values), flush=True)


    def fields():
        found = opt.compression_state()["fields"]
        return {kind: sum(value.double().sum().item() for value in values.values()) for kind, values in found.items()}


    def left(state):
        found = opt.compression_state()
        second = found["second_residuals"].sum().item()
        return [sum(v.double().sum().item() for v in found["residuals"].values()), second]


    @gc.elastic.run
    def train(state):
        state.sizes = [*state.sizes, gc.size()]
        begun = state.step
        own, first, before = 0.0, model.weight.double().sum().item(), left(state)
        say(pid=os.getpid(), rank=gc.rank(), size=gc.size(), begun=begun, left=before)
        while state.step < max(steps, begun + 2) or gc.size() < least:
            gradient = torch.randn(model.weight.shape, generator=drawn)
            opt.zero_grad()
            (model.weight * gradient).sum().backward()
            if state.step >= die >= 0 and state.step > begun:
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
            own += gradient.double().sum().item()
            state.step += 1
            applied = first - model.weight.double().sum().item()
            say(rank=gc.rank(), size=gc.size(), begun=begun, step=state.step, own=own, applied=applied,
                before=before, after=left(state), fields=fields())
            state.commit()


    train(state)
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    say(digest=digest, step=state.step, sizes=state.sizes)
"""


@pytest.mark.parametrize(
    ("world", "die", "come"),
    [(3, {0: 4}, 0), (4, {0: 3, 2: 3}, 0), (3, {1: 2, 2: 5}, 1), (2, {0: 4}, 1), (1, {}, 2)],
    ids=[
        "rank 0 of three",
        "two of four at once",
        "one after another, and one comes",
        "one of two",
        "one grows",
    ],
)
def test_survivors_and_newcomers_end_with_one_model(world, die, come) -> None:
    with job(TRAINING, GRADCOMP_MIN_RANKS=world if world > 1 else 1) as started:
        least = world - len(die) + come
        for number in range(world):
            started.start("topk:density=0.05", 8, DIE=die.get(number, -1), LEAST=least, GRADCOMP_MIN_RANKS=1)
        for number in die:
            assert started.wait(number) == -9
        for _ in range(come):
            started.start("topk:density=0.05", 8, LEAST=least, GRADCOMP_MIN_RANKS=1)
        ends = started.finish()
        assert ends == [-9 if number in die else 0 for number in range(world + come)], [
            started.log(n) for n in range(world + come)
        ]
        results = [started.said(n)[-1] for n in range(world + come) if n not in die]
        assert len({result["digest"] for result in results}) == 1
        assert results[0]["sizes"][-1] == least


@pytest.mark.parametrize("compression", ["topk:density=0.05", "quantize:bits=4,feedback=true"])
def test_what_was_applied_and_what_is_left_are_the_gradients(compression) -> None:
    """N (w_0 - w_t) = sum over ranks of g_i + r_i(0) - r_i(t), and N times the same of server-side errors."""
    with job(TRAINING) as started:
        for number in range(3):
            started.start(compression, 8, DIE=4 if number == 1 else -1, LEAST=3)
        started.wait(1)
        # The newcomer comes after the two that are left have taken a step.
        started.until(
            lambda: all(any("applied" in one and one["size"] == 2 for one in started.said(n)) for n in (0, 2))
        )
        started.start(compression, 8, LEAST=3)
        assert started.finish() == [0, -9, 0, 0], [started.log(n) for n in range(4)]
        sizes = telescoped([started.said(n) for n in range(4)])
        assert sizes >= {2, 3}
        begins = [one for one in started.said(3) if "left" in one]
        assert begins[0]["left"][0] == 0.0, "a newcomer has no residual"
        for number in (0, 2):
            went_on(started.said(number))
        logs = "".join(started.log(n) for n in (0, 2))
        assert "is gone: its residuals, 2560 elements" in logs


@pytest.mark.parametrize(
    ("compression", "controller"),
    [("powersgd:rank=2", ""), ("ef21[topk:density=0.05]", ""), ("dgc:density=0.05", ""),
     ("clt_k:density=0.05,refresh=3", ""), ("quantize:bits=4", "lgreco:every_steps=2")],
)  # fmt: skip
def test_state_that_is_equal_on_all_ranks_stays_so(compression, controller) -> None:
    given = {"CONTROLLER": controller} if controller else {}
    with job(TRAINING, **given) as started:
        for number in range(3):
            started.start(compression, 9, DIE=4 if number == 0 else -1, LEAST=3)
        started.wait(0)
        started.start(compression, 9, LEAST=3)
        assert started.finish() == [-9, 0, 0, 0], [started.log(n) for n in range(4)]
        results = [started.said(n)[-2:] for n in (1, 2, 3)]
        assert len({result["digest"] for _, result in results}) == 1
        fields = [last["fields"] for last, _ in results]
        for kind in fields[0]:
            if kind.startswith(("powersgd", "shared", "ef21_mean")):
                assert len({one[kind] for one in fields}) == 1
        if "ef21_own" in fields[0]:  # g is the mean of g_i over the ranks of now
            own = sum(one["ef21_own"] for one in fields) / 3
            assert np.isclose(own, fields[0]["ef21_mean"], rtol=1e-4, atol=1e-3)


RESTARTED = """
    import json, os, signal, sys
    import torch
    import gradcomp.torch as gc

    gc.init(timeout_seconds=40)
    model = torch.nn.Linear(40, 64)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = gc.DistributedOptimizer(opt, model.named_parameters(), compression="topk:density=0.05")
    sampler = gc.elastic.ElasticSampler(range(100))
    state = gc.elastic.TorchState(model, opt, directory=sys.argv[1], step=0, sampler=sampler)


    @gc.elastic.run
    def train(state):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        residual = opt.compression_state()["residuals"]["weight"].abs().sum().item()
        told = {"rank": gc.rank(), "attempt": attempt, "step": state.step, "processed": sampler.processed_num}
        print(json.dumps({**told, "residual": residual > 0.0}), flush=True)
        while state.step < 6:
            opt.zero_grad()
            model(torch.ones(40)).sum().backward()
            opt.step()
            sampler.record_batch(state.step, 2)
            state.step += 1
            state.commit()
            if state.step == 3 and gc.rank() == 0 and attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)


    train(state)
"""


def test_under_torchrun_all_ranks_restart_from_the_last_commit_on_disk(tmp_path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(RESTARTED))
    command = [*TORCHRUN[:-1], "--max-restarts=1", str(tmp_path / "program.py"), str(tmp_path / "commits")]
    finished = run_command(command)
    assert finished.returncode == 0, finished.stderr
    # The ranks share one output, in which two may write to one line.
    said = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", finished.stdout)]
    first = [{"rank": rank, "attempt": 0, "step": 0, "processed": 0, "residual": False} for rank in range(2)]
    again = [{"rank": rank, "attempt": 1, "step": 3, "processed": 12, "residual": True} for rank in range(2)]
    assert sorted(said, key=lambda one: (one["attempt"], one["rank"])) == first + again


@on_ranks(2)
def test_a_state_returns_to_its_last_commit():
    model = torch.nn.Linear(40, 64)
    opt = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), "topk:density=0.05"
    )
    state = gc.elastic.TorchState(model, opt, values=[1], random=torch.zeros(2))
    with pytest.raises(gc.StateError, match="nothing was committed"):
        state.restore()
    state.sync()

    def step():
        opt.zero_grad()
        model(torch.full((40,), gc.rank() + 1.0)).square().sum().backward()
        opt.step()

    step()
    state.commit()
    kept, residuals = model.weight.detach().clone(), opt.compression_state()
    step()
    state.values.append(2)
    state.random += 1
    state.restore()
    assert torch.equal(model.weight, kept)
    assert (state.values, state.random.tolist()) == ([1], [0.0, 0.0])
    for name, value in opt.compression_state()["residuals"].items():
        assert torch.equal(value, residuals["residuals"][name])
    state.check_host_updates()
    step()
    with pytest.raises(gc.ConfigError, match="something else"):
        gc.elastic.ObjectState(commit=1)


@on_ranks(2)
def test_ranks_at_other_commits_are_told():
    state = gc.elastic.ObjectState(step=0)
    if gc.rank() == 0:
        state.save()
    with pytest.raises(gc.PlanMismatchError, match="number"):
        state.commit()
    with pytest.raises(gc.ConfigError, match="TorchState"):
        gc.elastic.run(lambda state: None)(3)


@on_ranks(3)
def test_every_sample_is_given_out_once_whatever_was_processed_before():
    sampler = gc.elastic.ElasticSampler(range(50), seed=3)
    order = [i for part in gc.allgather_object(list(sampler)) for i in part]
    assert sorted(set(order)) == list(range(50))
    assert len(sampler) == len(list(sampler)) == -(-50 // gc.size())
    done = [i for part in gc.allgather_object(list(sampler)[:4]) for i in part]
    sampler.record_batch(0, 4)
    again = gc.elastic.ElasticSampler(range(50), seed=3)
    again.load_state_dict(sampler.state_dict())
    rest = [i for part in gc.allgather_object(list(again)) for i in part]
    assert sorted({*done, *rest}) == list(range(50))
    assert set(done).isdisjoint(rest)
    again.set_epoch(1)
    assert again.processed_num == 0
    assert list(again) != list(sampler)
    plain = gc.elastic.ElasticSampler(range(5), shuffle=False)
    assert list(plain) == [i % 5 for i in range(gc.rank(), gc.size() * len(plain), gc.size())]
    assert list(gc.elastic.ElasticSampler([])) == []


REFUSED = """
    import json
    import torch
    import gradcomp.torch as gc


    def refusal(call):
        try:
            call()
        except gc.GradcompError as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


    said = [refusal(lambda: gc.init(transport="mpi")), refusal(lambda: gc.init(process_sets=[[0]]))]
    gc.init(timeout_seconds=20)
    model = torch.nn.Linear(40, 64)
    wrap = lambda **given: gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **given)
    said.append(refusal(lambda: wrap(op=gc.Adasum)))
    said.append(refusal(lambda: wrap(finish="forward")))
    said.append(refusal(lambda: gc.elastic.TorchState(model, directory="d")))
    opt = wrap()
    model(torch.ones(40)).sum().backward()
    said.append(refusal(opt.step))
    state = gc.elastic.TorchState(model, opt)
    gc.elastic.run(lambda state: (opt.zero_grad(), model(torch.ones(40)).sum().backward(), opt.step()))(state)
    print(json.dumps({"said": said}))
"""


def test_what_an_elastic_job_cannot_do_is_refused() -> None:
    with job(REFUSED, GRADCOMP_MIN_RANKS=2) as started:
        for _ in range(2):
            started.start()
        assert started.finish() == [0, 0], started.log(0)
        for number in range(2):
            (said,) = started.said(number)
            for text, part in zip(
                said["said"],
                [
                    "transport=mpi",
                    "no process sets",
                    "op=Average",
                    "finish=",
                    "directory= needs",
                    "outside of the function",
                ],
                strict=True,
            ):
                assert part in text
        late = started.start()
        assert started.wait(late) == 1
        assert "StateError: the work of the job" in started.log(late)


def test_too_few_ranks_and_a_store_that_is_not_there_are_errors() -> None:
    with job("import gradcomp.torch as gc\ngc.init(timeout_seconds=1, min_ranks=2)") as started:
        number = started.start()
        assert started.wait(number) == 1
        assert "1 ranks came to generation 1" in started.log(number)
        number = started.start(GRADCOMP_STORE="127.0.0.1:1")
        assert started.wait(number) == 1
        assert "no store answers at 127.0.0.1:1: start one with `python -m gradcomp store`" in started.log(
            number
        )
    for wrong in ("29400", "host:", "host:99999"):
        with pytest.raises(gc.ConfigError, match=r"store must be host:port|setting store"):
            gc.init(store=wrong)
    assert not gc.is_initialized()


def test_the_command_serves_a_store_until_it_is_told_to_end() -> None:
    command = [sys.executable, "-m", "gradcomp", "store", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    client = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    assert client.add("key", 1) == 1
    process.terminate()
    assert process.wait(20) == 0
    taken = serve_alone("127.0.0.1", 0)
    assert main(["store", "--port", str(taken.port)]) == 2


def test_a_generation_that_loses_a_rank_before_it_is_formed_is_given_up() -> None:
    """One member registers and dies: the others do not wait for it, and agree on the number that they form."""
    import threading

    store = serve_alone("127.0.0.1", 0)
    connect = lambda: torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)  # noqa: E731
    limits = Limits(least=2, window_seconds=0.2, timeout_seconds=20.0)
    members = [Member(connect, limits, "here") for _ in range(3)]
    dead = members[2]
    formed: dict[int, object] = {}

    def join(number: int) -> None:
        formed[number] = members[number].join()

    dead._confirm = lambda key, generation: dead._stopping.set() or None  # type: ignore[assignment,func-returns-value]
    threads = [threading.Thread(target=join, args=(number,)) for number in range(2)]
    registered = threading.Thread(target=lambda: dead._form(1, 1e18))
    for thread in (*threads, registered):
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {generation.number for generation in formed.values()} == {2}  # type: ignore[attr-defined]
    assert [len(generation.members) for generation in formed.values()] == [2, 2]  # type: ignore[attr-defined]
    for member in members:
        member.leave()
