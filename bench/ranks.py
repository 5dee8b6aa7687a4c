"""Processes that measure together, one a GPU of this machine."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.rank_place import NO_MULTICAST, see_one_gpu

Measurement = Callable[[int, torch.device, Path], dict[str, Any]]
"""What a rank does: its number, its GPU, and a folder that all ranks see; returns what JSON can hold."""

PAUSE = 4_000_000
"""Cycles of a GPU, some 2 ms."""


class RanksError(RuntimeError):
    """Ranks did not come to an end; says which, and how."""


def together(
    run: Measurement, ranks: int, folder: Path, limit: float = 300.0, alone: bool = False
) -> list[dict[str, Any]]:
    """Runs a module's function in that many processes over NCCL; what each returns, in their order.

    `alone`: each sees its own GPU and no other, as in serving.

    Raises:
        RanksError: one fails, or they take more than `limit` seconds; all have been ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        _result(folder, rank).unlink(missing_ok=True)
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes = [context.Process(target=_rank, args=(run, rank, ranks, port, folder, alone)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        _watch(processes, time.monotonic() + limit)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads(_result(folder, rank).read_text()) for rank in range(ranks)]


def meet(run: Callable[[], object]) -> float:
    """Milliseconds of one run on this rank's GPU, which begins when the others are there as well."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meeting = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    # The hosts have met; their devices do so behind a pause, in which the hosts can queue all that is measured.
    torch.cuda._sleep(PAUSE)
    dist.all_reduce(meeting)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _watch(processes: Sequence[BaseProcess], end: float) -> None:
    while any(process.is_alive() for process in processes):
        if failed := [i for i, process in enumerate(processes) if process.exitcode]:
            raise RanksError(f"rank {failed[0]} ended with {processes[failed[0]].exitcode}; its output is above")
        if time.monotonic() > end:
            raise RanksError("the ranks take longer than they may; all have been ended")
        time.sleep(0.05)
    if failed := [i for i, process in enumerate(processes) if process.exitcode]:
        raise RanksError(f"rank {failed[0]} ended with {processes[failed[0]].exitcode}; its output is above")


def _rank(run: Measurement, rank: int, ranks: int, port: int, folder: Path, alone: bool) -> None:
    os.environ.update(NO_MULTICAST)
    if alone:  # nothing has asked for a GPU yet in this process
        see_one_gpu(rank, os.environ)
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda", 0 if alone else rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, device_id=device
    )
    try:
        _result(folder, rank).write_text(json.dumps(run(rank, device, folder)))
    finally:
        dist.destroy_process_group()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
