"""Bytes of the weights that each graph's instances are bound to, by arithmetic and share of the ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from engines.profile import Arithmetic
from export.checkpoint.outline import Outline
from export.checkpoint.safetensors_file import Declared
from export.checkpoint.tree import Component as Files
from plugins.ops.nvfp4_linear import BLOCK

_LINEARS: dict[str, re.Pattern[str]] = {
    "block": re.compile(r".*\.(attn\.to_(q|k|v|gate_compress|out\.0)|ff\.net\.(0\.proj|2))\.weight"),
    "context": re.compile(r".*\.(attn\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2))\.weight"),
    "text_encoder.layer": re.compile(r".*\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"),
}
"""The linear layers of each graph that are quantised where its component is, by names of their weights."""

_SHARDED = re.compile(r".*(_proj|embed_tokens)\.weight")
"""What tensor parallelism divides in the text encoder; norms are on every rank."""

_BY_INPUTS = re.compile(r".*\.(o_proj|down_proj)\.weight")
"""Layers of which a rank has all output channels, and so all of their scales."""

Tensors = Mapping[str, Declared]


@dataclass(frozen=True, eq=False)
class GraphWeights:
    """A graph's instances: the tensors that each one is bound to, as the checkpoint stores them."""

    graph: str
    instances: tuple[Tensors, ...]
    _known: dict[tuple[Arithmetic, int], tuple[int, ...]] = field(default_factory=dict)

    def nbytes(self, arithmetic: Arithmetic, ranks: int = 1) -> tuple[int, ...]:
        """Bytes of each instance on one of the ranks that share it."""
        if (arithmetic, ranks) not in self._known:
            self._known[arithmetic, ranks] = tuple(
                sum(_nbytes(self.graph, name, declared, arithmetic, ranks) for name, declared in tensors.items())
                for tensors in self.instances
            )
        return self._known[arithmetic, ranks]

    def quantised_nbytes(self, arithmetic: Arithmetic) -> int:
        """Bytes of all quantised linears: those of the sidecar file, less its header."""
        if arithmetic not in ("fp8", "nvfp4"):
            return 0
        linears = [d for tensors in self.instances for n, d in tensors.items() if _is_quantised(self.graph, n)]
        return sum(quantised_nbytes(declared, arithmetic) for declared in linears)

    def side_nbytes(self, rank: int) -> tuple[int, ...]:
        """Bytes of each instance's low-rank sides, one for each linear that may be quantised, in bfloat16."""
        return tuple(
            sum(2 * rank * sum(d.shape or ()) for name, d in tensors.items() if _is_quantised(self.graph, name))
            for tensors in self.instances
        )

    def products(self) -> int:
        """Multiplications that a row of the first instance takes: elements of its matrices."""
        return self.products_of_all()[0]

    def products_of_all(self) -> tuple[int, ...]:
        """The same for every instance."""
        return tuple(sum(_elements(d) for d in tensors.values() if _is_matrix(d)) for tensors in self.instances)

    def largest_matrix(self) -> int:
        """Bytes of the largest matrix, as it is stored."""
        return max(d.nbytes for tensors in self.instances for d in tensors.values() if _is_matrix(d))

    def part(self, starts: tuple[str, ...]) -> GraphWeights:
        """The weights whose names, less the instance's prefix, start in one of some ways."""
        return GraphWeights(self.graph, tuple(_part(tensors, starts) for tensors in self.instances))

    def stage_products(self, stage: int, blocks: int) -> int:
        """Multiplications of a sample at the end of one of the audio decoder's stages, of so many `blocks`."""
        starts = (f"decoder.ups.{stage}.", *(f"decoder.resblocks.{stage * blocks + i}." for i in range(blocks)))
        found = [d for name, d in self.instances[0].items() if name.startswith(starts) and name.endswith("weight_v")]
        return sum(map(_elements, found))

    def encoder_stage_products(self, stage: int) -> tuple[int, int]:
        """Multiplications of a sample of one of the audio encoder's stages: in its units, and by its strided layer."""
        found = {n: _elements(d) for n, d in self.instances[0].items() if n.endswith("weight_v")}
        strided = f"encoder.block.{stage}.block.4.weight_v"
        units = sum(count for n, count in found.items() if n.startswith(f"encoder.block.{stage}.") and n != strided)
        return units, found[strided]


def _elements(declared: Declared) -> int:
    return math.prod(declared.shape or ())


def _is_matrix(declared: Declared) -> bool:
    return len(declared.shape or ()) == 2


def _part(tensors: Tensors, starts: tuple[str, ...]) -> dict[str, Declared]:
    """An instance's names have a list and an index before those of its module."""
    return {name: d for name, d in tensors.items() if name.split(".", 2)[-1].startswith(starts)}


@dataclass(frozen=True, eq=False)
class Model:
    """A model that requests are planned for: its outline, and what its graphs are bound to, looked up once."""

    outline: Outline

    @cached_property
    def weights(self) -> Mapping[str, GraphWeights]:
        """The weights of every graph of one partition; a block's segments have their parts of a block's."""
        whole = graph_weights(self.outline)
        return whole | {segment: whole["block"].part(starts) for segment, starts in SEGMENTS.items()}

    def sidecar(self, graphs: Mapping[str, Arithmetic]) -> dict[str, int]:
        """Bytes of the quantised linears of each of the graphs."""
        return {graph: self.weights[graph].quantised_nbytes(arithmetic) for graph, arithmetic in graphs.items()}


