"""A workload says in which order a sweep goes, and what is wrong with its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.perf.workload import WORKLOADS, Workload, WorkloadError
from engines.plan import released_outline
from engines.profile import PROFILES, Profile
from runtime.request import resolve


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.toml")))
def test_every_profile_has_a_workload_whose_requests_are_legal(profile: str) -> None:
    workload = Workload.load(Profile.load(profile))
    for seconds in workload.seconds:
        resolved = resolve(workload.prompt, dict(workload.params(seconds)), released_outline().dimensions)
        assert resolved.forwards == workload.forwards


def test_durations_are_visited_in_turn(tmp_path: Path) -> None:
    gpu = Workload.load(Profile.load("h200"))
    assert gpu.order == ((5, 1), (10, 1), (15, 1), (5, 2), (10, 2), (15, 2))
    assert list(gpu.concurrencies) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("concurrency = [1, 4]", "concurrency = [4, 1]", r"concurrency = \[4, 1\]: must be from at least 1"),
        ("requests = 4", "requests = 2", "requests = 2: must be at least the last concurrency, 4"),
        ("visits = 2", "visits = 0", "visits: Input should be greater than or equal to 1"),
        ("seed = 1", "sed = 1", "sed: Extra inputs are not permitted"),
        ("seed = 1", "seed = ", "wrong.toml: "),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text((WORKLOADS / "cpu.toml").read_text().replace(old, new))
    with pytest.raises(WorkloadError, match=message):
        Workload.load(Profile.load("cpu"), file)
