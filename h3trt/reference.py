"""The reference that `h3trt verify` compares with: diffusers' modular MiniMax H3 pipeline on the same checkpoint."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseLoopWrapper
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from diffusers.modular_pipelines.modular_pipeline import BlockState, ModularPipeline, ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler
from diffusers.utils import load_image, logging
from PIL import Image
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from export.artifacts import Artifact
from export.artifacts.patched import patched_parameters
from export.checkpoint import Checkpoint, Weight, materialise
from h3trt.reference_attention import Clip, add_gates, attend_to_tiles
from h3trt.reference_processor import ReferenceProcessor
from plugins.dimensions import AUDIO_CHANNELS
from plugins.distilled import PinnedSchedule
from runtime.denoiser import State
from runtime.references import Reference as ResolvedReference
from runtime.request import Resolved

_LAYOUT = ("token_tags", "position_ids", "text_indices", "audio_indices", "video_indices")
_COUNTS = ("num_condition_video_rows", "num_condition_audio_rows", "row_timestep_plan")
_DECODE = ("decode.video", "decode.audio")

_REFERENCES: Mapping[str, Any] = {
    "image": MiniMaxH3ImageReference,
    "video": MiniMaxH3VideoReference,
    "audio": MiniMaxH3AudioReference,
}


@dataclass(frozen=True, eq=False)
class ReferenceMedia:
    """A decoded clip: frames uint8 [F, H, W, 3]; waveform float32 [2, 800 A]."""

    frames: torch.Tensor
    waveform: torch.Tensor


@dataclass(frozen=True, eq=False)
class Reference:
    """What diffusers computed for one request, stage by stage.

    text [L, text_dim]; token_tags [S], position_ids [S, 3] and the index tensors as its layout step made them;
    timesteps: float32 [S] for each step, that of every row; condition_latents: [1, 24, T, h, w] of each picture and
    video, clean; conditions: rows that no step changes; noise and steps: the rows of the clip before the loop and after
    each step; latents [1, 24, T, h, w] and [2, 32, A]; media: what they decode to, if that was asked for.
    """

    text: torch.Tensor
    token_tags: torch.Tensor
    position_ids: torch.Tensor
    text_indices: torch.Tensor
    audio_indices: torch.Tensor
    video_indices: torch.Tensor
    timesteps: tuple[torch.Tensor, ...]
    condition_latents: tuple[torch.Tensor, ...]
    conditions: State
    noise: State
    steps: tuple[State, ...]
    video_latents: torch.Tensor
    audio_latents: torch.Tensor
    media: ReferenceMedia | None


class ReferencePipeline:
    """diffusers' pipeline in float32 on the CPU, its components loaded from a checkpoint of either layout.

    With an adapter, its transformer has the adapter's weights fused in. The schedule is that of the adapter or of the
    student that the checkpoint is, where there is one; a student that attends to video tiles does so here too.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Artifact | None = None) -> None:
        self._checkpoint = checkpoint
        self._adapter = adapter
        distilled = adapter.distilled if adapter else checkpoint.student
        self._sparse = distilled.video_sparse if distilled else None
        schedule = distilled.schedule if distilled else None
        sizes = checkpoint.dimensions
        self._components = {
            "text_encoder": _text_encoder(checkpoint),
            "tokenizer": Qwen2Tokenizer(tokenizer_file=str(checkpoint.tokenizer_file)),
            "processor": ReferenceProcessor(checkpoint.dimensions.processor),
            "vae": _load(AutoencoderKLMiniMaxH3(**checkpoint.config("video_vae")), checkpoint.parameters("video_vae")),
            "audio_vae": _load(
                AutoencoderKLMiniMaxH3Audio(**checkpoint.config("audio_vae")), checkpoint.parameters("audio_vae")
            ),
            "scheduler": _scheduler(schedule, schedule.video_shift if schedule else sizes.video_shift),
            "audio_scheduler": _scheduler(schedule, schedule.audio_shift if schedule else sizes.audio_shift),
        }

    def run(self, request: Resolved, media: Sequence[bytes] = (), decode: bool = True) -> Reference:
        """Generates the request's first output; `media`: the files of its references, which diffusers decodes.

        diffusers refuses clips under 5 seconds and shifts other than the checkpoint's, stretches keyframes as
        `keyframe_geometry` diffusers says, and knows no start times: ValueError for a request that has one, or that is
        of a task that the adapter is not for.
        """
        if self._adapter is not None and request.task not in self._adapter.distilled.tasks:
            raise ValueError(
                f"{self._adapter.distilled.name}: is for {self._adapter.distilled.tasks}, not {request.task}"
            )
        recorder = _Recorder()
        components = self._components | self._transformer(request)
        pipeline = _pipeline(request, recorder, components, decode)
        arguments = _conditions(request, media) | ({"output_type": "np"} if decode else {})
        found = pipeline(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            num_frames=request.frames,
            num_inference_steps=request.sigma_points,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output=_outputs(request, decode),
            **arguments,
        )
        conditions = (found["num_condition_video_rows"], found["num_condition_audio_rows"])
        noise, *steps = (_clip(state, conditions) for state in recorder.states)
        return Reference(
            text=found["prompt_embeds"][0],
            **{name: found[name] for name in _LAYOUT},
            timesteps=tuple(distinct[indices] for distinct, indices in found["row_timestep_plan"]),
            condition_latents=tuple(found.get("condition_latents", ())),
            conditions=_leading(recorder.states[0], conditions),
            noise=noise,
            steps=tuple(steps),
            video_latents=found["latents"],
            audio_latents=found["audio_latents"],
            media=_media(found) if decode else None,
        )

    def _transformer(self, request: Resolved) -> dict[str, Any]:
        if request.task == "ref2va":
            return {"transformer_ref": self._ref2va}
        if self._sparse is not None:
            grid = request.latent_frames, request.latent_height, request.latent_width
            patch = self._checkpoint.dimensions.denoiser.patch
            frames, rows, columns = (size // side for size, side in zip(grid, patch, strict=True))
            clip = Clip(AUDIO_CHANNELS * request.audio_latents, (frames, rows, columns))
            attend_to_tiles(self._fl2va, self._sparse, clip)
        return {"transformer": self._fl2va}

    @cached_property
    def _fl2va(self) -> MiniMaxH3Transformer3DModel:
        return self._denoiser("fl2va")

    @cached_property
    def _ref2va(self) -> MiniMaxH3Transformer3DModel:
        return self._denoiser("ref2va")

    def _denoiser(self, partition: str) -> MiniMaxH3Transformer3DModel:
        parameters = self._checkpoint.parameters("denoiser", partition)
        if self._adapter is not None:
            parameters = patched_parameters(self._adapter, parameters)
        model = MiniMaxH3Transformer3DModel(**self._checkpoint.config("denoiser", partition))
        if self._sparse is not None:
            add_gates(model)
        return _load(model, parameters)


class _PinnedScheduler(MiniMaxH3Scheduler):
    """A scheduler that has one grid, whatever number of points it is asked for."""

    pinned: tuple[float, ...]

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | torch.Tensor | None = None,
    ) -> None:
        if num_inference_steps != len(self.pinned):
            raise ValueError(f"num_inference_steps: {num_inference_steps}, of a schedule of {len(self.pinned)} points")
        super().set_timesteps(device=device, sigmas=list(self.pinned))


