"""Attention at the model's size beside its peers: time, error against float64, and time by the share of skipped tiles.

Peers are cuDNN and FlashAttention-2 as torch has them, and FlashAttention-3 where its wheel is installed; all 8-bit
sides are timed with the quantisation of their inputs. Operations are counted as 4 * rows^2 * 128 a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench import host
from bench.measuring import ROUNDS, in_turns
from plugins.kernels import flash_attention_3
from plugins.kernels.hopper_attention import BFLOAT16, HEAD, SAGE, Variant, attend
from plugins.ops.fp8_linear import E4M3, E4M3_MAX

HEADS = 56
SCALE = HEAD**-0.5
CHECKED_QUERIES = 256
"""Queries whose results are compared with float64's."""

LONGEST = 110_592
"""Rows of 15 seconds with references."""

SHARES = (0.0, 0.3, 0.5, 0.7)
THRESHOLD = 1e-4
PERIOD = 896
"""Rows that are skippable together: whole tiles of every variant."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Side = Callable[[Inputs], torch.Tensor]


def measure(rows: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Everything, on one GPU."""
    found = {
        "what": f"attention of {HEADS} heads of {HEAD}, bfloat16 in and out",
        "host": host.describe(),
        "rows": rows,
        "speed": speed(sides(), inputs(rows), rounds),
        "error": {"normal data": errors(inputs(rows)), "keys with a large mean": errors(inputs(rows, mean=4.0))},
        "skipping": {name: skipping(variant, rows, rounds) for name, variant in VARIANTS.items()},
    }
    torch.cuda.empty_cache()
    longest = inputs(LONGEST)
    own = {name: side for name, side in sides().items() if name in VARIANTS}
    found["longest"] = {"rows": LONGEST, "speed": speed(own, longest, rounds), "error": errors(longest, own)}
    return found


VARIANTS = {"ours, bfloat16": BFLOAT16, "ours, SAGE": SAGE}


def sides() -> dict[str, Side]:
    """What is measured, by name."""
    found: dict[str, Side] = {
        "cuDNN, bfloat16": partial(_torch, SDPBackend.CUDNN_ATTENTION),
        "FlashAttention-2, bfloat16": partial(_torch, SDPBackend.FLASH_ATTENTION),
    }
    if flash_attention_3.available():
        found["FlashAttention-3, bfloat16"] = lambda x: flash_attention_3.attend(*x, SCALE)
        found["FlashAttention-3, fp8"] = _flash_fp8
    return found | {name: partial(own, variant) for name, variant in VARIANTS.items()}


def own(variant: Variant, x: Inputs, threshold: float = 0.0) -> torch.Tensor:
    """One of our kernels over all rows."""
    return attend(variant, *x, _rows(x), torch.full((1,), threshold, device="cuda"), SCALE)[0]


def inputs(rows: int, mean: float = 0.0) -> Inputs:
    """Queries, keys and values [1, H, S, 128], rows first in memory; keys of a head may share a mean."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(rows, HEADS, HEAD, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3)
    )
    k += mean * torch.randn(1, HEADS, HEAD, device="cuda", generator=generator, dtype=torch.bfloat16)
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # type: ignore[return-value]


def speed(measured: dict[str, Side], x: Inputs, rounds: int) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of each side, in turns."""
    timings = in_turns({name: partial(side, x) for name, side in measured.items()}, rounds)
    operations = 4.0 * x[0].shape[2] ** 2 * HEAD * HEADS
    return {name: {**t.as_json(), "tflops": operations / t.median / 1e9} for name, t in timings.items()}


def errors(x: Inputs, measured: dict[str, Side] | None = None) -> dict[str, float]:
    """Relative error of the first queries' results in each side, by all heads."""
    exact = _exact(x)
    found = {}
    for name, side in (measured or sides()).items():
        difference = side(x)[0, :, :CHECKED_QUERIES].double() - exact
        found[name] = float(difference.norm() / exact.norm())
    return found


def skipping(variant: Variant, rows: int, rounds: int) -> list[dict[str, float]]:
    """Time by the share of key tiles that all queries may skip, over the same data's time without skipping."""
    found = []
    for share in SHARES:
        x = _skippable(rows, share)
        run = {"dense": partial(own, variant, x), "skipping": partial(own, variant, x, THRESHOLD)}
        timings = in_turns(run, rounds)
        _, counts = attend(variant, *x, _rows(x), torch.full((1,), THRESHOLD, device="cuda"), SCALE)
        tiles = -(-rows // 64) * -(-rows // variant.keys)
        medians = {name: timing.median for name, timing in timings.items()}
        skipped = float(counts.double().mean() / tiles)
        ratio = medians["skipping"] / medians["dense"]
        found.append({"share": share, "skipped": skipped, "ms": medians["skipping"], "of dense": ratio})
    return found


def _skippable(rows: int, share: float) -> Inputs:
    """Every query scores that share of the keys, spread in periods, 26 below the others."""
    q, k, v = inputs(rows)
    q[..., 0], k[..., 0] = 10.0, 0.0
    period = torch.arange(rows, device="cuda") // PERIOD
    low = ((period + 1) * share).floor() > (period * share).floor()
    k[..., low, 0] = -30.0
    return q, k, v


def _exact(x: Inputs) -> torch.Tensor:
    """The first queries' results in float64, head by head: [H, queries, 128]."""
    heads = zip(*(tensor[0] for tensor in x), strict=True)
    return torch.stack([_exact_head(q[:CHECKED_QUERIES], k, v) for q, k, v in heads])


def _exact_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().T * SCALE).softmax(-1) @ v.double()


def _rows(x: Inputs) -> torch.Tensor:
    return torch.full((1,), x[0].shape[2], device="cuda")


def _torch(backend: SDPBackend, x: Inputs) -> torch.Tensor:
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(*x, scale=SCALE)


def _flash_fp8(x: Inputs) -> torch.Tensor:
    from fa3_fwd_interface import flash_attn_func

    quantised = [_by_head(tensor.transpose(1, 2)) for tensor in x]
    (q, q_scale), (k, k_scale), (v, v_scale) = quantised
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    result: torch.Tensor = flash_attn_func(q, k, v, softmax_scale=SCALE, **scales)
    return result.transpose(1, 2)


@torch.compile
def _by_head(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, S, H, d] in E4M3 with a scale for each head, [B, H]: the granularity that FlashAttention-3 takes."""
    scale = x.abs().amax(dim=(1, 3)).float() / E4M3_MAX
    return (x.float() / scale[:, None, :, None]).to(E4M3), scale
