"""Images: what every format decodes to, against Pillow's own way and the reference pipeline's loader."""

from __future__ import annotations

import io

import numpy as np
import pytest
from diffusers.utils import load_image
from numpy.typing import NDArray
from PIL import Image

from runtime.media.facts import ImageFacts
from runtime.media.pixels import decode_image, resize_image
from runtime.media.probe import probe
from runtime.refusal import RequestError
from tests.media.clips import picture, saved
from tests.media.heif import heic
from tests.media.hostile import png, png_header

ORIENTATION = 0x0112


def decoded(data: bytes) -> NDArray[np.uint8]:
    """Probed, then decoded; the facts must be those of the pixels."""
    facts = probe(data, "image", "IMAGES[0]")
    assert isinstance(facts, ImageFacts)
    pixels = decode_image(data, facts, "IMAGES[0]")
    assert pixels.shape == (facts.height, facts.width, 3)
    assert pixels.dtype == np.uint8
    return pixels


def reference(data: bytes) -> NDArray[np.uint8]:
    """As diffusers loads an image."""
    return np.asarray(load_image(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_every_orientation_of_every_format_is_the_reference_loaders(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = saved(picture(), name, exif=exif)
    np.testing.assert_array_equal(decoded(data), reference(data))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "PA", "1"])
def test_every_mode_of_png_is_the_reference_loaders(mode: str) -> None:
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image = image.quantize() if mode in ("P", "PA") else image.convert(mode)
    data = saved(image, "PNG")
    np.testing.assert_array_equal(decoded(data), reference(data))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_mode_of_jpeg_is_the_reference_loaders(mode: str, options: dict[str, object]) -> None:
    data = saved(picture().convert(mode), "JPEG", **options)
    np.testing.assert_array_equal(decoded(data), reference(data))


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}])
def test_webp_with_and_without_loss_and_alpha_is_the_reference_loaders(options: dict[str, object]) -> None:
    for mode in ("RGB", "RGBA"):
        data = saved(picture().convert(mode), "WEBP", **options)
        np.testing.assert_array_equal(decoded(data), reference(data))


def test_alpha_is_dropped_and_not_composited() -> None:
    image = Image.new("RGBA", (300, 260), (200, 40, 10, 0))
    assert (decoded(saved(image, "PNG")) == (200, 40, 10)).all()


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    """Pillow's own conversion clips at 255 and would make nearly all of it white."""
    levels = (np.arange(300 * 260) * 65_535 // (300 * 260)).astype(np.uint16).reshape(260, 300)
    pixels = decoded(saved(Image.fromarray(levels), "PNG"))
    np.testing.assert_array_equal(pixels, np.repeat((levels >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_a_jpeg_with_a_second_picture_behind_it_is_a_still() -> None:
    """Phones write such files (MPO) for portraits."""
    data = saved(picture(), "MPO", save_all=True, append_images=[picture().rotate(180)])
    np.testing.assert_array_equal(decoded(data), reference(data))


@pytest.mark.parametrize(("turns", "grid"), [(0, False), (1, True), (2, False), (3, True)])
def test_heic_single_and_tiled_is_upright(turns: int, grid: bool) -> None:
    """x265 at this quality is within a few levels where the chroma, of half resolution, is flat."""
    y, x = np.mgrid[0:512, 0:768]
    pixels = np.stack([x // 4, y // 4, np.full_like(x, 90)], axis=-1).astype(np.uint8)
    found = decoded(heic(pixels, turns=turns, grid=grid)).astype(int)
    assert np.abs(found - np.rot90(pixels, turns)).max() <= 8


def test_a_heic_decodes_to_its_jpeg() -> None:
    """Two encoders and two decoders of the same photograph."""
    pixels = np.asarray(picture(512, 384))
    jpeg = decoded(saved(Image.fromarray(pixels), "JPEG", quality=98)).astype(int)
    assert np.abs(decoded(heic(pixels)).astype(int) - jpeg).mean() < 5


@pytest.mark.parametrize("size", [(768, 512), (300, 260), (96, 2048), (640, 288)])
def test_resizing_is_pillows_lanczos(size: tuple[int, int]) -> None:
    pixels = np.asarray(picture())
    expected = np.asarray(picture().resize(size, Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(resize_image(pixels, size), expected)


def test_an_icc_profile_changes_nothing() -> None:
    profile = b"\0" * 200
    with_profile, without = saved(picture(), "PNG", icc_profile=profile), saved(picture(), "PNG")
    np.testing.assert_array_equal(decoded(with_profile), decoded(without))


def test_unreadable_exif_leaves_the_picture_as_it_is() -> None:
    data = saved(picture(), "WEBP", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    np.testing.assert_array_equal(decoded(data).shape, (260, 300, 3))


def test_an_image_may_not_change_after_it_was_probed() -> None:
    facts = probe(saved(picture(), "PNG"), "image", "IMAGES[0]")
    assert isinstance(facts, ImageFacts)
    with pytest.raises(RequestError, match=r"IMAGES\[0\].*300x260"):
        decode_image(saved(picture(400, 260), "PNG"), facts, "IMAGES[0]")


def test_pixels_beyond_a_png_are_not_unpacked() -> None:
    import zlib

    packed = zlib.compress(bytes(50 << 20), 1)
    data = png(png_header(256, 256), (b"IDAT", packed), (b"IEND", b""))
    assert not decoded(data).any()