VISION_LISTS = {"blocks": "block", "deepstack_merger_list": "deepstack"}
"""The vision encoder's graphs that have an instance for each element of a list of the checkpoint."""

SEGMENTS = {
    "block.project": (
        "norm1.",
        *(f"attn.{n}." for n in ("to_q", "to_k", "to_v", "to_gate_compress", "norm_q", "norm_k")),
    ),
    "block.attend": (),
    "block.finish": ("attn.to_out.", "norm2.", "ff."),
}
"""Which of a block's weights each of its segments takes, by their names' starts."""


def graph_weights(outline: Outline) -> dict[str, GraphWeights]:
    """The weights of every graph of one partition."""
    return {name: GraphWeights(name, tuple(instances)) for name, instances in _instances(outline)}


def quantised_nbytes(declared: Declared, arithmetic: Arithmetic) -> int:
    """Bytes of a quantised linear layer's values and scales.

    FP8: a byte, and a float32 for each output channel. NVFP4: half a byte, an E4M3 scale for each block of 16 inputs,
    and a float32 for each matrix; q, k and v count as three, which is 8 bytes too many where they are stored as one.
    """
    outputs, inputs = declared.shape or (0, 0)
    if arithmetic == "fp8":
        return outputs * inputs + 4 * outputs
    return outputs * inputs // 2 + outputs * math.ceil(inputs / BLOCK) + 4


def _is_quantised(graph: str, name: str) -> bool:
    # A block's segments have a block's linears.
    known = _LINEARS.get("block" if graph.startswith("block.") else graph)
    return known is not None and known.fullmatch(name) is not None


def _nbytes(graph: str, name: str, declared: Declared, arithmetic: Arithmetic, ranks: int) -> int:
    quantised = arithmetic in ("fp8", "nvfp4") and _is_quantised(graph, name)
    nbytes = quantised_nbytes(declared, arithmetic) if quantised else declared.nbytes
    if ranks == 1 or not graph.startswith("text_encoder") or not _SHARDED.fullmatch(name):
        return nbytes
    if not quantised or not _BY_INPUTS.fullmatch(name):
        return nbytes // ranks
    outputs, inputs = declared.shape or (0, 0)
    return quantised_nbytes(replace(declared, shape=(outputs, inputs // ranks)), arithmetic)


def _instances(outline: Outline) -> Iterator[tuple[str, list[Tensors]]]:
    layers = [f"transformer_blocks.{i}." for i in range(outline.dimensions.denoiser.layers)]
    language = "model.language_model"
    text = [f"{language}.layers.{i}." for i in range(outline.dimensions.text_encoder.layers)]
    take = _Taker(outline)
    yield "vision_encoder.embed", [take("text_encoder", "model.visual.patch_embed.", "model.visual.pos_embed.")]
    vision = outline.dimensions.vision
    for name, count in (("blocks", vision.depth), ("deepstack_merger_list", len(vision.deepstack))):
        parts = [take("text_encoder", f"model.visual.{name}.{i}.") for i in range(count)]
        yield f"vision_encoder.{VISION_LISTS[name]}", parts
    yield "vision_encoder.merger", [take("text_encoder", "model.visual.merger.")]
    yield "video_encoder_tile", [take("video_vae", "encoder.", "quant_conv.")]
    yield "audio_encoder", [take("audio_vae", "encoder.", "pre_block.", "mean_proj.")]
    yield "text_encoder.embedding", [take("text_encoder", f"{language}.embed_tokens.")]
    yield "text_encoder.layer", [take("text_encoder", prefix) for prefix in text]
    yield "context", [take("denoiser", "context_embedder.", "token_refiner.")]
    yield "modulation.time", [take("denoiser", "time_embedder.")]
    adaln = [*(f"{prefix}adaln_proj." for prefix in layers), "norm_out.linear."]
    yield "modulation.adaln", [take("denoiser", prefix) for prefix in adaln]
    yield "prologue", [take("denoiser", "proj_in.", "audio_proj_in.")]
    blocks = [take("denoiser", prefix) for prefix in layers]
    yield "block", [{n: d for n, d in block.items() if ".adaln_proj." not in n} for block in blocks]
    yield "epilogue", [take("denoiser", "norm_out.norm.", "proj_out.", "audio_proj_out.")]
    yield "video_decoder_tile", [take("video_vae", "decoder.", "post_quant_conv.")]
    yield "audio_decoder", [take("audio_vae", "decoder.", "dec_in_proj.")]


class _Taker:
    """The parameters of a component whose names start in one of some ways."""

    def __init__(self, outline: Outline) -> None:
        self._parameters = outline.parameters

    def __call__(self, component: Files, *prefixes: str) -> Tensors:
        return {n: d for n, d in self._parameters[component].items() if n.startswith(prefixes)}