def _scheduler(schedule: PinnedSchedule | None, shift: float) -> MiniMaxH3Scheduler:
    """diffusers' own grid, or that of pinned base positions (spec/model.md 4.5), in float64 as Python has it."""
    if schedule is None or schedule.positions is None:
        return MiniMaxH3Scheduler(shift=shift)
    made = _PinnedScheduler(shift=shift)
    made.pinned = tuple(shift * one / (1 + (shift - 1) * one) for one in schedule.positions)
    return made


def _outputs(request: Resolved, decode: bool) -> list[str]:
    encoded = ["condition_latents"] if request.references else []
    return ["prompt_embeds", *_LAYOUT, *_COUNTS, *encoded, "latents", "audio_latents", *(["videos", "audio"] * decode)]


def _media(found: Mapping[str, Any]) -> ReferenceMedia:
    return ReferenceMedia(torch.from_numpy(found["videos"][0]).mul(255).round().to(torch.uint8), found["audio"][0])


def _conditions(request: Resolved, media: Sequence[bytes]) -> dict[str, Any]:
    """The files as the arguments of diffusers' pipeline, decoded by diffusers itself."""
    pairs = list(zip(request.references, media, strict=True))
    if any(one.start_time_seconds for one, _ in pairs):
        raise ValueError("start_time_seconds: diffusers reads references from their beginning")
    if request.task == "ref2va":
        return {"references": [_reference(one, data) for one, data in pairs]}
    names = {"first": "image", "last": "last_image"}
    return {names[one.role]: load_image(Image.open(io.BytesIO(data))) for one, data in pairs}


