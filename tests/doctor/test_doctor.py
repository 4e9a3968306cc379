"""The command itself: alone, among ranks, without one of them, over MPI alone, and on hosts with planted faults."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launching import Finished, clean_environment, plain_variables, run_command, run_ranks
from ports import free_port

from gradcomp.cli.output import Exit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

PROGRAM = "import sys; from gradcomp.cli import main; sys.exit(main(['doctor', '--json', *sys.argv[1:]]))"
#: What is wrong may be so on the machine that runs the tests.
OF_THE_MACHINE = {"cores", "gpus", "memory", "disk", "limits"}


def alarms(told: dict[str, Any]) -> list[str]:
    return [
        each["found"]
        for each in told["findings"]
        if each["level"] != "ok" and each["about"] not in OF_THE_MACHINE
    ]


def told_by(ranks: Sequence[Finished], rank: int) -> dict[str, Any]:
    assert ranks[rank].stdout, ranks[rank].stderr
    return json.loads(ranks[rank].stdout)


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), **variables}
    command = [sys.executable, "-m", "gradcomp", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)


def test_alone_it_looks_at_this_process():
    done = doctor("--json")
    told = json.loads(done.stdout)
    assert alarms(told) == []
    assert (told["ranks"], told["missing"], told["links"], told["exit"]) == (1, [], [], done.returncode)
    subjects = {each["about"] for each in told["findings"]}
    assert subjects >= {"versions", "libraries", "kernels", "launcher", "interface", "transports", "gpus", "cores",
                        "threads", "limits", "memory", "disk", "settings"}  # fmt: skip
    (facts,) = told["facts"]
    assert "token" not in facts["network"]
    assert facts["network"]["ports"] == {}  # nothing listens
    assert facts["cores"]["own"] == sorted(os.sched_getaffinity(0))


def test_faults_of_one_process_are_printed_in_words():
    done = doctor(GRADCOMP_ISA="baseline", GRADCOMP_THREADS="x", GRADCOMP_SED="1", RANK="1")
    lines = done.stdout.splitlines()
    assert done.returncode == Exit.NOT_MEASURED, done.stderr
    assert lines[0].startswith("gradcomp doctor ")
    assert lines[-1].startswith("2 errors, ")
    assert any("GRADCOMP_THREADS must be of type int" in line for line in lines)
    assert any("did you mean GRADCOMP_SEED?" in line for line in lines)
    assert any(line.startswith("error") and "RANK is set, but WORLD_SIZE is not" in line for line in lines)


def test_a_healthy_job_is_measured_and_only_rank_0_prints():
    ranks = run_ranks(PROGRAM, 2, imported=preloaded.TORCH)
    told = told_by(ranks, 0)
    assert alarms(told) == []
    assert [rank.returncode for rank in ranks] == [told["exit"]] * 2
    assert ranks[1].stdout == ""
    assert (told["ranks"], told["missing"], len(told["facts"])) == (2, [], 2)
    assert [one["collective"] for one in told["collectives"]] == ["allreduce", "all-to-all"]
    assert all(one["sent_per_second"] > 0 for one in told["collectives"])


def test_what_differs_and_who_is_missing_are_findings_and_no_rank_waits_longer():
    """Rank 2 of 3 never comes; rank 1 has another seed. Nobody raises."""
    absent = "import os, sys\nif os.environ['RANK'] == '2': sys.exit(0)\n"
    port = str(free_port())

    def variables(rank: int) -> dict[str, str]:
        return {**plain_variables(rank, 3, port), "GRADCOMP_SEED": str(rank)}

    ranks = run_ranks(
        absent + PROGRAM, 3, env=variables, imported=preloaded.TORCH, arguments=("--timeout", "4")
    )
    told = told_by(ranks, 0)
    assert [rank.returncode for rank in ranks[:2]] == [Exit.NOT_MEASURED] * 2
    assert ranks[1].stdout == ""
    assert told["missing"] == [2]
    found = alarms(told)
    assert any("rank 2 of 3 did not come within 4 s" in each for each in found)
    assert any("seed=0 on rank 0; seed=1 on rank 1" in each for each in found)
    assert told["collectives"] == []


def test_without_rank_0_a_rank_says_what_does_not_answer():
    (rank,) = run_ranks(
        PROGRAM,
        1,
        env=lambda rank: plain_variables(1, 2, "9"),
        imported=preloaded.TORCH,
        arguments=("--timeout", "2"),
    )
    (found,) = alarms(told_by([rank], 0))
    assert rank.returncode == Exit.NOT_MEASURED
    assert "rank 1 (" in found
    assert "127.0.0.1:9, where the ranks meet, refuses connections: nothing listens there" in found


def test_without_torch_the_ranks_meet_and_measure_over_mpi():
    pytest.importorskip("mpi4py")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("needs MPICH's mpiexec: pip install mpich")
    done = run_command([str(mpiexec), "-n", "2", sys.executable, "-c", f"import without_torch; {PROGRAM}"])
    told = json.loads(done.stdout)
    assert alarms(told) == []
    assert done.returncode == told["exit"]
    assert [one["collective"] for one in told["collectives"]] == ["allreduce", "all-to-all"]
    assert any(each["found"] == "the ranks met through MPI" for each in told["findings"])


@pytest.mark.network
@pytest.mark.parametrize("fault", ["wrong interface", "blocked port"])
def test_a_fault_of_the_network_is_named(fault: str):
    import doctor_faults

    planted = dataclasses.replace(doctor_faults.FAULTS[fault], timeout=6)
    run = doctor_faults.faulty(planted)
    named = doctor_faults.named(run, planted)
    assert named, run.alarms
    assert len(set(run.codes)) == 1
    assert run.codes[0] in (Exit.ERRORS_FOUND, Exit.NOT_MEASURED)
