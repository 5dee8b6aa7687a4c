"""Every size of the model that more than one layer needs, read once from a checkpoint's configuration files."""

from __future__ import annotations

from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

MODALITIES = 3
"""Modality tags of packed rows: 0 video, 1 text, 2 audio."""

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2

TIMESTEP_SLOTS = 4
"""Timestep slots M of the modulation table: (t_video, t_audio, 0.999, 1.0)."""

FRAMES_PER_SECOND = 24
AUDIO_LATENTS_PER_SECOND = 40
AUDIO_CHANNELS = 2


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DenoiserDimensions(_Frozen):
    """Sizes of the diffusion transformer."""

    hidden: int
    layers: int
    refiner_layers: int
    heads: int
    head_dim: int
    ffn: int
    video_channels: int
    audio_channels: int
    patch: tuple[int, int, int]
    text_dim: int
    freq_dim: int
    time_hidden: int
    time_dim: int
    rope_frequencies: int
    rope_theta: float
    norm_eps: float
    qk_norm_eps: float
    final_norm_eps: float

    @cached_property
    def inner(self) -> int:
        """Width of the attention projections, heads x head_dim."""
        return self.heads * self.head_dim

    @cached_property
    def video_row(self) -> int:
        """Features of one packed video row: channels x patch volume (96)."""
        t, h, w = self.patch
        return self.video_channels * t * h * w

    @cached_property
    def block_products(self) -> int:
        """Weights of one block that every row is multiplied with."""
        return 4 * self.hidden * self.inner + 3 * self.hidden * self.ffn

    def mixing(self, rows: int) -> float:
        """Operations of one block's attention, of all rows to all."""
        return 4.0 * rows * rows * self.inner

    @cached_property
    def adaln_features(self) -> int:
        """Outputs of one block's AdaLN projection: modalities x 6 x hidden."""
        return MODALITIES * 6 * self.hidden

    @cached_property
    def table_elements(self) -> int:
        """AdaLN parameters of one step: those of all blocks and of the head, for every timestep slot."""
        return TIMESTEP_SLOTS * (self.layers * self.adaln_features + 2 * self.hidden)


class TextEncoderDimensions(_Frozen):
    """Sizes of the Qwen3-VL language model as H3 uses it."""

    hidden: int
    layers: int = Field(description="decoder layers that are run; the conditioning is the raw output of the last one")
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    rms_eps: float

    @cached_property
    def layer_products(self) -> int:
        """Weights of one layer that every row is multiplied with."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    def mixing(self, rows: int) -> float:
        """Operations of one layer's attention: causal, which is half of all rows to all."""
        return 2.0 * rows * rows * self.heads * self.head_dim


class VisionDimensions(_Frozen):
    """Sizes of the Qwen3-VL vision tower, which shows reference images to the language model."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    channels: int = 3
    patch: int = Field(description="pixels along a side of a patch")
    temporal_patch: int = Field(description="frames of a patch; a single image is repeated")
    merge: int = Field(description="patches along a side of the square that becomes one row of the language model")
    position_grid: int = Field(description="side of the square grid of learned positions")
    deepstack: tuple[int, ...] = Field(description="blocks whose output is added after language model layers 0, 1, ...")
    out_hidden: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    @cached_property
    def head_dim(self) -> int:
        """Channels of a head (72)."""
        return self.hidden // self.heads

    @cached_property
    def patch_features(self) -> int:
        """Values of one flattened patch: channels x frames x height x width (1536)."""
        return self.channels * self.temporal_patch * self.patch**2

    @cached_property
    def merged(self) -> int:
        """Patches that one row of the language model stands for (4)."""
        return self.merge**2


class Processor(_Frozen):
    """How pictures are prepared for the vision tower, and the tokens that stand for them.

    Resized to multiples of patch x merge within the limits of pixels (height x width of an image; frames x height x
    width of a video), divided by 255, then normalised with `mean` and `std`.
    """

    image_min_pixels: int
    image_max_pixels: int
    video_min_pixels: int
    video_max_pixels: int
    patch: int
    temporal_patch: int
    merge: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    vision_start_id: int
    vision_end_id: int
    image_pad_id: int
    video_pad_id: int

    @cached_property
    def factor(self) -> int:
        """What heights and widths are multiples of (32 pixels)."""
        return self.patch * self.merge


class VideoVAEDimensions(_Frozen):
    """Sizes of the video VAE and of its tiling, in pixels, frames and latents."""

    latent_channels: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    spatial_ratio: int = 16
    temporal_ratio: int = 4
    clip_frames: int = 17
    clip_latents: int = 5
    token_drop: int = 3
    tile: int = 256
    tile_overlap: int = 64

    @cached_property
    def tile_latents(self) -> int:
        """Latent cells along one side of a tile (16)."""
        return self.tile // self.spatial_ratio

    @cached_property
    def token_overlap(self) -> int:
        """Latent frames that a chunk shares with the next (2)."""
        return -self.token_drop % self.clip_latents

    @cached_property
    def chunk_latents(self) -> int:
        """Latent frames that one decoder call takes (7: the chunk's 5 and 2 of overlap)."""
        return self.clip_latents + self.token_overlap

    @cached_property
    def chunk_frames(self) -> int:
        """Pixel frames that one decoder call returns (28)."""
        return self.temporal_ratio * self.chunk_latents

    @cached_property
    def frame_pre_padding(self) -> int:
        """Pixel frames that a chunk's first latent decodes to but does not stand for (3)."""
        return -self.clip_frames % self.temporal_ratio

    @cached_property
    def frame_overlap(self) -> int:
        """Pixel frames that a decoded chunk shares with the next (5)."""
        return self.token_overlap * self.temporal_ratio - self.frame_pre_padding


class AudioVAEDimensions(_Frozen):
    """Sizes of the mono audio VAE; stereo is a batch of two."""

    latent_channels: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    sample_rate: int = 32000
    hop: int = 800


class Dimensions(_Frozen):
    """All sizes of one checkpoint, and the sigma shifts that its schedules are built with."""

    denoiser: DenoiserDimensions
    text_encoder: TextEncoderDimensions
    vision: VisionDimensions
    processor: Processor
    video_vae: VideoVAEDimensions
    audio_vae: AudioVAEDimensions
    video_shift: float = 12.0
    audio_shift: float = 3.0
