"""What a build step needs of the machine that it runs on, and may have to wait for."""

from __future__ import annotations

from engines import machine
from engines.backend import BackendMissing, backend_version
from engines.profile import Device, Profile


def missing_gpu(device: Device) -> str | None:
    """Which GPU there should be and which one there is; None where they are of one compute capability."""
    found = machine.gpu_capabilities()[:1]
    if found == (device.capability,):
        return None
    here = f"GPU 0 here has {found[0]}" if found else "there is no GPU here"
    return f"{device.title} (compute capability {device.capability}); {here}"


def missing_to_run(profile: Profile) -> str | None:
    """Why this machine cannot run a profile's engines; None if it can."""
    try:
        backend_version(profile.backend)
    except BackendMissing as missing:
        return str(missing)
    lacking = missing_gpu(profile.device) if profile.device else None
    return None if lacking is None else f"its engines run on {lacking}"