def _reference(one: ResolvedReference, data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "reference"
        file.write_bytes(data)
        return _REFERENCES[one.kind].from_file(file)


def _clip(state: State, conditions: tuple[int, int]) -> State:
    return State(state.video[conditions[0] :], state.audio[conditions[1] :])


def _leading(state: State, conditions: tuple[int, int]) -> State:
    return State(state.video[: conditions[0]], state.audio[: conditions[1]])


class _Recorder:
    """Keeps the rows that the denoising loop starts from and those it leaves after each step."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Recorder:
        """Itself: a pipeline copies the blocks that it is made from, and the copies must record here."""
        return self

    def block(self, start: bool) -> ModularPipelineBlocks:
        """A block for the loop's start (records at the first step only) or for its end."""
        return _RecordStep(self, start)

    def keep(self, block_state: BlockState) -> None:
        # The loop's update step writes into these tensors.
        latents = (getattr(block_state, name).clone() for name in ("latents", "audio_latents"))
        self.states.append(State(*latents))


class _RecordStep(ModularPipelineBlocks):
    model_name: ClassVar[str] = "minimax-h3"  # type: ignore[assignment, misc]  # diffusers declares it as None

    def __init__(self, recorder: _Recorder, start: bool) -> None:
        self._recorder = recorder
        self._start = start
        super().__init__()

    @property
    def description(self) -> str:
        return "Records the latents."

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name=name, type_hint=torch.Tensor, required=True) for name in ("latents", "audio_latents")]

    def __call__(
        self, components: ModularPipeline, block_state: BlockState, i: int, t: torch.Tensor
    ) -> tuple[ModularPipeline, BlockState]:
        if i == 0 or not self._start:
            self._recorder.keep(block_state)
        return components, block_state


def _pipeline(request: Resolved, recorder: _Recorder, components: Mapping[str, Any], decode: bool) -> ModularPipeline:
    blocks = MiniMaxH3Blocks().get_workflow(request.task)
    (loop,) = (block for block in blocks.sub_blocks.values() if isinstance(block, MiniMaxH3DenoiseLoopWrapper))
    loop.sub_blocks.insert("record_start", recorder.block(start=True), 0)
    loop.sub_blocks.insert("record_end", recorder.block(start=False), len(loop.sub_blocks))
    for name in () if decode else _DECODE:
        blocks.sub_blocks.pop(name)
    pipeline = blocks.init_pipeline()
    pipeline.update_components(**{name: components[name] for name in components if name in pipeline.component_names})
    if request.task == "ref2va":
        # The clip's own sides are given, so that this edge is for videos alone.
        edges = request.reference_short_edge, request.video_reference_short_edge
        pipeline.update_components(reference_image_short_edge=edges[0], canvas_short_edge=edges[1])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _text_encoder(checkpoint: Checkpoint) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(**checkpoint.config("text_encoder"))
    config._attn_implementation = "sdpa"
    return _load(Qwen3VLForConditionalGeneration(config), checkpoint.parameters("text_encoder"))


def _load(model: Any, parameters: Mapping[str, Weight]) -> Any:
    """The model in float32 with every parameter from the checkpoint; raises RuntimeError when the names differ."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model.load_state_dict({name: materialise(weight).float() for name, weight in parameters.items()}, strict=True)
    finally:
        logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False)
