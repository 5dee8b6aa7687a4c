"""The measures of the quality bench give what well-kept libraries give for the same pictures and sounds."""

from __future__ import annotations

import pytest
import torch

from bench.similarity import cosine, log_mel, mel_bands, mel_cosine, psnr, relative_error, ssim

RATE = 32_000


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Two frames of waves, and the same under a pattern: uint8 [2, 40, 56, 3]."""
    y, x = torch.meshgrid(torch.arange(40).double(), torch.arange(56).double(), indexing="ij")
    plain, marked = [], []
    for frame in range(2):
        waves = [128 + 100 * torch.sin(x / 5 + frame + c) * torch.cos(y / 7 - c) for c in range(3)]
        plain.append(torch.stack(waves, -1))
        marked.append(plain[-1] + 20 * torch.sin(x * y / 31 + frame)[..., None])
    return tuple(torch.stack(each).round().clamp(0, 255).to(torch.uint8) for each in (plain, marked))  # type: ignore[return-value]


def sound() -> torch.Tensor:
    """A rising tone and a steady one: [1, 8000]."""
    t = torch.arange(8000).double() / RATE
    rising = torch.sin(2 * torch.pi * (200 + 3000 * t) * t)
    return (0.5 * rising + 0.1 * torch.sin(2 * torch.pi * 5000 * t)).unsqueeze(0)


def test_pictures_are_as_alike_as_scikit_image_says() -> None:
    one, other = pictures()
    # scikit-image 0.26.0: structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    # channel_axis=-1), mean of both frames, and peak_signal_noise_ratio of both together.
    assert ssim(one, other) == pytest.approx(0.7667850768471041, abs=1e-9)
    assert psnr(one, other) == pytest.approx(25.09590204806697, abs=1e-9)


def test_equal_pictures_have_no_noise() -> None:
    one, _ = pictures()
    assert psnr(one, one) is None
    assert ssim(one, one) == pytest.approx(1, abs=1e-12)


def test_mel_spectrograms_are_librosa_s() -> None:
    # librosa 0.11.0: filters.mel(sr=32000, n_fft=1024, n_mels=80), and log10 of feature.melspectrogram with
    # hop_length=256, pad_mode="reflect", floored at 1e-10. It computes the latter's bands in float32.
    bands, power = mel_bands(RATE), log_mel(sound(), RATE)[0]
    assert float(bands.sum()) == pytest.approx(2.5581261412331853, rel=1e-9)
    assert float(bands[3].max()) == pytest.approx(0.019379252877396645, rel=1e-9)
    assert power.shape == (80, 32)
    found = power.mean(), power[5, 7], power[40, 20], power[79, 3]
    assert list(map(float, found)) == pytest.approx([-6.459128782909538, -3.1415616287461283, -8.641933106559655, -10])


def test_sounds_are_compared_by_what_is_in_them_not_by_their_loudness() -> None:
    one = sound()
    noise = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0)).double()
    assert mel_cosine(one, one, RATE) == pytest.approx(1)
    assert mel_cosine(noise, 0.5 * noise, RATE) == pytest.approx(1)
    assert mel_cosine(one, noise, RATE) < 0.5


def test_angles_and_errors_of_latents() -> None:
    exact = torch.tensor([[3.0, 4.0]])
    assert cosine(exact, 2 * exact) == pytest.approx(1)
    assert relative_error(2 * exact, exact) == pytest.approx(1)
    assert cosine(exact, torch.tensor([[-4.0, 3.0]])) == pytest.approx(0)
