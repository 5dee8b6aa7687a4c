"""Profiles say exactly what is wrong with them, and turn limits into numbers."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

import pytest

from engines import machine
from engines.profile import PROFILES, Profile, ProfileError

CPU = (PROFILES / "cpu.toml").read_text()
B300 = (PROFILES / "b300.toml").read_text()


@pytest.mark.parametrize("file", sorted(PROFILES.glob("*.toml")), ids=lambda file: file.stem)
def test_shipped_profiles_load_by_name(file: Path) -> None:
    assert Profile.load(file.stem).name == file.stem


def test_a_profile_of_ones_own_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(CPU)
    assert Profile.load(file).name == str(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('threads = "auto"', "threads = 0", 'threads = 0: must be a whole number from 1 to 1024, or "auto"'),
        ('threads = "auto"', "threads = true", "threads = True: must be a whole number"),
        ('threads = "auto"', 'threads = "many"', "threads = 'many': must be a whole number"),
        ('threads = "auto"', "thread = 2", "thread = 2: unknown key; did you mean threads?"),
        ('threads = "auto"', "", "threads: is missing"),
        ('threads = "auto"', "threads = ", "not a TOML file: Invalid value (at line "),
        ('"80%"', '"120%"', "memory = '120%': must be a share such as \"80%\""),
        ('"80%"', '"0 GiB"', "memory = '0 GiB': must be a share"),
        ('"80%"', "0.8", "memory = 0.8: must be a share"),
        ('"bound"', '"glued"', "weights = 'glued': must be 'bound' or 'baked'"),
        ('"float32"', '"bfloat16"', "precision.text_encoder = 'bfloat16': must be 'float32' with backend"),
        ('"onnxruntime"', '"abacus"', "backend = 'abacus': must be 'onnxruntime'"),
        ('["fl2va", "ref2va"]', '["ref2va"]', "partitions = ['ref2va']: must name fl2va, which text to video"),
        ('["fl2va", "ref2va"]', '["fl2va", "fl2va"]', "partitions = ['fl2va', 'fl2va']: must name each partition once"),
        ('["fl2va", "ref2va"]', "[]", "partitions = []: must not be empty"),
        ('["fl2va", "ref2va"]', '["t2va"]', "partitions.0 = 't2va': must be 'fl2va' or 'ref2va'"),
        ('["fl2va", "ref2va"]', '"fl2va"', "partitions = 'fl2va': must be a list"),
        ('threads = "auto"', 'threads = "auto"\nname = "x"', "name = 'x': must not be given"),
        ('threads = "auto"', "ranks = 2", "ranks = 2: must be a table"),
        ('"80%"', '"\u0668\u0660%"', "memory = '\u0668\u0660%': must be a share"),
        ('"80%"', f'"{"9" * 400} GiB"', f"memory = '{'9' * 199}...: must be a share"),
        ('threads = "auto"', f"threads = {'[' * 5000}{']' * 5000}", "not a profile: its values are nested too deeply"),
        (
            "[attention]",
            "[ranks]\nulysses = 65\ntext_encoder = 1\nvideo_tiles = 1\n[attention]",
            "ranks.ulysses = 65: must be at most 64",
        ),
    ],
)
def test_a_mistake_is_named_by_file_key_value_and_rule(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CPU
    file = tmp_path / "mine.toml"
    file.write_text(CPU.replace(old, new))
    with pytest.raises(ProfileError) as refused:
        Profile.load(file)
    assert f"{file}: {message}" in str(refused.value)


def test_weights_inside_engines_are_not_divided_among_ranks(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((PROFILES / "h200x2.toml").read_text().replace('weights = "bound"', 'weights = "baked"'))
    with pytest.raises(ProfileError, match=r"weights = 'baked': must be 'bound' with ranks\.text_encoder = 2: each"):
        Profile.load(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            f"[{size}]",
            f"[{wrong}]",
            f"shapes.audio_rows = [{shown}]: must be a list of whole numbers from 1, each above",
        )
        for size, wrong, shown in [
            ("4096", "", ""),
            ("4096", "0", "0"),
            ("4096", "4096, 512", "4096, 512"),
            ("4096", '"many"', "'many'"),
            ("4096", "true", "True"),
            ("4096", "1.5", "1.5"),
        ]
    ]
    + [
        ("[4096]", "2048", "shapes.audio_rows = 2048: must be a list of whole numbers"),
        ("audio_rows", "audio_row", "shapes.audio_row: unknown key; must be 'rows', "),
        *(
            ('denoiser = "resident"', f"denoiser = {wrong}", f'residency.denoiser = {shown}: must be "resident", ')
            for wrong, shown in [('"streamed"', "'streamed'"), ("-1", "-1"), ("2.0", "2.0"), ("true", "True")]
        ),
    ],
)
def test_a_mistake_about_a_gpu_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in B300
    file = tmp_path / "mine.toml"
    file.write_text(B300.replace(old, new))
    with pytest.raises(ProfileError) as refused:
        Profile.load(file)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{file}: {message}")


def test_every_mistake_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(CPU.replace('"bound"', '"glued"').replace('"80%"', '"most"'))
    with pytest.raises(ProfileError, match=r"weights = 'glued'(.|\n)*memory = 'most'"):
        Profile.load(file)


def test_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"profile 'z80': no file .*z80\.toml; shipped profiles: .*cpu"):
        Profile.load("z80")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("50%", 8 << 30), ("100%", 16 << 30), ("1.5 GiB", 3 << 29), ("512MiB", 1 << 29), ("64 GiB", 16 << 30)],
)
def test_the_memory_budget_is_a_share_or_an_amount_within_the_machine(
    tmp_path: Path, memory: str, expected: int
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(CPU.replace("80%", memory))
    assert Profile.load(file).memory_budget(16 << 30) == expected


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1)])
def test_a_containers_processor_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert machine.available_processors(tmp_path) == expected


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    physical = machine.memory_bytes(tmp_path)
    assert physical > 1 << 28
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine.memory_bytes(tmp_path) == 1048576
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(tmp_path) == physical


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ('blocks = "skip"', "attention.skip_threshold = 0: must be above 0 with blocks that"),
        (
            'blocks = "sage"\nskip_threshold = 0.001',
            "attention.skip_threshold = 0.001: must be above 0 with blocks that",
        ),
        ('blocks = "skip"\nskip_threshold = 1.5', "attention.skip_threshold = 1.5: must be less than or equal to 1"),
        ('blocks = "vsa"', "attention.blocks = 'vsa': must be 'dense', 'sage', 'skip' or 'sage+skip'"),
    ],
)
def test_attention_that_cannot_be_is_refused(tmp_path: Path, lines: str, rule: str) -> None:
    text = (PROFILES / "cpu.toml").read_text().replace('blocks = "dense"', lines)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ProfileError) as error:
        Profile.load(tmp_path / "mine.toml")
    assert rule in str(error.value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("[quality.sage]", "[quality.dense]"), "quality.dense: must not be given; attention.blocks = 'dense' is the"),
        (
            ("[quality.sage]", "[quality.vsa]"),
            "quality.vsa: unknown key; must be 'dense', 'sage', 'skip' or",
        ),
        (
            ("[quality.sage]", "[quality.sage]\nskip_threshold = 0.1"),
            "quality.sage.skip_threshold = 0.1: must be",
        ),
        (("skip_threshold = 0.05", ""), "quality.skip.skip_threshold = 0: must be above 0 with blocks that skip"),
        (("skip_below = 0.97", "skip_below = 2.0"), "quality.skip.skip_below = 2.0: must be less than or equal to 1"),
        (
            ("skip_below = 0.97", "skip_above = 0.97"),
            "skip_above = 0.97: unknown key; did you mean skip_below?",
        ),
        (
            ('backend = "onnxruntime"', 'backend = "inductor"'),
            "quality.sage: 'inductor' has kernels for it on GPUs only",
        ),
        (('weights = "bound"', 'weights = "baked"'), "quality.sage: must not be given with weights = 'baked'"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tmp_path: Path, change: tuple[str, str], rule: str) -> None:
    (tmp_path / "mine.toml").write_text(CPU.replace(*change, 1))
    with pytest.raises(ProfileError) as error:
        Profile.load(tmp_path / "mine.toml")
    assert rule in str(error.value)


def test_tiers_are_named_by_what_they_change() -> None:
    assert [tier.name for tier in Profile.load("cpu").tiers] == ["lossless", "sage", "skip", "sage+skip"]
    assert [tier.name for tier in Profile.load("h200_inductor_sage").tiers] == ["sage", "lossless", "skip", "sage+skip"]
    assert [tier.name for tier in Profile.load("h200_inductor_fp8_sage").tiers] == ["fp8+sage"]
    assert [tier.name for tier in Profile.load("rtx5090").tiers] == ["fp8"]


@pytest.mark.parametrize(
    "lines", [('blocks = "dense"', 'blocks = "sage"'), ("[residency]", "[quality.sage]\n[residency]")]
)
def test_only_back_ends_with_kernels_or_plugins_attend_otherwise_than_densely(
    tmp_path: Path, lines: tuple[str, str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((PROFILES / "h200.toml").read_text().replace(*lines))
    assert "sage" in [tier.name for tier in Profile.load(file).tiers]
    file.write_text((PROFILES / "rtx5090.toml").read_text().replace(*lines))
    with pytest.raises(ProfileError, match="'tensorrt_rtx' has no plugins, and so no kernels for it"):
        Profile.load(file)


def test_ranks_have_ranges_of_rows_that_fill_them() -> None:
    """Whatever sequence is within a range has ranks' rows within the same range of theirs."""
    profile = Profile.load("h200x2")
    odd = profile.model_copy(update={"shapes": {**profile.shapes, "rows": (100, 128, 40_961)}})
    for each in (profile, odd):
        ends = each.axis_ends
        assert ends["rows"] == tuple(2 * end for end in ends["local_rows"])
        assert all(end % 64 == 0 for end in ends["local_rows"])
        for rows in (1, 100, 101, 128, 129, 40_960):
            range_of = bisect_left(ends["rows"], rows)
            assert bisect_left(ends["local_rows"], each.local_rows(rows)) == range_of
    assert odd.axis_ends["local_rows"] == (64, 20_544)
    assert profile.axis_ends["text_rows"] == profile.shapes["text_rows"]


def test_one_rank_has_the_ranges_of_the_sequence() -> None:
    profile = Profile.load("h200")
    assert profile.axis_ends["rows"] == profile.shapes["rows"]
    assert "local_rows" not in profile.axis_ends
