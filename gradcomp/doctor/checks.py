"""Judges what ranks found on themselves: each rank alone, and the ranks of a host together. It measures nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gradcomp.doctor.facts import Cores, Facts, Gpus
from gradcomp.doctor.finding import Finding, error, ok, ranks_text, warning

#: Descriptors that a rank needs without connections, and for each other rank.
_OWN_FILES, _FILES_A_RANK = 100, 8
_LITTLE_MEMORY = 512 << 20
#: Less than this on a disk is soon full: a log of a long run has some megabytes, a timeline more.
_LITTLE_DISK = 64 << 20
_ISAS = ("baseline", "avx2", "avx512")


def check(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings on these ranks, which may be one process or some ranks of a job."""
    several_hosts = len({facts.place.host for facts in ranks}) > 1
    found = [each for facts in ranks for each in _of_rank(facts, several_hosts)]
    by_host: dict[str, list[Facts]] = defaultdict(list)
    for facts in ranks:
        by_host[facts.place.host].append(facts)
    for members in by_host.values():
        found += _shared_cores([(facts.rank, facts.cores) for facts in members])
        found += _threads([(facts.rank, facts.cores) for facts in members])
    return found


def _of_rank(facts: Facts, several_hosts: bool) -> Iterator[Finding]:
    yield from _settings(facts)
    yield from _kernels(facts)
    yield from _launcher(facts)
    yield from _interface(facts, several_hosts)
    yield from _transports(facts)
    yield from _gpus(facts)
    yield from _limits(facts)
    yield from _disks(facts)


def _settings(facts: Facts) -> Iterator[Finding]:
    settings, rank = facts.settings, facts.rank
    if settings.problem:
        yield error(
            "settings", settings.problem, "Correct the setting; init() raises a ConfigError for it.", rank
        )
    for text in settings.unknown:
        yield warning("settings", text, "Correct the name of the variable, or unset it.", rank)
    changed = ", ".join(f"{name}={value}" for name, value in settings.changed.items())
    if not settings.problem:
        yield ok("settings", changed or "all settings have their defaults", rank)


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels, rank = facts.kernels, facts.rank
    if kernels.asked == "reference":
        advice = "Unset GRADCOMP_KERNELS, unless you debug kernels."
        yield warning(
            "kernels", "kernels=reference: NumPy computes, which is many times slower", advice, rank
        )
        return
    if not kernels.available:
        advice = "Install gradcomp again with a C++20 compiler, or from a wheel."
        yield error("kernels", f"the compiled module is missing: {kernels.missing}", advice, rank)
        return
    if kernels.asked_isa not in ("auto", *kernels.available):
        found = f"isa={kernels.asked_isa}, but the compiled module has {', '.join(kernels.available)} here"
        yield error("kernels", found, "Unset GRADCOMP_ISA, or name one of these.", rank)
        return
    used = kernels.available[0] if kernels.asked_isa == "auto" else kernels.asked_isa
    found = f"compiled, instruction set {used}, at most {_count(facts.cores.kernel_threads, 'thread')}"
    if used == "baseline" and kernels.processor in _ISAS:
        if "avx2" in kernels.available:
            yield warning(
                "kernels",
                f"the kernels use no AVX2, since isa={kernels.asked_isa}, and this processor has {kernels.processor}",
                "Unset GRADCOMP_ISA: codecs are several times faster with AVX2.",
                rank,
            )
        else:
            yield warning(
                "kernels",
                f"the compiled module was built without AVX2, and this processor has {kernels.processor}",
                "Build gradcomp on an x86-64 machine with GCC or Clang, or install its wheel: codecs are several "
                "times faster with AVX2.",
                rank,
            )
        return
    yield ok("kernels", found, rank)


def _launcher(facts: Facts) -> Iterator[Finding]:
    place, rank = facts.place, facts.rank
    if place.problem:
        advice = (
            "Unset the variables that no launcher of this job has set, or start all ranks by one launcher."
        )
        yield error("launcher", place.problem, advice, rank)
    elif place.size > 1:
        yield ok("launcher", f"{place.launcher}, {place.size} ranks", rank)
    else:
        found = "none: a world of one" if place.launcher == "single" else f"{place.launcher}, a world of one"
        yield ok(
            "launcher", f"{found}; torchrun -m gradcomp doctor, or another launcher, examines a job", rank
        )


