"""How the ranks of a group exchange on this hardware: into each other's memory where they can, else by collectives."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

from plugins.kernels.cuda_module import CudaError
from plugins.kernels.symmetric_exchange import ABOVE, CAPABILITY, MAX_RANKS, ExchangeError, SymmetricGroup
from plugins.ranks import Group, ProcessGroup

Transport = Literal["auto", "symmetric", "collective"]
"""Into the peers' memory, or by torch's collectives (NCCL, gloo); auto: the first that works. Results are the same."""

VARIABLE = "H3TRT_EXCHANGE"
"""Environment variable by which an operator chooses one of them."""

_LOG = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DIGEST = 16
"""Bytes that tell one host, or one GPU, from another."""

_TRIAL_ROWS = 5


def asked_for(environment: Mapping[str, str]) -> Transport:
    """What the environment's H3TRT_EXCHANGE says; auto where it says nothing.

    Raises:
        ValueError: it is no transport.
    """
    said = environment.get(VARIABLE) or "auto"
    for transport in get_args(Transport):
        if transport == said:
            return transport
    raise ValueError(f"{VARIABLE}: got {said!r}; must be one of {', '.join(get_args(Transport))}")


def open_group(group: dist.ProcessGroup, device: torch.device, transport: Transport = "auto") -> Group:
    """A group's exchanges; every rank calls it with the same transport. Logs what is used, and why.

    Raises:
        ExchangeError: `transport` is "symmetric", and the ranks cannot reach each other's memory.
    """
    if transport == "collective":
        return _collective(group, "asked for")
    made = _symmetric(group, device)
    if isinstance(made, SymmetricGroup):
        _LOG.info("exchanges among %d ranks: writes into the peers' memory", made.size)
        return made
    if transport == "symmetric":
        raise ExchangeError(f"exchanges by symmetric memory: {made}; choose transport auto or collective")
    return _collective(group, made)


def _collective(group: dist.ProcessGroup, reason: str) -> ProcessGroup:
    made = ProcessGroup(group)
    _LOG.info("exchanges among %d ranks: collectives of %s (%s)", made.size, dist.get_backend(group), reason)
    return made


def _symmetric(group: dist.ProcessGroup, device: torch.device) -> SymmetricGroup | str:
    """The group that writes into memory, or why there is none; of one kind on every rank."""
    reason = _obstacle(group, device)
    if not _agreed(group, device, not reason):
        return reason or "another rank has an obstacle"
    # Only now, for a rank that stays away from the rendezvous would leave the others waiting.
    try:
        made = SymmetricGroup(group, device)
        reason = "" if _arrives(made, device) else "a trial did not bring what was sent"
    except (RuntimeError, CudaError) as error:
        reason = str(error).partition("\n")[0]
    if not _agreed(group, device, not reason):
        return reason or "another rank failed"
    return made


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why this rank cannot; empty where nothing is known that speaks against it."""
    told = _gathered(group, device, _identity(device))
    hosts, gpus = told[:, :_DIGEST].unique(dim=0), told[:, _DIGEST:].unique(dim=0)
    if device.type != "cuda":
        return f"device {device.type} has no symmetric memory"
    if len(told) > MAX_RANKS:
        return f"{len(told)} ranks, at most {MAX_RANKS} are served"
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(gpus) < len(told):
        return f"{len(told)} ranks share {len(gpus)} GPUs"
    if not CAPABILITY <= torch.cuda.get_device_capability(device) < ABOVE:
        return "compute capability not from {}.{} to below {}.{}".format(*CAPABILITY, *ABOVE)
    # Of GPUs that this process does not see, the rendezvous tells.
    own = torch.device(device).index or 0
    others = [i for i in range(torch.cuda.device_count()) if i != own and _gpu(i) in {bytes(g.tolist()) for g in gpus}]
    unreached = [i for i in others if not torch.cuda.can_device_access_peer(own, i)]
    return f"GPU {own} has no access to the memory of GPU {unreached[0]}" if unreached else ""


def _identity(device: torch.device) -> bytes:
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    gpu = _gpu(device.index or 0) if device.type == "cuda" else bytes(_DIGEST)
    return _digest(f"{platform.node()} {boot}") + gpu


def _gpu(index: int) -> bytes:
    return _digest(str(torch.cuda.get_device_properties(index).uuid))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST]


def _agreed(group: dist.ProcessGroup, device: torch.device, mine: bool) -> bool:
    """Whether all ranks say so."""
    return bool(_gathered(group, device, bytes([mine])).all())


def _gathered(group: dist.ProcessGroup, device: torch.device, told: bytes) -> torch.Tensor:
    """What every rank tells, [ranks, bytes] uint8 on the CPU."""
    mine = torch.tensor(list(told), dtype=torch.uint8, device=device)
    return ProcessGroup(group).gather_rows(mine.unsqueeze(0), dist.get_world_size(group)).cpu()


def _arrives(group: SymmetricGroup, device: torch.device) -> bool:
    """Whether each rank's rows come to every other, and go back."""
    heads, channels = group.size, 8
    rows = _TRIAL_ROWS * group.size
    every = torch.arange(rows * heads * channels, dtype=torch.float32, device=device).view(rows, heads, channels)
    mine = every[_TRIAL_ROWS * group.rank :][:_TRIAL_ROWS]
    (came,) = group.to_heads([mine], rows)
    back = group.to_rows(came, _TRIAL_ROWS)
    return torch.equal(came, every[:, group.rank : group.rank + 1]) and torch.equal(back, mine)
