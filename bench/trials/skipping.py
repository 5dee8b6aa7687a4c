# ruff: noqa
"""Times variants of the skipping kernel beside its dense loop: `python -m bench.trials.skipping OUT.json`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.attention import SCALE, THRESHOLD, _rows, _skippable, inputs
from bench.measuring import in_turns
from plugins.kernels import flash_attention_3
from plugins.kernels.hopper_attention import Variant, attend

ROWS = 58_880

FORCED = (
    "        if (tile + 1 < tiles) barrier_wait(&shared.keys_full[keys.index], keys.parity);\n        products_wait<0>();",
    "        if (tile + 1 < tiles)\n            barrier_wait(&shared.keys_full[keys.index],\n"
    "                         keys.parity ^ uint32(rows.total[0] + rows.total[1] < 0.f));\n        products_wait<0>();",
)
_HOT = """        products_begin();
        make_scores(scores, queries, key_tiles + keys.index * (TILE_BYTES / 16));
        add_values(sums, weights, value_tiles + values.index * (TILE_BYTES / 16));
"""
_COLD = """            products_begin();
            make_scores(scores, queries, key_tiles + keys.index * (TILE_BYTES / 16));
"""
_WAIT, _PASS = (
    f'asm volatile("{name} %0, 256;" ::"r"({number}) : "memory");\n'
    for name, number in (("bar.sync", "1 + group"), ("bar.arrive", "2 - group"))
)
TURNS = (
    (_HOT, _WAIT + _HOT + _PASS),
    (_COLD, _WAIT + _COLD + _PASS),
    ("    Stage next = values;", f"    if (group == 1) {_PASS}    Stage next = values;"),
)
EDITS = {"forced": (FORCED,), "spec forced": (FORCED,), "turns": (FORCED, *TURNS)}
FILES = {"before": "attention_before.cu", "new": "attention_new.cu", "forced": "attention_new.cu"} | dict.fromkeys(
    ("spec", "spec forced", "turns"), "attention_spec.cu"
)


@dataclass(frozen=True)
class Trial(Variant):
    """A variant whose source is edited."""

    edit: str = "main"

    def source(self) -> str:
        text = Variant.source(self)
        if self.edit in FILES:
            start = text.index("// Attention on Hopper's")
            text = text[:start] + (Path(__file__).parent / FILES[self.edit]).read_text()
        for old, new in EDITS.get(self.edit, ()):
            assert text.count(old) == 1, (self.edit, text.count(old))
            text = text.replace(old, new)
        return text


TRIALS = {
    "bf16 before": Trial(2, 128, 3, "before"),
    "bf16 new": Trial(2, 128, 3, "new"),
    "bf16 main": Trial(2, 128, 3),
    "bf16 forced": Trial(2, 128, 3, "forced"),
    "bf16 spec": Trial(2, 128, 3, "spec"),
    "bf16 spec forced": Trial(2, 128, 3, "spec forced"),
    "bf16 160": Trial(2, 160, 2, "spec forced"),
    "bf16 176": Trial(2, 176, 2, "spec forced"),
    "bf16 192": Trial(2, 192, 2, "spec forced"),
    "bf16 turns": Trial(2, 128, 3, "turns"),
    "bf16 176 turns": Trial(2, 176, 2, "turns"),
    "sage before": Trial(1, 224, 3, "before"),
    "sage new": Trial(1, 224, 3, "new"),
    "sage main": Trial(1, 224, 3),
    "sage forced": Trial(1, 224, 3, "forced"),
    "sage spec": Trial(1, 224, 3, "spec"),
    "sage spec forced": Trial(1, 224, 3, "spec forced"),
    "sage turns": Trial(1, 224, 3, "turns"),
}


def main() -> None:
    began = time.monotonic()
    only = sys.argv[2:]
    for name in list(TRIALS):
        if not name.endswith("before") and (name.endswith("turns") if not only else name not in only):
            del TRIALS[name]
    import subprocess

    from bench import host

    query = "--query-gpu=memory.total,memory.reserved,memory.used,memory.free"
    said = subprocess.run(("nvidia-smi", query, "--format=csv"), capture_output=True, text=True, check=False).stdout
    print(said, torch.cuda.mem_get_info(), host.used_memory(), torch.cuda.memory_reserved(), flush=True)
    found: dict[str, object] = {}
    x = inputs(ROWS)
    found["right"] = right = {}
    small = _skippable(8_000, 0.3)
    for name, trial in list(TRIALS.items()):
        try:
            base = TRIALS[name.split()[0] + " before"]
            at = torch.full((1,), THRESHOLD, device="cuda")
            result, skipped = attend(trial, *small, _rows(small), at, SCALE)
            wanted, counts = attend(base, *small, _rows(small), at, SCALE)
            torch.cuda.synchronize()
            difference = float((result.double() - wanted.double()).norm() / wanted.double().norm())
            right[name] = {"difference": difference, "counts as before": bool(torch.equal(skipped, counts))}
        except Exception as error:  # noqa: BLE001
            right[name] = {"failed": str(error)[:300]}
            del TRIALS[name]
        print(name, right[name], f"{time.monotonic() - began:.0f} s", flush=True)
    sides = {}
    for name, trial in TRIALS.items():
        for kind, threshold in (("dense", 0.0), ("skipping", THRESHOLD)):
            at = torch.full((1,), threshold, device="cuda")
            sides[f"{name}, {kind}"] = partial(attend, trial, *x, _rows(x), at, SCALE)
    if flash_attention_3.available():
        sides["FlashAttention-3"] = lambda: flash_attention_3.attend(*x, SCALE)
    timings = in_turns(sides, 5)
    found["no tile skipped"] = {name: t.as_json() for name, t in timings.items()}
    for name in TRIALS:
        dense, skipping = (timings[f"{name}, {kind}"].median for kind in ("dense", "skipping"))
        print(f"{name:20} dense {dense:7.2f} skipping {skipping:7.2f} ratio {skipping / dense:.4f}", flush=True)
    print({name: t.median for name, t in timings.items() if "Flash" in name}, f"{time.monotonic() - began:.0f} s")
    del sides, x
    found["shares"] = shares = {}
    for share in (0.3, 0.5, 0.7):
        x = _skippable(ROWS, share)
        at, none = (torch.full((1,), value, device="cuda") for value in (THRESHOLD, 0.0))
        sides = {}
        for name in TRIALS:
            if name.split()[-1] not in ("160", "192", "turns", "forced") or name.endswith("spec forced"):
                sides[f"{name}, dense"] = partial(attend, TRIALS[name], *x, _rows(x), none, SCALE)
                sides[f"{name}, skipping"] = partial(attend, TRIALS[name], *x, _rows(x), at, SCALE)
        timings = in_turns(sides, 3)
        shares[str(share)] = {name: t.median for name, t in timings.items()}
        ratios = {
            n[:-10]: t.median / timings[n[:-10] + ", dense"].median for n, t in timings.items() if "skipping" in n
        }
        print(
            share,
            {name: round(value, 4) for name, value in ratios.items()},
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
