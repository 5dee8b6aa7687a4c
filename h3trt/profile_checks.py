"""What a GPU profile needs of this machine, by the profile and its plan, each lack with the command that mends it."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from engines.backend import BackendMissing, backend_version
from engines.backends.inductor import missing_compiler
from engines.machine import memory_bytes
from engines.plan import Plan, PlanError, Workload, make_plan, released_outline
from engines.profile import Profile
from engines.tensorrt import REQUIREMENTS
from h3trt.check import Check
from h3trt.gpus import GpusUnknown, Installed, installed_gpus

LEAST_CUDA = {"9.0": (12, 0), "8.9": (12, 0)}
NEWEST_CUDA = (12, 8)
"""The first CUDA for each compute capability; Blackwell's came with 12.8."""

LEAST_FILES = 4096
"""Open files of a rank: the checkpoint's shards, engines, sockets of collectives and of clients."""

MEMORY_TOLERANCE = 0.98
"""Cards of one kind report slightly different totals, by firmware and error correction."""


def profile_checks(profile: Profile, store: Path) -> Iterator[Check]:
    """All checks of a GPU profile, in the order in which one would mend them."""
    yield from _gpus(profile)
    yield _package(profile)
    if profile.gpus > 1:
        yield _nccl()
    yield _open_files()
    try:
        plan = make_plan(profile, released_outline(), Workload())
    except PlanError as refused:
        yield Check("plan", False, str(refused), f"h3trt plan --profile {profile.name} --seconds 5")
        return
    yield from _needs(plan, store)


def _gpus(profile: Profile) -> Iterator[Check]:
    try:
        found = installed_gpus()
    except GpusUnknown as unknown:
        yield Check("GPUs", False, str(unknown), unknown.remedy)
        return
    yield _count(profile, found)
    for index, gpu in enumerate(found.gpus[: profile.gpus]):
        yield from _gpu(profile, f"GPU {index}", gpu.name, gpu.memory, gpu.capability)
    yield _driver(profile, found)


def _count(profile: Profile, found: Installed) -> Check:
    remedy = "choose a profile for fewer GPUs, or unset CUDA_VISIBLE_DEVICES and give the container --gpus all"
    return Check("GPUs", len(found.gpus) >= profile.gpus, f"{len(found.gpus)}, wanted {profile.gpus}", remedy)


def _gpu(profile: Profile, place: str, name: str, memory: int, capability: str) -> Iterator[Check]:
    device = profile.device
    assert device is not None  # as profiles for GPUs are validated
    wrong = f"choose a profile for this GPU; {profile.name} is for {device.title}"
    wanted = f"{name}, compute capability {capability}, wanted {device.capability}"
    yield Check(place, capability == device.capability, wanted, wrong)
    enough = memory >= MEMORY_TOLERANCE * device.memory_bytes
    yield Check(f"{place} memory", enough, f"{memory >> 20} MiB, wanted {device.memory_mib} MiB", wrong)


def _driver(profile: Profile, found: Installed) -> Check:
    assert profile.device is not None  # as profiles for GPUs are validated
    least = LEAST_CUDA.get(profile.device.capability, NEWEST_CUDA)
    version = tuple(int(part) for part in found.cuda.split("."))
    words = f"driver {found.driver} runs CUDA {found.cuda}, wanted {least[0]}.{least[1]}"
    return Check("driver", version >= least, words, "apt-get install --only-upgrade nvidia-open && reboot")


def _package(profile: Profile) -> Check:
    if profile.backend == "inductor":
        return _compiler()
    assert profile.backend in ("tensorrt", "tensorrt_rtx")  # the profile is on GPUs
    wanted = Requirement(REQUIREMENTS[profile.backend])
    remedy = f"pip install '{wanted}'"
    try:
        version = backend_version(profile.backend)
    except BackendMissing:
        return Check(profile.backend, False, "cannot be imported", remedy)
    found = f"{version}, wanted {wanted.specifier}"
    return Check(profile.backend, wanted.specifier.contains(version), found, remedy)


def _compiler() -> Check:
    missing = missing_compiler()
    return Check("C++ compiler", missing is None, missing or "g++", "apt-get install g++")


def _nccl() -> Check:
    found = ctypes.util.find_library("nccl")
    if found is None:
        packages = [d.metadata["Name"] for d in importlib.metadata.distributions()]
        found = next((name for name in packages if name and name.startswith("nvidia-nccl-cu")), None)
    return Check("NCCL", found is not None, found or "no libnccl.so.2", "pip install nvidia-nccl-cu13")


def _open_files() -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    good = limit == resource.RLIM_INFINITY or limit >= LEAST_FILES
    return Check("open files", good, f"{limit}, wanted {LEAST_FILES}", f"ulimit -n {LEAST_FILES}")


def _needs(plan: Plan, store: Path) -> Iterator[Check]:
    if plan.pinned:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        good = limit == resource.RLIM_INFINITY or limit >= plan.pinned
        found = "unlimited" if limit == resource.RLIM_INFINITY else _size(limit)
        remedy = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"
        yield Check("pinned memory", good, f"{found}, wanted {_size(plan.pinned)}", remedy)
    memory = memory_bytes()
    remedy = "use a machine with more memory, or a profile that keeps more on the GPU"
    yield Check("host memory", memory >= plan.host, f"{_size(memory)}, wanted {_size(plan.host)}", remedy)
    folder = next(parent for parent in store.absolute().parents if parent.exists())
    free, wanted = shutil.disk_usage(folder).free, plan.sidecar + plan.engines
    remedy = f"free {_size(max(0, wanted - free))} on the disk of {folder}, or give --store on another"
    words = f"{_size(free)} free at {folder}, wanted {_size(wanted)} beside a checkpoint of {_size(plan.checkpoint)}"
    yield Check("disk", free >= wanted, words, remedy)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
