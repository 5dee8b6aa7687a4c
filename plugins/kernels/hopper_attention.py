"""Attention kernels of Hopper (compute capability 9.0): SAGE and bfloat16, over valid rows, with skipped tiles.

`attention_sm90.cu` says how they work. Here is what is written in front of it, and what launches it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from plugins.kernels.cuda_module import CudaModule, compile_cubin

HEAD = 128
"""Channels of a head; no others are served."""

QUERY_TILE = 64
"""Queries that decide together whether a tile of keys is skipped: a warpgroup's."""

CAPABILITY = (9, 0)
ABOVE = (9, 1)
"""The only compute capability that the kernels run on, and the first that they do not."""

_ARCHITECTURE = "sm_90a"
_SOURCE = Path(__file__).with_name("attention_sm90.cu")
_BLOCK_QUERIES = 2 * QUERY_TILE
_CLUSTER_QUERIES = 2 * _BLOCK_QUERIES
_CHUNK = 512
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Variant:
    """One compilation: bytes of an element (1: E4M3, 2: bfloat16), keys of a tile, tiles in shared memory."""

    element_bytes: int
    keys: int
    stages: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of keys or values."""
        return self.keys * HEAD * self.element_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the attention kernel: queries, stages, barriers, votes, and room to align them."""
        queries = _BLOCK_QUERIES * HEAD * self.element_bytes
        barriers, votes = 8 * (1 + 4 * self.stages), 2 * 16 * (self.stages + 1)
        return queries + 2 * self.stages * self.tile_bytes + barriers + votes + 2 * _ALIGNMENT

    def source(self) -> str:
        """The CUDA source of this variant."""
        names = ("ELEMENT_BYTES", "KEYS", "STAGES")
        values = (self.element_bytes, self.keys, self.stages)
        defines = "\n".join(f"#define {name} {value}" for name, value in zip(names, values, strict=True))
        products = _score_product(self.element_bytes, self.keys) + _value_product(self.element_bytes)
        return f"{defines}\n{products}\n{_SOURCE.read_text()}"


SAGE = Variant(element_bytes=1, keys=224, stages=3)
BFLOAT16 = Variant(element_bytes=2, keys=128, stages=3)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take such tensors: as many keys as queries, bfloat16, 128 channels that lie side by side.

    Rows begin at multiples of 16 bytes.
    """
    return query.numel() > 0 and all(
        x.dtype == torch.bfloat16
        and x.shape == (*query.shape[:-1], HEAD)
        and x.stride(-1) == 1
        and not any(stride % 8 for stride in (*x.stride()[:-1], x.storage_offset()))
        for x in (query, key, value)
    )


def attend(
    variant: Variant,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_rows: torch.Tensor,
    threshold: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention among the first rows: bfloat16 [B, H, S, 128] each, of any strides whose last is 1.

    valid_rows [1] int64 and threshold [1] float32 are read by the kernels, on the device. Returns the result
    [B, H, S, 128] bfloat16, which lies as the query does, and the skipped tiles [B, H] int64.
    """
    return _Call(variant, query, valid_rows, threshold).run(key, value, scale)


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((n, ctypes.c_longlong) for n in ("batch", "row", "head"))]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Tensor:
        batch, head, row, _ = x.stride()
        return cls(x.data_ptr(), batch, row, head)


class _Preparation(ctypes.Structure):
    _fields_ = [
        ("source", _Tensor),
        *((n, ctypes.c_void_p) for n in ("valid_rows", "mean", "image", "scales", "partial")),
        ("heads", ctypes.c_int),
        ("chunks", ctypes.c_int),
    ]


_POINTERS = (
    *("queries", "keys", "values", "query_scales", "key_scales", "value_scales"),
    *("valid_rows", "threshold", "result", "skipped"),
)


