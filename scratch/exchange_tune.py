"""Scratch: shapes of the exchange kernel on two GPUs; not part of the product."""
import random, statistics, sys, tempfile, time
from pathlib import Path
import torch
import torch.distributed as dist
from bench.ranks import meet, together
from plugins.kernels import symmetric_exchange as se

ROWS, H, D = 58_816, 56, 128
KB = 1 << 10
VARIANTS = [(32, 200, 0.5, 0.5), (57, 200, 0.5, 0.5), (57, 200, 0.75, 0.25), (57, 200, 0.625, 0.375), (32, 96, 0.5, 0.5), (32, 96, 1.0, 1.0),
            (16, 96, 1.0, 1.0), (32, 96, 1.25, 0.75), (16, 96, 0.75, 0.5), (16, 64, 1.5, 1.5)]

def settings(item, shared, far, near):
    se._ITEM, se._SHARED, se._FAR_BLOCKS, se._NEAR_BLOCKS = item * KB, shared * KB, far, near

def summary(values):
    t = torch.tensor(values, device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    t = t.tolist()
    return f"{statistics.median(t):.3f} ({min(t):.3f}..{max(t):.3f})"

def work(rank, device, folder):
    def say(*a):
        if rank == 0: print(*a, flush=True)
    g = dist.group.WORLD
    n = ROWS // 2
    packed = torch.empty(n, H, 3 * D, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device).manual_seed(rank))
    q, k, v = packed.chunk(3, -1)
    parts = q.contiguous(), k.contiguous(), v
    group = se.SymmetricGroup(g, device)
    from plugins.ranks import ProcessGroup
    wanted = [x.clone() for x in ProcessGroup(g).to_heads(parts, ROWS)]
    seen, ok = {}, {}
    start = time.monotonic()
    for variant in VARIANTS:
        settings(*variant)
        for _ in range(2): group.to_heads(parts, ROWS)
        torch.cuda.synchronize()
        got = group.to_heads(parts, ROWS)
        ok[variant] = all(torch.equal(a, b) for a, b in zip(got, wanted)); del got
        back = group.to_rows(wanted[2], n); ok[variant] &= torch.equal(back, v); del back
        seen[variant] = []
    say("compiled and checked after", time.monotonic() - start)
    drawn = random.Random(0)
    for _ in range(10):
        for variant in drawn.sample(VARIANTS, len(VARIANTS)):
            settings(*variant)
            a = meet(lambda: group.to_heads(parts, ROWS))
            b = meet(lambda: group.to_heads((v, v, v), ROWS))
            c = meet(lambda: group.to_rows(wanted[2], n))
            seen[variant].append((a, b, c))
    barrier = [meet(lambda: group._heads.barrier()) for _ in range(20)]
    say("barrier alone", summary(barrier))
    say("item KB, shared KB, far, near blocks/SM | to heads | all views | to rows | equal")
    for variant in VARIANTS:
        say(*variant, "|", " | ".join(summary(x) for x in zip(*seen[variant])), "|", ok[variant])
    return {}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as f:
        together(work, 2, Path(f), 150)