def _interface(facts: Facts, several_hosts: bool) -> Iterator[Finding]:
    network, rank = facts.network, facts.rank
    usable = [each for each in network.interfaces if not each.address.startswith("127.")]
    others = ", ".join(f"{each.name} ({each.address})" for each in usable) or "none but loopback"
    leads = next((each.name for each in usable if each.address == network.routed), "")
    advice = f"Set GLOO_SOCKET_IFNAME={leads or 'NAME'} on this host."
    if network.named and not network.address:
        found = f"{network.variable}={network.named}: this host has no such interface with an address; it has {others}"
        yield error("interface", found, advice, rank)
    elif several_hosts and network.address.startswith("127."):
        how = f"{network.variable}={network.named}" if network.named else f"the host name {network.hostname}"
        found = f"{how} leads to {network.address}, which other hosts cannot reach; this host has {others}"
        yield error("interface", found, advice, rank)
    elif facts.place.size > 1:
        used = next((each for each in network.interfaces if each.address == network.address), None)
        name = network.named or (used.name if used else "?")
        rate = f", {used.mbit} Mbit/s by its driver" if used and used.mbit > 0 else ""
        yield ok("interface", f"{name} at {network.address}{rate}; this host has {others}", rank)
    else:
        yield ok("interface", f"this host has {others}", rank)
    if network.nccl and not any(_nccl_takes(network.nccl, each.name) for each in usable):
        judge = error if facts.settings.transport == "nccl" else warning
        found = f"NCCL_SOCKET_IFNAME={network.nccl} allows no interface of this host, which has {others}"
        yield judge("interface", found, "Correct NCCL_SOCKET_IFNAME, or unset it.", rank)


def _nccl_takes(named: str, interface: str) -> bool:
    """Return whether NCCL may use an interface: names are beginnings; = makes them whole ones, and ^ forbids them."""
    forbids, rest = named.startswith("^"), named.removeprefix("^")
    whole, names = rest.startswith("="), rest.removeprefix("=").split(",")
    return forbids != any(interface == name if whole else interface.startswith(name) for name in names)


def _transports(facts: Facts) -> Iterator[Finding]:
    chosen, rank = facts.settings.transport, facts.rank
    lacking = facts.lacks.get(chosen, "")
    if lacking and facts.place.size > 1:
        advice = f"Provide it, or choose another transport than {chosen}."
        yield error("transports", f"transport={chosen} lacks {lacking}", advice, rank)
    if not {"torch", "mpi4py"} & facts.libraries.keys():
        advice = "Install PyTorch, or mpi4py with an MPI for TensorFlow: without either a world has one rank."
        yield warning("transports", "neither PyTorch nor mpi4py is installed", advice, rank)
    works = [name for name, what in facts.lacks.items() if not what]
    yield ok("transports", f"usable: {', '.join(works) or 'none'}", rank)
    for name, what in facts.lacks.items():
        if what and "+" not in name and name != chosen:
            yield ok("transports", f"{name} lacks {what}", rank)


def _gpus(facts: Facts) -> Iterator[Finding]:
    gpus, rank = facts.gpus, facts.rank
    hidden = "" if gpus.visible is None else f" (CUDA_VISIBLE_DEVICES={gpus.visible!r})"
    if gpus.names:
        yield ok("gpus", f"{', '.join(gpus.names)}; CUDA {gpus.driver} by the driver{hidden}", rank)
    else:
        yield ok("gpus", f"none: {gpus.problem}{hidden}", rank)
    if gpus.cupy and not gpus.cupy_devices:
        judge = error if facts.settings.transport == "nccl" else warning
        seen = "sees no CUDA device" if gpus.names else "is installed, but there is no CUDA device"
        why = f" ({gpus.cupy_problem})" if gpus.cupy_problem else ""
        advice = (
            "Install the CuPy of this CUDA: pip install 'gradcomp[cuda13]', or 'gradcomp[cuda12]'."
            if gpus.names
            else "Install NVIDIA's driver or give the container its GPUs; on a machine without GPUs uninstall CuPy."
        )
        yield judge("gpus", f"CuPy {gpus.cupy} {seen}{why}{hidden}", advice, rank)
    elif gpus.cupy:
        nccl = (
            f"NCCL {gpus.nccl // 10000}.{gpus.nccl % 10000 // 100}.{gpus.nccl % 100}"
            if gpus.nccl
            else "no NCCL"
        )
        yield ok("gpus", f"CuPy {gpus.cupy} sees {_count(gpus.cupy_devices, 'device')}; {nccl}", rank)
    if gpus.names:
        yield from _callers(gpus, facts)


def _callers(gpus: Gpus, facts: Facts) -> Iterator[Finding]:
    """Yield findings on what is missing where there is a GPU."""
    rank = facts.rank
    if not gpus.cupy and not gpus.has_bindings:
        advice = "Install CuPy: pip install 'gradcomp[cuda13]', or 'gradcomp[cuda12]' where CUDA is 12.x."
        found = (
            "there are GPUs, but no CuPy and no cuda-bindings: gradients on them are compressed by the CPU"
        )
        yield warning("gpus", found, advice, rank)
    if "torch" in facts.libraries and not gpus.torch_devices:
        built = f"built for CUDA {gpus.torch_cuda}" if gpus.torch_cuda else "a build for the CPU"
        advice = "Install PyTorch in a build for the CUDA of this driver."
        yield warning("gpus", f"there are GPUs, and PyTorch, {built}, sees none", advice, rank)
    if len(gpus.names) < facts.place.local_size and facts.settings.transport == "nccl":
        found = f"{_count(len(gpus.names), 'GPU')} for {facts.place.local_size} ranks of this host"
        yield error("gpus", found, "Start as many ranks as GPUs: NCCL needs one for each.", rank)


