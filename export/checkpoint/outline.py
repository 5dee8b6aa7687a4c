"""What is known of a checkpoint without its tensor files: dimensions, and every tensor's shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from export.checkpoint.catalogue import Config, expect, read_configured
from export.checkpoint.components import audio_vae, denoiser, text_encoder, video_vae
from export.checkpoint.components.processor import Pictures
from export.checkpoint.safetensors_file import Declared
from export.checkpoint.sizes import read_dimensions, student_dimensions
from export.checkpoint.student import PARTITION, Fused, Whole, base_of, declared_student, is_student, read_student
from export.checkpoint.tree import COMPONENTS, Component, LayoutName, recognise
from plugins.dimensions import Dimensions
from plugins.distilled import Distilled


@dataclass(frozen=True)
class Outline:
    """A checkpoint's dimensions, and the configuration of each component (all partitions have the same).

    student: what the model is bound to, None for the released one; transformer: what a student has in its base's place.
    """

    layout: LayoutName
    partitions: tuple[str, ...]
    dimensions: Dimensions
    configs: Mapping[Component, Config]
    student: Distilled | None = None
    transformer: Fused | Whole | None = None

    @staticmethod
    def read(path: Path | str) -> Outline:
        """Reads the configuration files of a checkpoint in either layout; tensor files are not looked at.

        Raises:
            CheckpointError: the layout is not recognised, or a configuration is missing or wrong.
        """
        if is_student(Path(path)):
            return _student(Path(path))
        tree = recognise(Path(path))
        found = {(c, p): read_configured(c, tree.layout, tree.place(c, p)) for p in tree.partitions for c in COMPONENTS}
        configs = {component: found[component, tree.partitions[0]].config for component in COMPONENTS}
        return Outline(tree.layout, tree.partitions, read_dimensions(tree, found), configs, declared_student(tree))

    @staticmethod
    def of(
        configs: Mapping[Component, Config],
        pictures: Pictures,
        layout: LayoutName = "native",
        partitions: tuple[str, ...] = ("fl2va",),
    ) -> Outline:
        """The outline of a model whose configurations are given, such as those of `export.miniature.sizes`."""
        return Outline(layout, partitions, _dimensions(configs, pictures), configs)

    @cached_property
    def parameters(self) -> Mapping[Component, Mapping[str, Declared]]:
        """Every parameter by its diffusers or transformers name."""
        return {c: expect(config, "diffusers", self._gates).stored for c, config in self.configs.items()}

    def stored_bytes(self, component: Component) -> int:
        """Bytes of a component's tensors in the checkpoint's files.

        Without a native video VAE's mask token of some kilobytes, whose shape no configuration tells. A student's
        transformer that was fused takes its base's bytes and those of its own file.
        """
        layout, gates = self.layout, False
        if component == "denoiser" and isinstance(self.transformer, Whole):
            layout, gates = "diffusers", self._gates
        own = self.transformer.bytes if component == "denoiser" and isinstance(self.transformer, Fused) else 0
        return own + sum(one.nbytes for one in expect(self.configs[component], layout, gates).stored.values())

    @property
    def _gates(self) -> bool:
        return self.student is not None and self.student.video_sparse is not None


def _student(root: Path) -> Outline:
    record = read_student(root)
    base = Outline.read(base_of(root, record))
    dimensions = student_dimensions(base.dimensions, record.distilled)
    return replace(
        base,
        partitions=(PARTITION,),
        dimensions=dimensions,
        student=record.distilled,
        transformer=record.transformer,
    )


def _dimensions(configs: Mapping[Component, Config], pictures: Pictures) -> Dimensions:
    parts: dict[str, object] = {}
    file = Path("config.json")
    for config in configs.values():
        match config:
            case denoiser.DenoiserConfig():
                parts["denoiser"] = denoiser.dimensions(config)
            case text_encoder.TextEncoderConfig():
                parts["text_encoder"] = text_encoder.dimensions(config, file)
                parts["vision"] = text_encoder.vision_dimensions(config, file)
                parts["processor"] = pictures.dimensions(config)
            case video_vae.VideoVAEConfig():
                parts["video_vae"] = video_vae.dimensions(config)
            case audio_vae.AudioVAEConfig():
                parts["audio_vae"] = audio_vae.dimensions(config)
    return Dimensions.model_validate(parts)
