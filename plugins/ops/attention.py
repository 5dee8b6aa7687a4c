"""Dense bidirectional attention, named so that TensorRT's ONNX importer takes it as its native attention layer."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plugins.kernels import flash_attention_3
from plugins.kernels.hopper_attention import ABOVE, CAPABILITY
from plugins.op import Fast, Op


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, TRT_decomposable: int
) -> torch.Tensor:
    """`softmax(scale * query @ key^T) @ value` over all rows.

    query [B, H, S, d], key and value [B, H, K, d]; returns [B, H, S, d]. `TRT_decomposable` is read by TensorRT only:
    1 lets it build the layer from several kernels where it has no fused one (float32); 0 makes such a build fail.
    """
    return _laid_out(scaled_dot_product_attention(query, key, value, scale=scale), query)


def fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, TRT_decomposable: int
) -> torch.Tensor:
    """A result with the query's shape, dtype and layout: rows before heads, where the query's rows come first."""
    return torch.empty_like(query)


def cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, TRT_decomposable: int
) -> torch.Tensor:
    """cuDNN's fused kernel: on an H200 nearly twice as fast as the kernel torch picks by itself."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return _laid_out(scaled_dot_product_attention(query, key, value, scale=scale), query)


def hopper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, TRT_decomposable: int
) -> torch.Tensor:
    """FlashAttention-3 where its wheel is installed, else cuDNN: 706 and 610 TFLOP/s on an H200 at 58,880 rows.

    The kernel of our own (658) copies its inputs first, for a gain that is not worth their memory
    (bench/results/attention.json).
    """
    if flash_attention_3.serves(query):
        return _laid_out(flash_attention_3.attend(query, key, value, scale), query)
    return cudnn(query, key, value, scale, TRT_decomposable)


def _laid_out(result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The result in the layout that `fake` promises; kernels differ in which one they choose."""
    promised = torch.empty_like(query, device="meta").stride()
    # Where there is one of something, its stride says nothing.
    strides = zip(result.stride(), promised, query.shape, strict=True)
    if all(found == wanted or size == 1 for found, wanted, size in strides):
        return result
    return torch.empty_like(query).copy_(result)


BODY = "result = Attention <scale: float = @scale> (query, key, value)"

# The reference, named for devices, is called by a compiler as it is: taken apart, it would hold all scores.
OP = Op(
    "Attention",
    reference,
    fake,
    BODY,
    fast=(
        Fast("cuda", hopper, minimum=CAPABILITY, below=ABOVE),
        Fast("cuda", cudnn, minimum=(9, 0)),
        Fast("cuda", reference),
        Fast("cpu", reference),
    ),
)
