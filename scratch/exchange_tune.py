"""Scratch: grids and unrolling of the exchange kernel on two GPUs; not part of the product."""
import json, sys, tempfile, statistics
from pathlib import Path
import torch
import torch.distributed as dist
from bench.ranks import together
from plugins.kernels import symmetric_exchange as se

ROWS, H, D = 58_816, 56, 128

def timed(run, rounds=12):
    for _ in range(3): run()
    out = []
    meeting = torch.zeros(1, device="cuda")
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(); dist.barrier(); dist.all_reduce(meeting)
        a.record(); run(); b.record(); torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    t = torch.tensor([statistics.median(out), min(out), max(out)], device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return [round(x, 3) for x in t.tolist()]

def work(rank, device, folder):
    def say(*a):
        if rank == 0: print(*a, flush=True)
    g = dist.group.WORLD
    n = ROWS // 2
    packed = torch.empty(n, H, 3 * D, dtype=torch.bfloat16, device=device).normal_()
    q, k, v = packed.chunk(3, -1)
    parts = q.contiguous(), k.contiguous(), v
    group = se.SymmetricGroup(g, device)
    group.to_heads(parts, ROWS); torch.cuda.synchronize()
    say("regs etc. ok; peer access", torch.cuda.can_device_access_peer(0, 1))
    # ceilings
    handle = group._heads._handles[0]
    peer = handle.get_buffer(1 - rank, (n * H * D // 2,), torch.bfloat16)
    src = parts[0].view(-1)[: peer.numel()]
    say("copy engine to peer, %d MB:" % (src.nbytes // 1e6), timed(lambda: peer.copy_(src)), "GB/s at", src.nbytes / 1e6)
    say("barrier alone", timed(lambda: handle.barrier()))
    for unroll in (4, 8, 16):
        for threads in (512, 256):
            for blocks in (0.25, 0.5, 1, 2, 3, 4):
                se._UNROLLED, se._MAX_THREADS = unroll, threads
                if threads == 256: pass
                se._module.cache_clear()
                procs = torch.cuda.get_device_properties(device).multi_processor_count
                class B(float):
                    def __mul__(self, o): return max(1, int(float(self) * o))
                se._BLOCKS_PER_PROCESSOR = B(blocks)
                t = timed(lambda: group.to_heads(parts, ROWS))
                t2 = timed(lambda: group.to_heads((parts[2],) * 3, ROWS), 6)
                say(f"unroll {unroll} threads<= {threads} blocks/SM {blocks}: {t}  {632.4/t[0]:.0f} GB/s; all views {t2}")
    return {}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as f:
        together(work, 2, Path(f), 150)
