"""Facts with a fault, and the finding that names it; healthy facts have none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from healthy_ranks import healthy

from gradcomp.doctor import checks, comparison, pairs
from gradcomp.doctor.facts import Disk, Facts, Interface
from gradcomp.doctor.finding import Finding, Level, error, merged, ok, ranks_text, worst
from gradcomp.doctor.links import Attempt
from gradcomp.doctor.pairs import Link
from gradcomp.doctor.reach import Answer


def alarms(ranks: list[Facts], size: int | None = None) -> list[Finding]:
    size = ranks[0].place.size if size is None else size
    found = [*checks.check(ranks), *comparison.compare(ranks), comparison.attendance(ranks, size, 60.0)]
    return [each for each in merged(found) if each.level is not Level.OK]


HEALTHY: dict[str, list[Facts]] = {
    "alone": [healthy(0, 1)],
    "two hosts": [healthy(rank) for rank in range(2)],
    "two ranks on each of two hosts": [healthy(rank, 4, 2) for rank in range(4)],
    "as many ranks as cores": [healthy(rank, 8, 8) for rank in range(8)],
    "ranks bound to cores of their own": [healthy(rank, 2, 2, cores={"own": (rank,)}) for rank in range(2)],
    "a rank of two threads on two cores": [healthy(0, 1, cores={"own": (4, 5), "training_threads": 2})],
    "no AVX2 in an old processor": [
        healthy(rank, kernels={"available": ("baseline",), "processor": ""}) for rank in range(2)
    ],
    "containers of one machine": [healthy(rank, network={"boot": "one"}) for rank in range(2)],
    "an address of loopback on one host": [
        healthy(rank, 2, 2, network={"named": "", "address": "127.0.0.1"}) for rank in range(2)
    ],
    "what other transports lack": [
        healthy(rank, lacks={"mpi": "mpi4py", "nccl": "CuPy", "shm": "all 2 ranks on one host"}) for rank in range(2)
    ],
    "interfaces that NCCL finds": [
        healthy(rank, network={"nccl": named}) for rank, named in enumerate(("=eth0,ib0", "et"))
    ],
    "a quota of as many cores as threads": [healthy(0, 1, cores={"quota": 1.0})],
    "an interface of containers that is the same everywhere": [
        healthy(rank, network={"interfaces": (
            Interface("eth0", f"10.0.0.{rank + 1}", 1500, 1000, True),
            Interface("docker0", "172.17.0.1", 1500, 10000, False),
        )})
        for rank in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", HEALTHY.values(), ids=HEALTHY)
def test_healthy_ranks_raise_no_alarm(ranks: list[Facts]):
    assert alarms(ranks) == []


def gpu(rank: int, **changes: object) -> Facts:
    """A rank with two GPUs, called through CuPy."""
    found = {"driver": "13.0", "names": ("A", "A"), "problem": "", "cupy": "14.2.0", "cupy_devices": 2, "nccl": 22907,
             "torch_cuda": "13.0", "torch_devices": 2}  # fmt: skip
    return healthy(rank, gpus={**found, **changes})


#: Ranks; the level and the subject of the one alarm; what it says, with its ranks and its advice.
FAULTS: dict[str, tuple[list[Facts], Level, str, str]] = {
    "a bad setting": (
        [healthy(0, 1, settings={"problem": "setting threads must be"})],
        Level.ERROR,
        "settings",
        "0.*Correct",
    ),
    "a misspelt variable": (
        [healthy(0, 1, settings={"unknown": ("unknown variable GRADCOMP_SED",)})],
        Level.WARNING,
        "settings",
        "SED",
    ),
    "NumPy's kernels": (
        [healthy(0, 1, kernels={"asked": "reference"})],
        Level.WARNING,
        "kernels",
        "NumPy.*GRADCOMP_KERNELS",
    ),
    "no compiled module": (
        [healthy(0, 1, kernels={"available": (), "missing": "why"})],
        Level.ERROR,
        "kernels",
        "missing: why",
    ),
    "a build without AVX2": (
        [healthy(0), healthy(1, kernels={"available": ("baseline",), "processor": "avx2"})],
        Level.WARNING,
        "kernels",
        "1.*built without AVX2.*Build",
    ),
    "AVX2 switched off": (
        [healthy(0, 1, kernels={"asked_isa": "baseline"})],
        Level.WARNING,
        "kernels",
        "no AVX2.*Unset GRADCOMP_ISA",
    ),
    "an instruction set that is not there": (
        [healthy(0, 1, kernels={"asked_isa": "avx512", "available": ("avx2", "baseline")})],
        Level.ERROR,
        "kernels",
        "isa=avx512.*avx2, baseline",
    ),
    "a half-set environment": (
        [healthy(0, 1, place={"problem": "RANK is set"})],
        Level.ERROR,
        "launcher",
        "RANK.*Unset",
    ),
    "an interface that is not there": (
        [healthy(0), healthy(1, network={"named": "ib0", "address": ""})],
        Level.ERROR,
        "interface",
        r"1.*GLOO_SOCKET_IFNAME=ib0.*no such interface.*eth0 \(10.0.0.2\).*IFNAME=eth0",
    ),
    "a host name that is loopback": (
        [healthy(0), healthy(1, network={"named": "", "variable": "", "address": "127.0.1.1"})],
        Level.ERROR,
        "interface",
        "1.*host name node1 leads to 127.0.1.1.*IFNAME=eth0",
    ),
    "unequal MTUs": (
        [healthy(0), healthy(1, network={"interfaces": (Interface("eth0", "10.0.0.2", 9000, 1000, True),)})],
        Level.WARNING,
        "interface",
        "MTU.*1500 on rank 0; 9000 on rank 1",
    ),
    "a faster network": (
        [
            healthy(
                rank,
                network={
                    "interfaces": (
                        Interface("eth0", f"10.0.0.{rank + 1}", 1500, 1000, True),
                        Interface("ib0", f"10.1.0.{rank + 1}", 1500, 100_000, True),
                    )
                },
            )
            for rank in range(2)
        ],
        Level.WARNING,
        "interface",
        "ib0 connects all hosts at 100000.*IFNAME=ib0",
    ),
    "an interface that NCCL does not find": (
        [healthy(0), healthy(1, settings={"transport": "auto"}, network={"nccl": "^eth,lo"})],
        Level.WARNING,
        "interface",
        r"1.*NCCL_SOCKET_IFNAME=\^eth,lo allows no interface.*eth0",
    ),
    "the transport lacks something": (
        [healthy(rank, settings={"transport": "mpi"}, lacks={"mpi": "mpi4py"}) for rank in range(2)],
        Level.ERROR,
        "transports",
        "all.*mpi lacks mpi4py",
    ),
    "no engine": (
        [dataclasses.replace(healthy(0, 1), libraries={"Python": "3.12.1"})],
        Level.WARNING,
        "transports",
        "neither PyTorch",
    ),
    "CuPy without a device": (
        [healthy(rank, gpus={"cupy": "14.2.0", "cupy_problem": "cudaErrorNoDevice"}) for rank in range(2)],
        Level.WARNING,
        "gpus",
        r"all.*CuPy 14\.2\.0.*no CUDA device.*NoDevice.*driver",
    ),
    "CuPy of another CUDA": (
        [gpu(0, cupy_devices=0, cupy_problem="why"), gpu(1)],
        Level.WARNING,
        "gpus",
        "sees no CUDA device.*why.*cuda13",
    ),
    "GPUs hidden from NCCL": (
        [healthy(0, 1, settings={"transport": "nccl"}, gpus={"cupy": "14.2.0", "visible": ""})],
        Level.ERROR,
        "gpus",
        "CUDA_VISIBLE_DEVICES=''",
    ),
    "GPUs without CuPy": (
        [gpu(0, cupy="", has_bindings=False), gpu(1)],
        Level.WARNING,
        "gpus",
        "no CuPy and no cuda-bindings.*compressed by the CPU.*gradcomp.cuda13",
    ),
    "PyTorch for the CPU beside GPUs": (
        [gpu(0, torch_cuda="", torch_devices=0), gpu(1)],
        Level.WARNING,
        "gpus",
        "a build for the CPU",
    ),
    "too few open files": (
        [healthy(0, 1, limits={"open_files": 64})],
        Level.WARNING,
        "limits",
        "at most 64.*ulimit -n 128",
    ),
    "too many ranks for open files": (
        [healthy(rank, 200) for rank in range(200)],
        Level.WARNING,
        "limits",
        "all.*1024.*about 1700.*ulimit -n 2048",
    ),
    "no memory": (
        [healthy(0, 1, limits={"available_memory": 100 << 20})],
        Level.WARNING,
        "memory",
        "100 MiB.*64.0 GiB",
    ),
    "a full disk": (
        [healthy(0, disks=(Disk("run log", "/logs/run.jsonl", 0, "No space left on device"),)), healthy(1)],
        Level.ERROR,
        "disk",
        "0.*run log: /logs/run.jsonl.*No space.*Free space",
    ),
    "a directory that is not there": (
        [healthy(0, 1, disks=(Disk("timeline", "/no/t.json", 0, "No such file or directory"),))],
        Level.ERROR,
        "disk",
        "No such file.*Make the directory",
    ),
    "an almost full disk": (
        [healthy(0, 1, disks=(Disk("run log", "r", 1 << 20),))],
        Level.WARNING,
        "disk",
        "only 1 MiB",
    ),
    "more ranks than cores": (
        [healthy(rank, 4, 4, cores={"own": (0, 1)}) for rank in range(4)],
        Level.WARNING,
        "cores",
        "all.*ranks 0-3 share cores 0-1 of this host's 8",
    ),
    "two ranks bound to one core": (
        [healthy(rank, 3, 3, cores={"own": own}) for rank, own in enumerate([(0,), (0,), (1, 2)])],
        Level.WARNING,
        "cores",
        "0-1.*ranks 0-1 share core 0 of",
    ),
    "too many threads": (
        [
            healthy(rank, 4, 2, cores={"own": (0, 1), "training_threads": 2, "omp_threads": 0})
            for rank in range(2)
        ]
        + [healthy(rank, 4, 2) for rank in (2, 3)],
        Level.WARNING,
        "threads",
        "0-1.*4 threads compute on 2 cores.*unset.*OMP_NUM_THREADS=1 ",
    ),
    "threads that only a variable names": (
        [healthy(0), healthy(1, cores={"omp_threads": 64})],
        Level.WARNING,
        "threads",
        "1.*64 threads.*8 cores.*THREADS=8 ",
    ),
    "a container's share of time": (
        [healthy(0, 1, cores={"quota": 2.0, "training_threads": 8})],
        Level.WARNING,
        "threads",
        "8 threads compute on 2 cores of processor time.*THREADS=2 ",
    ),
    "other versions of gradcomp": (
        [healthy(0), healthy(1, gradcomp="0.9", wire=4)],
        Level.ERROR,
        "versions",
        "gradcomp 1.0, wire protocol 5 on rank 0; gradcomp 0.9, wire protocol 4 on rank 1",
    ),
    "another NumPy": (
        [healthy(0, 3), healthy(1, 3, libraries={"NumPy": "2.2.0"}), healthy(2, 3)],
        Level.WARNING,
        "libraries",
        "NumPy: 2.3.0 on rank 0, 2; 2.2.0 on rank 1",
    ),
    "a library that one rank lacks": (
        [healthy(0, libraries={"cupy": "14"}), healthy(1)],
        Level.WARNING,
        "libraries",
        "cupy: 14 on rank 0; missing on rank 1",
    ),
    "unequal settings": (
        [healthy(rank, settings={"shared": {"seed": str(rank)}}) for rank in range(2)],
        Level.ERROR,
        "settings",
        "seed=0 on rank 0; seed=1 on rank 1.*GRADCOMP_SEED",
    ),
    "unequal transports": (
        [healthy(0, settings={"transport": "mpi"}), healthy(1)],
        Level.ERROR,
        "settings",
        "GRADCOMP_TRANSPORT",
    ),
    "a secret on one rank": (
        [healthy(0, settings={"has_secret": True}), healthy(1)],
        Level.ERROR,
        "secret",
        "not set on rank 1",
    ),
    "two machines of one name": (
        [healthy(0, 2, 2), healthy(1, 2, 2, network={"boot": "another"})],
        Level.ERROR,
        "hosts",
        "0-1 are on several machines",
    ),
    "ranks that never come": (
        [healthy(0, 5), healthy(3, 5)],
        Level.ERROR,
        "ranks",
        "rank 1-2, 4 of 5 did not come within 60 s",
    ),
}


@pytest.mark.parametrize(("ranks", "level", "about", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_and_nothing_else_is(ranks: list[Facts], level: Level, about: str, says: str):
    (found,) = alarms(ranks)
    assert (found.level, found.about) == (level, about)
    text = f"{ranks_text(found.ranks, ranks[0].place.size)}: {found.found}. {found.advice} "
    assert re.search(says, text), text


@pytest.mark.parametrize("ranks", [each[0] for each in FAULTS.values()], ids=FAULTS)
def test_every_sentence_ends_once_and_says_what_to_do(ranks: list[Facts]):
    for found in alarms(ranks):
        assert not found.found.endswith(".")
        assert re.fullmatch(r"[A-Z].*[.]", found.advice)
        assert ".." not in found.advice


# ------------------------------------------------------------------------------------------ links

GBIT = 125e6


def star(hosts: int, slow: dict[int, float] | None = None, **others: float) -> list[Link]:
    """The links of a switch: a host that is in ``slow`` has that rate, all others 1 Gbit/s."""
    rates = {rank: (slow or {}).get(rank, GBIT) for rank in range(hosts)}
    pairs_of = [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    return [Link(a, b, 5e-5, min(rates[a], rates[b]), min(rates[a], rates[b])) for a, b in pairs_of]


def judged(links: list[Link], hosts: int) -> list[str]:
    found = pairs.judge(links, {rank: healthy(rank, hosts) for rank in range(hosts)})
    return [f"{each.found}. {each.advice}" for each in found if each.level is not Level.OK]


@pytest.mark.parametrize("hosts", [2, 3, 4, 9])
def test_equal_links_are_healthy(hosts: int):
    assert judged(star(hosts), hosts) == []
    uneven = [Link(one.a, one.b, one.latency_seconds * (1 + i % 3), one.there / (1 + i % 2), one.back)
              for i, one in enumerate(star(hosts))]  # fmt: skip
    assert judged(uneven, hosts) == []


@pytest.mark.parametrize("hosts", [3, 4, 9])
@pytest.mark.parametrize("rate", [GBIT / 100, GBIT / 10])
def test_a_host_whose_links_are_all_slow_is_named(hosts: int, rate: float):
    (text,) = judged(star(hosts, {2: rate}), hosts)
    assert re.match(
        r"the link of rank 2 \(node2, 10\.0\.0\.3\) is slow: 1?00? Mbit/s .*1\.00 Gbit/s elsewhere", text
    ), text


def test_one_slow_pair_of_hosts_that_are_well_otherwise_is_named():
    links = [
        Link(one.a, one.b, 5e-5, GBIT / 10, GBIT) if (one.a, one.b) == (1, 3) else one for one in star(4)
    ]
    (text,) = judged(links, 4)
    assert text.startswith("100 Mbit/s between rank 1 (node1, 10.0.0.2) and rank 3")
    assert pairs.doubtful(links) == [links[4]]


def test_two_hosts_have_a_floor_and_the_worst_is_always_named():
    (text,) = judged(star(2, {0: GBIT / 100}), 2)
    assert text.startswith("10 Mbit/s between rank 0")
    assert "100 MB of gradients take 80.0 s uncompressed and 10.3 s at 4 bits" in text
    assert judged(star(2, {0: GBIT / 10}), 2) == []
    (worst_pair,) = pairs.judge(star(3, {1: GBIT / 2}), {rank: healthy(rank, 3) for rank in range(3)})
    assert worst_pair.found.startswith("the worst of 3 pairs has 500 Mbit/s between rank 0")


def test_a_slow_network_is_one_finding():
    (text,) = judged(star(4, dict.fromkeys(range(4), 1e6)), 4)
    assert text.startswith("every pair of hosts has 8.00 Mbit/s or less")


def test_late_messages_are_named():
    links = [Link(one.a, one.b, 0.02, GBIT, GBIT) if one.b == 3 and one.a == 0 else one for one in star(4)]
    (text,) = judged(links, 4)
    assert text.startswith(
        "a message between rank 0 (node0, 10.0.0.1) and rank 3 (node3, 10.0.0.4) takes 20.0 ms"
    )


def test_the_better_of_two_measurements_counts():
    slow, fast = Link(0, 1, 1e-3, 1.0, 9.0), Link(0, 1, 2e-3, 5.0, 5.0)
    assert slow.better(fast) == fast.better(slow) == Link(0, 1, 1e-3, 5.0, 9.0)
    assert Link(0, 1, problem="x").better(fast) is fast


def unreachable(first: list[Attempt], second: list[Attempt], **network: object) -> list[Finding]:
    ranks = {0: healthy(0), 1: healthy(1, network=network)}
    links = [Link(0, 1, attempts={(0, 1): first, (1, 0): second})]
    return [each for each in pairs.judge(links, ranks) if each.level is Level.ERROR]


def test_a_blocked_port_and_a_wrong_interface_are_told_apart():
    well, silent = [Attempt("10.0.0.1", Answer.YES)], Attempt("10.0.0.2", Answer.SILENT)
    (blocked,) = unreachable([silent], well)
    assert (blocked.about, blocked.ranks) == ("ports", (0, 1))
    assert (
        "rank 0 (node0, 10.0.0.1) cannot connect to rank 1 (node1, 10.0.0.2): 10.0.0.2:40000 does not"
        in blocked.found
    )
    interfaces = (Interface("eth1", "192.168.0.2"), Interface("eth0", "10.0.0.2"))
    (wrong,) = unreachable(
        [Attempt("192.168.0.2", Answer.SILENT), Attempt("10.0.0.2", Answer.YES)], well, interfaces=interfaces
    )
    assert (wrong.about, wrong.ranks) == ("interface", (1,))
    assert "cannot reach 192.168.0.2 of eth1" in wrong.found
    assert wrong.advice == "Set GLOO_SOCKET_IFNAME=eth0 on this host."
    assert unreachable(well, well) == []


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 9, 10, 33])
def test_every_pair_is_measured_once_and_no_host_is_in_two_pairs_at_once(hosts: int):
    leaders = [3 * host for host in range(hosts)]
    rounds = pairs.rounds(leaders)
    every = [pair for each in rounds for pair in each]
    assert sorted(every) == [(a, b) for a in leaders for b in leaders if a < b]
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    if hosts > 8:
        assert len(rounds) == hosts - 1 + hosts % 2


# ------------------------------------------------------------------------------------------ findings


def test_equal_findings_of_several_ranks_are_one_and_keep_the_order_of_subjects():
    found = merged(
        [ok("disk", "x", 2), ok("kernels", "y", 0), ok("disk", "x", 0), error("disk", "x", "Do.", 1)]
    )
    assert [(each.about, each.level, each.ranks) for each in found] == [
        ("kernels", Level.OK, (0,)), ("disk", Level.OK, (0, 2)), ("disk", Level.ERROR, (1,))
    ]  # fmt: skip
    assert worst(found) is Level.ERROR
    assert worst([]) is Level.OK


@pytest.mark.parametrize(
    ("ranks", "size", "text"),
    [((), 2, ""), ((0,), 1, "0"), ((0, 1), 2, "all"), ((0, 1, 3), 4, "0-1, 3"), ((1, 3, 5), 6, "1, 3, 5")],
)
def test_ranks_are_shown_as_runs(ranks: tuple[int, ...], size: int, text: str):
    assert ranks_text(ranks, size) == text


CHECKS: list[Callable[..., object]] = [checks.check, comparison.compare]


@pytest.mark.parametrize("check", CHECKS)
def test_a_rank_of_another_version_that_tells_nothing_is_no_crash(check: Callable[..., object]):
    assert check([healthy(0), Facts(protocol=-1)])