class _Problem(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in _POINTERS),
        *((n, ctypes.c_longlong) for n in ("batch_stride", "row_stride", "head_stride", "rows")),
        ("heads", ctypes.c_int),
        ("query_tiles", ctypes.c_int),
        ("key_tiles", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


class _Call:
    """One attention: its sizes and its buffers, which torch's allocator takes back when it has been queued."""

    def __init__(
        self, variant: Variant, query: torch.Tensor, valid_rows: torch.Tensor, threshold: torch.Tensor
    ) -> None:
        self._variant, self._query = variant, query
        self._valid_rows, self._threshold = valid_rows.to(query.device), threshold.to(query.device, torch.float32)
        self._module = _module(variant, query.device)
        batch, self._heads, self._rows, _ = query.shape
        self._all_heads = batch * self._heads
        self._query_tiles = -(-self._rows // _CLUSTER_QUERIES) * (_CLUSTER_QUERIES // QUERY_TILE)
        self._key_tiles = -(-self._rows // variant.keys)

    def run(self, key: torch.Tensor, value: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        value_scales, mean = self._statistics(key, value)
        queries, query_scales = self._image(self._query_tiles, QUERY_TILE, QUERY_TILE)
        keys, key_scales = self._image(self._key_tiles, self._variant.keys, 1)
        values, _ = self._image(self._key_tiles, self._variant.keys, 0)
        self._prepare("prepare_queries", self._query_tiles, self._job(self._query, queries, query_scales))
        self._prepare("prepare_keys", self._key_tiles, self._job(key, keys, key_scales, mean))
        staged = self._variant.keys * (HEAD * self._variant.element_bytes + 8)
        self._prepare("prepare_values", self._key_tiles, self._job(value, values, value_scales), staged)
        batch = self._all_heads // self._heads
        result = torch.empty_like(self._query)
        skipped = torch.zeros(batch, self._heads, dtype=torch.int64, device=self._query.device)
        tensors = (queries, keys, values, query_scales, key_scales, value_scales)
        pointers = (*tensors, self._valid_rows, self._threshold, result, skipped)
        batch_stride, head_stride, row_stride, _ = result.stride()
        sizes = (self._rows, self._heads, self._query_tiles, self._key_tiles)
        strides = (batch_stride, row_stride, head_stride)
        problem = _Problem(*(x.data_ptr() for x in pointers), *strides, *sizes, scale)
        grid = (self._query_tiles // 2, self._all_heads, 1)
        self._module.launch("attend", grid, 384, [problem], self._variant.shared_bytes)
        return result, skipped

    def _statistics(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of the values' channels and the keys' mean, each [heads, 128] float32."""
        if self._variant.element_bytes > 1:
            return self._floats(self._all_heads, HEAD).fill_(1), self._floats(0)
        chunks = -(-self._rows // _CHUNK)
        scales, mean = self._floats(self._all_heads, HEAD), self._floats(self._all_heads, HEAD)
        partial = self._floats(2, chunks, self._all_heads, HEAD)
        jobs = [self._job(x, mean, scales, mean, part, chunks) for x, part in zip((key, value), partial, strict=True)]
        self._module.launch("statistics", (chunks, self._all_heads, 2), 256, jobs)
        self._module.launch("combine", (self._all_heads, 1, 1), HEAD, [*jobs, ctypes.c_void_p(mean.data_ptr())])
        return scales, mean

    def _prepare(self, kernel: str, tiles: int, job: _Preparation, shared: int = 0) -> None:
        self._module.launch(kernel, (tiles, self._all_heads, 1), 256, [job], shared)

    def _image(self, tiles: int, rows: int, scales: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for tiles and for their scales."""
        size = self._all_heads * tiles * rows * HEAD * self._variant.element_bytes
        image = torch.empty(size, dtype=torch.uint8, device=self._query.device)
        return image, self._floats(self._all_heads * tiles * scales)

    def _floats(self, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=self._query.device)

    def _job(
        self,
        source: torch.Tensor,
        image: torch.Tensor,
        scales: torch.Tensor,
        mean: torch.Tensor | None = None,
        partial: torch.Tensor | None = None,
        chunks: int = 0,
    ) -> _Preparation:
        tensors = (self._valid_rows, mean, image, scales, partial)
        pointers = (x.data_ptr() if x is not None else 0 for x in tensors)
        return _Preparation(_Tensor.of(source), *pointers, self._heads, chunks)


@cache
def _module(variant: Variant, device: torch.device) -> CudaModule:
    return CudaModule(compile_cubin(variant.source(), _ARCHITECTURE), device)


def _score_product(element_bytes: int, keys: int) -> str:
    """`d (+)= a b` with both operands in shared memory; `add` 0 begins anew."""
    count = keys // 2
    signs = "1, 1" if element_bytes == 1 else "1, 1, 0, 0"
    return (
        f"__device__ __forceinline__ void score_product(float (&d)[{count}], unsigned long long a, "
        "unsigned long long b, int add) {\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n'
        f'{_instruction(element_bytes, keys)} {_operands(count)}, %{count}, %{count + 1}, p, {signs};\\n}}"\n'
        f'  : {_accumulators(count)} : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


def _value_product(element_bytes: int) -> str:
    """`d += a b` with a in registers."""
    count = HEAD // 2
    signs = "1, 1" if element_bytes == 1 else "1, 1, 0"
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"__device__ __forceinline__ void value_product(float (&d)[{count}], const unsigned int* a, "
        "unsigned long long b) {\n"
        f'  asm volatile("{_instruction(element_bytes, HEAD)} {_operands(count)}, {{{a}}}, %{count + 4}, 1, {signs};"\n'
        f'  : {_accumulators(count)} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n}}\n'
    )


def _instruction(element_bytes: int, columns: int) -> str:
    kind, inner = ("e4m3", 32) if element_bytes == 1 else ("bf16", 16)
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k{inner}.f32.{kind}.{kind}"


def _operands(count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(count)) + "}"


def _accumulators(count: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(count))
