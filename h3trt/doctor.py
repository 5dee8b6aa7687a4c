"""What this machine has and lacks for building and serving, each lack with the command that mends it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from engines.machine import available_processors, memory_bytes
from engines.profile import Profile
from h3trt.check import Check
from triton_repo.errors import ServerError
from triton_repo.installation import Installation
from triton_repo.ports import DEFAULT_PORTS, port_is_free
from triton_repo.shared_memory import ROOT as SHARED_MEMORY

GIB = 1 << 30
MIB = 1 << 20
LEAST_PYTHON = (3, 11)
# The miniature's demo request peaks below this; real checkpoints are admitted by their own sizes.
LEAST_MEMORY = 3 * GIB
# A Python model takes 1 MiB at start and grows with the latents and the MP4 that pass through it.
LEAST_SHARED_MEMORY = 64 * MIB


def examine(store: Path, profile: Profile) -> list[Check]:
    """All checks of this machine for a profile, and of the engine store at `store`, if there is one."""
    return [
        _python(),
        *_packages("serve"),
        *_packages("export"),
        _triton(),
        _processors(),
        _memory(),
        _shared_memory(),
        *_media(),
        *_ports(),
        *_gpu_checks(profile, store),
        _store(store),
    ]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    remedy = "make clean && make setup PYTHON=python3.11"
    return Check("Python", sys.version_info[:2] >= LEAST_PYTHON, f"{found} at {sys.executable}", remedy)


def _packages(extra: str) -> Iterator[Check]:
    """The installed releases of what h3trt and one of its extras require."""
    for text in importlib.metadata.requires("h3trt") or []:
        requirement = Requirement(text)
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if not optional or requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        remedy = f"pip install '{re.split(';', text)[0].strip()}' (or make setup)"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(f"{requirement.name} [{extra}]", False, "not installed", remedy)
            continue
        good = requirement.specifier.contains(version, prereleases=True)
        yield Check(f"{requirement.name} [{extra}]", good, f"{version}, wanted {requirement.specifier}", remedy)


def _triton() -> Check:
    try:
        installation = Installation.find()
    except ServerError as error:
        return Check("tritonserver", False, error.message, error.remedy)
    return Check("tritonserver", True, f"{installation.binary}, {installation.libpython}")


def _processors() -> Check:
    return Check("processors", True, str(available_processors()))


def _memory() -> Check:
    found = memory_bytes()
    remedy = "use a machine, or a container limit, with more memory"
    return Check("memory", found >= LEAST_MEMORY, f"{found / GIB:.1f} GiB", remedy)


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check("shared memory", False, f"no {SHARED_MEMORY}", f"mount -t tmpfs tmpfs {SHARED_MEMORY}")
    free = shutil.disk_usage(SHARED_MEMORY).free
    remedy = f"mount -o remount,size=1G {SHARED_MEMORY} (in a container: docker run --shm-size=1g)"
    return Check("shared memory", free >= LEAST_SHARED_MEMORY, f"{free / MIB:.0f} MiB free", remedy)


def _media() -> Iterator[Check]:
    """The encoders of the finished clip, in the FFmpeg libraries that PyAV brings; without it `_packages` says so."""
    try:
        import av
    except ImportError:
        return
    for codec in ("libx264", "aac"):
        found = ", ".join(f"{name} {'.'.join(map(str, v))}" for name, v in sorted(av.library_versions.items())[:1])
        there = codec in av.codecs_available
        yield Check(codec, there, found if there else "not in PyAV's FFmpeg", "pip install --force-reinstall av")


def _gpu_checks(profile: Profile, store: Path) -> Iterator[Check]:
    if profile.on_gpu:
        from h3trt.profile_checks import profile_checks  # needs the exporter, which a serving host may lack

        yield from profile_checks(profile, store)


def _ports() -> Iterator[Check]:
    for service, port in DEFAULT_PORTS.items():
        remedy = f"h3trt serve --{service}-port 0 takes a free one"
        yield Check(f"{service} port", port_is_free(port), f"{port} on loopback", remedy)


def _store(path: Path) -> Check:
    from engines.store import EngineStore, StoreError

    try:
        manifest = EngineStore.open(path).manifest
    except StoreError as error:
        return Check("engines", False, str(error))
    return Check("engines", True, f"{path}: {len(manifest.graphs)} engines of {manifest.checkpoint.root}")