def _limits(facts: Facts) -> Iterator[Finding]:
    limits, rank = facts.limits, facts.rank
    needed = _OWN_FILES + _FILES_A_RANK * facts.place.size
    files = "without a limit" if limits.open_files < 0 else f"at most {limits.open_files}"
    if 0 <= limits.open_files < needed:
        advice = f"Raise the limit: ulimit -n {1 << (needed - 1).bit_length()}."
        found = f"{files} open files; {facts.place.size} ranks need about {needed}"
        yield warning("limits", found, advice, rank)
    else:
        yield ok("limits", f"open files {files}", rank)
    if limits.memory:
        free, total = limits.available_memory, limits.memory
        if free < _LITTLE_MEMORY:
            found = f"{free / 2**20:.0f} MiB of memory are free, of {total / 2**30:.1f} GiB"
            yield warning("memory", found, "Free memory, or raise the container's limit.", rank)
        else:
            yield ok(
                "memory",
                f"{total / 2**30:.1f} GiB, of which more than {_LITTLE_MEMORY >> 20} MiB are free",
                rank,
            )


def _disks(facts: Facts) -> Iterator[Finding]:
    for disk in facts.disks:
        where = f"{disk.purpose}: {disk.path}"
        if disk.problem:
            advice = "Free space there, or choose another path."
            if "space" not in disk.problem and "quota" not in disk.problem:
                advice = "Make the directory and let this user write to it, or choose another path."
            judge = warning if disk.purpose == "temporary files" else error
            yield judge("disk", f"{where} cannot be written to: {disk.problem}", advice, facts.rank)
        elif disk.free_bytes < _LITTLE_DISK:
            found = f"{where} has only {disk.free_bytes / 2**20:.0f} MiB left"
            yield warning("disk", found, "Free space there, or choose another path.", facts.rank)
        else:
            yield ok("disk", f"{where} can be written to", facts.rank)


def _groups(ranks: Sequence[tuple[int, Cores]]) -> Iterator[tuple[frozenset[int], list[tuple[int, Cores]]]]:
    """Yield every set of cores that a rank is bound to, with the ranks that can run on no other core."""
    for own in dict.fromkeys(frozenset(cores.own) for _, cores in ranks):
        yield own, [(rank, cores) for rank, cores in ranks if own.issuperset(cores.own)]


def _shared_cores(ranks: Sequence[tuple[int, Cores]]) -> Iterator[Finding]:
    """Yield a finding where ranks of a host cannot each have a core of their own, or one about the cores."""
    machine = max(cores.machine for _, cores in ranks)
    numbers = [rank for rank, _ in ranks]
    crowded = [(own, members) for own, members in _groups(ranks) if len(members) > len(own)]
    for own, members in crowded:
        sharing = [rank for rank, _ in members]
        found = f"ranks {ranks_text(sharing, 0)} share {_cores_text(own)} of this host's {machine}"
        advice = "Start fewer ranks on this host, or let the launcher bind each rank to cores of its own."
        yield warning("cores", found, advice, *sharing)
    if not crowded:
        every = frozenset().union(*(cores.own for _, cores in ranks))
        yield ok("cores", f"{_cores_text(every)} for {_count(len(ranks), 'rank')} of a host", *numbers)


def _threads(ranks: Sequence[tuple[int, Cores]]) -> Iterator[Finding]:
    """Yield a finding where threads that compute are more than the cores that they may use."""
    quota = max(cores.quota for _, cores in ranks)
    worst: tuple[float, int, int, list[tuple[int, Cores]]] | None = None
    for own, members in _groups(ranks):
        threads = sum(_threads_of(cores) for _, cores in members)
        usable = min(len(own), math.ceil(quota)) if quota else len(own)
        if threads > max(usable, len(members)) and (worst is None or threads / usable > worst[0]):
            worst = threads / usable, threads, usable, members
    each = ", ".join(sorted({f"OMP_NUM_THREADS={cores.omp_threads or 'unset'}" for _, cores in ranks}))
    if worst is None:
        total = sum(_threads_of(cores) for _, cores in ranks)
        yield ok(
            "threads", f"{_count(total, 'thread')} of a host compute ({each})", *(rank for rank, _ in ranks)
        )
        return
    _, threads, usable, members = worst
    share = max(usable // len(members), 1)
    limit = " of processor time" if quota and usable < len(members[0][1].own) else ""
    found = f"{threads} threads compute on {_count(usable, 'core')}{limit} ({each})"
    yield warning(
        "threads", found, f"Set OMP_NUM_THREADS={share} on every rank.", *(rank for rank, _ in members)
    )


def _threads_of(cores: Cores) -> int:
    """Return the most threads on which a rank computes: other libraries than the framework follow the variable."""
    return max(cores.training_threads, cores.omp_threads)


def _cores_text(own: frozenset[int]) -> str:
    return f"core {ranks_text(sorted(own), 0)}" if len(own) == 1 else f"cores {ranks_text(sorted(own), 0)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
