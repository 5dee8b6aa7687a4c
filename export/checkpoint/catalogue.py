"""One component of a checkpoint: configuration, stored tensors and parameters, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.checkpoint.components import audio_vae, configuration, denoiser, text_encoder, video_vae
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Weight
from export.checkpoint.recipes import QKVLayout, Recipe, expression, native_declarations
from export.checkpoint.safetensors_file import DTYPE_NAMES, Declared, read_header
from export.checkpoint.shards import ComponentFiles, read_files
from export.checkpoint.strict_json import read_object
from export.checkpoint.tree import Component, LayoutName, Place

DiffusersConfig = denoiser.DenoiserConfig | video_vae.VideoVAEConfig | audio_vae.AudioVAEConfig
Config = DiffusersConfig | text_encoder.TextEncoderConfig

DIFFUSERS_CONFIGS: Mapping[Component, type[DiffusersConfig]] = {
    "denoiser": denoiser.DenoiserConfig,
    "video_vae": video_vae.VideoVAEConfig,
    "audio_vae": audio_vae.AudioVAEConfig,
}

FUSED_LAYOUTS: tuple[QKVLayout, ...] = ("interleaved", "stacked")


@dataclass(frozen=True)
class Configured:
    """What a component's configuration files say of it."""

    config: Config
    arguments: Mapping[str, Any]
    config_files: tuple[Path, ...]


@dataclass(frozen=True)
class Catalogue(Configured):
    """What a component holds. `parameters` are expressions under diffusers / transformers names."""

    files: ComponentFiles
    parameters: Mapping[str, Weight]
    qkv_layout: QKVLayout


@dataclass(frozen=True)
class Expectation:
    """The tensors that the files must hold, and how parameters are made from them (None: names are the same)."""

    stored: Mapping[str, Declared]
    recipes: Mapping[str, Recipe] | None


def read_catalogue(component: Component, layout: LayoutName, place: Place, gates: bool = False) -> Catalogue:
    """Reads configuration and headers of one component and checks every tensor against the configuration.

    gates: of a student's transformer that attends to video sparsely.

    Raises:
        CheckpointError: a file, a configuration value or a tensor is missing, unexpected or wrong.
    """
    read = read_configured(component, layout, place)
    return _catalogue(read, read_files(place.tensors, place.stem), expect(read.config, layout, gates))


def replace_tensors(base: Catalogue, layout: LayoutName, file: Path, gates: bool) -> Catalogue:
    """The component with the tensors of one more file, which take the place of those of the same keys.

    Raises:
        CheckpointError: a tensor is not one of the component's, has another shape or dtype, or a gate is missing.
    """
    header = read_header(file)
    expectation = expect(base.config, layout, gates)
    for key, declared in expectation.stored.items():
        if key not in base.files.tensors and key not in header.tensors:
            raise CheckpointError(file, key, declared, "no such tensor")
    tensors = {**base.files.tensors, **header.tensors}
    return _catalogue(base, ComponentFiles(base.files.listing, (*base.files.headers, header), tensors), expectation)


def _catalogue(read: Configured, files: ComponentFiles, expectation: Expectation) -> Catalogue:
    _check(files, expectation.stored)
    qkv_layout = _qkv_layout(files, expectation.recipes)
    parameters: Mapping[str, Weight] = files.tensors
    if expectation.recipes is not None:
        parameters = {name: expression(one, files.tensors, qkv_layout) for name, one in expectation.recipes.items()}
    return Catalogue(read.config, read.arguments, read.config_files, files, parameters, qkv_layout)


def read_configured(component: Component, layout: LayoutName, place: Place) -> Configured:
    """Reads the configuration files of one component; no tensor file need be there.

    Raises:
        CheckpointError: a file or a configuration value is missing or wrong.
    """
    file = place.config / "config.json"
    values = read_object(file)
    if component == "text_encoder":
        arguments = text_encoder.constructor_arguments(values)
        parsed = configuration.parse(text_encoder.TextEncoderConfig, arguments, file)
        return Configured(parsed, arguments, (file,))
    if layout == "diffusers":
        files: tuple[Path, ...] = (file,)
        found = configuration.Translation(configuration.constructor_arguments(values), {})
    else:
        found, files = _translate(component, values, file)
    config = configuration.parse(DIFFUSERS_CONFIGS[component], found.arguments, file, found.origins)
    return Configured(config, config.model_dump(), files)


def _translate(
    component: Component, values: dict[str, Any], file: Path
) -> tuple[configuration.Translation, tuple[Path, ...]]:
    """Native configuration files as diffusers constructor arguments."""
    if component == "denoiser":
        return denoiser.from_native(values, file), (file,)
    if component == "video_vae":
        source = file.parent / "source" / "config.json"
        return video_vae.from_native(values, file, read_object(source), source), (file, source)
    metadata = file.parent / "metadata.json"
    return audio_vae.from_native(values, file, read_object(metadata), metadata), (file, metadata)


def expect(config: Config, layout: LayoutName, gates: bool = False) -> Expectation:
    """What the files of a component with this configuration hold in a layout; only a transformer has gates."""
    match config:
        case text_encoder.TextEncoderConfig():
            return Expectation(text_encoder.tensors(config), None)
        case audio_vae.AudioVAEConfig():
            return Expectation(audio_vae.tensors(config), None)
        case denoiser.DenoiserConfig():
            tensors, recipes = denoiser.tensors(config, gates), denoiser.recipes(config, gates)
            extra = denoiser.native_only(config)
        case video_vae.VideoVAEConfig():
            tensors, recipes = video_vae.tensors(config), video_vae.recipes(config)
            extra = video_vae.native_only(config)
    if layout == "diffusers":
        return Expectation(tensors, None)
    return Expectation(native_declarations(tensors, recipes) | extra, recipes)


def _check(files: ComponentFiles, expected: Mapping[str, Declared]) -> None:
    for key, declared in expected.items():
        stored = files.tensors.get(key)
        if stored is None:
            raise CheckpointError(files.listing, key, declared, "no such tensor")
        if declared.dtype != stored.dtype or declared.shape not in (None, stored.shape):
            raise CheckpointError(stored.file, key, declared, Declared(stored.shape, stored.dtype))
    for key, stored in files.tensors.items():
        if key not in expected:
            found = f"an unexpected {DTYPE_NAMES[stored.dtype]} {list(stored.shape)}"
            raise CheckpointError(stored.file, key, "only tensors of the configured model", found)


def _qkv_layout(files: ComponentFiles, recipes: Mapping[str, Recipe] | None) -> QKVLayout:
    """Row order of fused projections: the release interleaves heads; an artifact that stacks them must say so."""
    if recipes is None:
        return "split"
    named = files.declared("qkv_layout") or "interleaved"
    for layout in FUSED_LAYOUTS:
        if named == layout:
            return layout
    file = files.headers[0].file
    raise CheckpointError(file, "__metadata__.qkv_layout", " or ".join(FUSED_LAYOUTS), repr(named))
