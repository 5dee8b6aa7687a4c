"""Released dimensions in sparse files: the published counts and sizes, in a few megabytes of disk."""

from pathlib import Path

import pytest

from export.checkpoint import Checkpoint
from export.checkpoint.summary import summarise
from export.checkpoint.tree import LayoutName
from export.miniature import write_sparse_released

TEXT, AUDIO = (1058, 66_714_780_128), (1087, 605_306_340)
PUBLISHED: dict[str, dict[str, tuple[int, int]]] = {
    "native": {
        "denoiser": (535, 66_280_430_144),
        "text_encoder": TEXT,
        # The diffusers bytes and one mask token of the decoder's width.
        "video_vae": (560, 10_415_475_936 + 4 * 2048),
        "audio_vae": AUDIO,
    },
    "diffusers": {
        "denoiser": (638, 66_280_430_080),
        "text_encoder": TEXT,
        "video_vae": (703, 10_415_475_936),
        "audio_vae": AUDIO,
    },
}
"""Component -> tensors and bytes (spec/model.md 1b, 1e, 1g); the audio VAE's follow from its class."""


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_sparse_release_has_the_published_sizes(tmp_path: Path, layout: LayoutName) -> None:
    write_sparse_released(tmp_path, layout)
    summary = summarise(Checkpoint.open(tmp_path))
    for part in summary.components:
        assert (part.tensors, part.nbytes) == PUBLISHED[layout][part.component], (part.component, part.partition)
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*"))
    assert on_disk < 10_000_000 < 200_000_000_000 < summary.nbytes


def test_parameter_counts_are_the_published_ones(tmp_path: Path) -> None:
    write_sparse_released(tmp_path, "diffusers")
    checkpoint = Checkpoint.open(tmp_path)
    parts = {part.component: part for part in summarise(checkpoint).components}
    assert parts["denoiser"].elements == 33_122_992_896
    assert parts["denoiser"].dtypes["F32"] == 4 * 17_222_144
    assert parts["video_vae"].elements == 2_603_868_984
    adaln = [
        one for key, one in checkpoint.stored("denoiser").items() if "adaln_proj" in key or "norm_out.linear" in key
    ]
    assert sum(one.nbytes for one in adaln) == 2 * 13_039_369_728


def test_release_is_sharded_as_published(tmp_path: Path) -> None:
    write_sparse_released(tmp_path, "native")
    files = {part.component: part.files for part in summarise(Checkpoint.open(tmp_path / "FL2VA")).components}
    assert files == {"denoiser": 13, "text_encoder": 14, "video_vae": 1, "audio_vae": 1}
    assert (tmp_path / "FL2VA/transformer/model-00013-of-00013.safetensors").is_file()
