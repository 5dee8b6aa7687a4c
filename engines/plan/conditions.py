"""What the graphs that encode references cost for a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines.plan import arrays
from engines.plan.arrays import FLOAT, Widths
from engines.plan.references import References
from engines.plan.run import LIBRARY_WORKSPACE, Run, Weighing, operations
from export.checkpoint.components.audio_vae import AudioVAEConfig
from export.checkpoint.components.video_vae import VideoVAEConfig
from export.graphs.video_encoder_tile import KERNEL
from plugins.dimensions import AUDIO_CHANNELS, VisionDimensions

INT64 = 8
CORNERS = 4


@dataclass(frozen=True)
class Conditions:
    """The encoders of references; they do not run where a request has none."""

    weighing: Weighing
    references: References

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Every graph with its runs."""
        yield "vision_encoder.embed", self._embed()
        yield "vision_encoder.block", self._block()
        yield "vision_encoder.deepstack", self._merger("deepstack", len(self._vision.deepstack))
        yield "vision_encoder.merger", self._merger("merger", 1)
        yield "video_encoder_tile", self._tile()
        yield "audio_encoder", self._sound()

    @property
    def _vision(self) -> VisionDimensions:
        return self.weighing.outline.dimensions.vision

    @property
    def _patches(self) -> int:
        """Of the largest picture."""
        return max(self.references.patches, default=0)

    @property
    def _item(self) -> float:
        return Widths.of(self.weighing.arithmetic("vision_encoder")).item

    def _embed(self) -> Run:
        size, rows = self._vision, self._patches
        io = rows * (size.patch_features * FLOAT + CORNERS * (INT64 + FLOAT) + size.hidden * self._item)
        products = 2.0 * sum(self.references.patches) * size.patch_features * size.hidden
        flops = operations(self.weighing.arithmetic("vision_encoder"), products, 0)
        kept = rows * (size.patch_features + 2 * size.hidden) * self._item
        return Run(self.references.pictures, kept, flops, 2 * kept + io, io, workspace=LIBRARY_WORKSPACE)

    def _block(self) -> Run:
        size, rows = self._vision, self._patches
        linear = 2.0 * self.weighing.weights["vision_encoder.block"].products() * sum(self.references.patches)
        mixing = 4.0 * size.hidden * sum(patches**2 for patches in self.references.patches)
        flops = operations(self.weighing.arithmetic("vision_encoder"), size.depth * linear, size.depth * mixing)
        kept = rows * arrays.vision(size, self._item)
        io = rows * (2 * size.hidden * self._item + 2 * size.head_dim * FLOAT)
        runs = size.depth * self.references.pictures
        return Run(runs, kept, flops, 2 * kept + io, io, workspace=LIBRARY_WORKSPACE)

    def _merger(self, name: str, taps: int) -> Run:
        size = self._vision
        rows = self._patches / size.merged
        products = 2.0 * self.weighing.weights[f"vision_encoder.{name}"].products() * sum(self.references.patches)
        flops = operations(self.weighing.arithmetic("vision_encoder"), taps * products / size.merged, 0)
        width = size.merged * size.hidden
        io = rows * (width + size.out_hidden) * self._item
        kept = rows * 2 * width * self._item
        runs = taps * self.references.pictures
        return Run(runs, kept, flops, 2 * kept + io, io, workspace=LIBRARY_WORKSPACE)

    def _tile(self) -> Run:
        config, vae = self.weighing.outline.configs["video_vae"], self.weighing.outline.dimensions.video_vae
        assert isinstance(config, VideoVAEConfig)
        frames = self.references.clip_frames
        images, clips = self.references.tiles
        products = images * tile_products(config, 1, vae.tile) + clips * tile_products(
            config, vae.clip_frames, vae.tile
        )
        pixels = frames * vae.tile**2
        kept = arrays.clip(pixels, config.block_out_channels[0])
        io = pixels * config.in_channels * FLOAT
        moved = 4 * config.layers_per_block * kept
        return Run(images + clips, kept, {"float32": 2.0 * products}, moved, io, workspace=LIBRARY_WORKSPACE)

    def _sound(self) -> Run:
        config = self.weighing.outline.configs["audio_vae"]
        assert isinstance(config, AudioVAEConfig)
        tracks, samples = self.references.tracks, self.references.samples * min(1, self.references.tracks)
        weights, products, at_stage = self.weighing.weights["audio_encoder"], 0.0, float(samples)
        for stage, rate in enumerate(config.encoder_rates, start=1):
            units, strided = weights.encoder_stage_products(stage)
            products += at_stage * units + at_stage / rate * strided
            at_stage /= rate
        kept = arrays.waveform(samples, config.encoder_dim)
        io = AUDIO_CHANNELS * samples * FLOAT
        flops = 2.0 * AUDIO_CHANNELS * tracks * products
        moved = 4 * len(config.encoder_rates) * kept
        return Run(tracks, kept, {"float32": flops}, moved, io, workspace=LIBRARY_WORKSPACE)


def tile_products(config: VideoVAEConfig, frames: int, side: int) -> float:
    """Multiplications of one tile: kernel, channels in and out, and positions of every convolution."""
    volume, channels = KERNEL**3, config.block_out_channels[0]
    products = float(frames * side**2 * volume * config.in_channels * channels)
    factors = zip(config.temporal_downsample_factors, config.spatial_downsample_factors, strict=True)
    for width, (time, space) in zip(config.block_out_channels, factors, strict=True):
        convolutions = channels * width + (2 * config.layers_per_block - 1) * width**2
        shortcut = channels * width if channels != width else 0
        products += frames * side**2 * (volume * convolutions + shortcut)
        frames, side, channels = -(-frames // time), side // space, width
        if time * space > 1:
            products += frames * side**2 * volume * width**2
    return products + frames * side**2 * volume * channels * 2 * config.latent_channels
