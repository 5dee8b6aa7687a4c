"""Runs a function in processes of one gloo group, and collects what each returns."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

Ranked = Callable[..., Mapping[str, torch.Tensor]]
"""A function at the top of a module; it is called as function(rank, size, *arguments)."""


class RanksFailed(AssertionError):
    """A rank raised, died or stood still; says which, with its stack."""


def run_ranks(
    function: Ranked, size: int, directory: Path, *arguments: Any, timeout: float = 240
) -> list[dict[str, torch.Tensor]]:
    """What `function` returns on each of `size` ranks, which are in torch's default group (gloo) when it is called.

    arguments: paths, numbers and strings. directory: empty, for rendezvous and results. Raises RanksFailed with the
    stacks of all ranks that did not return within `timeout` seconds.
    """
    # The server of forks imports torch once, for all processes that a test session ever starts.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "safetensors.torch"])
    places = [directory / f"rank{rank}" for rank in range(size)]
    for place in places:
        place.mkdir(parents=True)
    meeting = directory / "rendezvous"
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(function, rank, size, meeting, place, arguments, timeout), daemon=True)
        for rank, place in enumerate(places)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes, time.monotonic() + timeout + 10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    failed = [f"rank {r}: {_complaint(p)}" for r, p in enumerate(places) if not (p / "result.safetensors").exists()]
    if failed:
        raise RanksFailed("\n".join(failed))
    return [safetensors.torch.load_file(place / "result.safetensors") for place in places]


def _wait(processes: list[BaseProcess], deadline: float) -> None:
    """Until all have ended, or a few seconds after the first that failed."""
    while (alive := [process for process in processes if process.is_alive()]) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 5)
        alive[0].join(0.05)


def _rank(
    function: Ranked, rank: int, size: int, meeting: Path, place: Path, arguments: tuple[Any, ...], timeout: float
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with (place / "stacks").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
        try:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
            result = {name: tensor.contiguous() for name, tensor in function(rank, size, *arguments).items()}
            safetensors.torch.save_file(result, place / "unfinished")
            (place / "unfinished").rename(place / "result.safetensors")
            # None closes its connections while another still reads from it.
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            stacks.write(traceback.format_exc())
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()


def _complaint(place: Path) -> str:
    stacks = place / "stacks"
    return (stacks.read_text() if stacks.exists() else "") or "no stack: it was stopped, or never began"
