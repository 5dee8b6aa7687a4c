"""`h3trt doctor --profile` on machines that are told to it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from engines.backend import BackendMissing
from engines.profile import Profile
from engines.tensorrt import REQUIREMENTS
from h3trt import profile_checks as checks
from h3trt.check import Check


class NVMLError(Exception):
    """As the bindings name it."""


def _nvml(names: list[str], capability: tuple[int, int], mib: int, cuda: int = 13000, failing: bool = False) -> object:
    def start() -> None:
        if failing:
            raise NVMLError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: names[handle].encode(),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=mib << 20),
        nvmlDeviceGetCudaComputeCapability=lambda handle: capability,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
    )


def _checks(monkeypatch: pytest.MonkeyPatch, store: Path, nvml: object, profile: str) -> dict[str, Check]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return {check.name: check for check in checks.profile_checks(Profile.load(profile), store)}


def test_the_profiles_own_machine_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = _checks(monkeypatch, tmp_path / "s", _nvml(["RTX 5090"], (12, 0), 32607), "rtx5090")
    assert all(found[name].good for name in ("GPUs", "GPU 0", "GPU 0 memory", "driver"))
    assert "NCCL" not in found


@pytest.mark.parametrize(
    ("nvml", "bad"),
    [
        (_nvml([], (12, 0), 32607), "GPUs"),
        (_nvml(["H200"], (9, 0), 143771), "GPU 0"),
        (_nvml(["RTX 5080"], (12, 0), 16303), "GPU 0 memory"),
        (_nvml(["RTX 5090"], (12, 0), 32607, cuda=12040), "driver"),
        (_nvml(["RTX 5090"], (12, 0), 32607, failing=True), "GPUs"),
        (None, "GPUs"),
    ],
)
def test_each_lack_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: object, bad: str
) -> None:
    found = _checks(monkeypatch, tmp_path / "s", nvml, "rtx5090")
    wrong = [c for n, c in found.items() if not c.good and (n.startswith("GPU") or n == "driver")]
    assert [check.name for check in wrong] == [bad]
    assert wrong[0].remedy


def test_host_memory_disk_and_pinned_memory_are_held_against_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "memory_bytes", lambda: 16 << 30)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    found = _checks(monkeypatch, tmp_path / "s", _nvml(["RTX 5090"], (12, 0), 32607), "rtx5090")
    for name, wanted in (("host memory", "94.6 GB"), ("disk", "20.1 GB"), ("pinned memory", "89.5 GB")):
        assert not found[name].good
        assert f"wanted {wanted}" in found[name].found
        assert found[name].remedy
    assert found["open files"].good


def test_several_gpus_need_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(checks.importlib.metadata, "distributions", lambda: [])
    found = _checks(monkeypatch, tmp_path / "s", _nvml(["H200"] * 2, (9, 0), 143771), "h200x2")
    assert not found["NCCL"].good
    assert found["GPU 1"].good


@pytest.mark.parametrize(("version", "good"), [("1.7.1.116", True), ("1.6.0", False), ("2.0", False), (None, False)])
def test_the_package_is_the_one_that_engines_are_built_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, good: bool
) -> None:
    def installed(backend: str) -> str:
        if version is None:
            raise BackendMissing("no module")
        return version

    monkeypatch.setattr(checks, "backend_version", installed)
    found = _checks(monkeypatch, tmp_path / "s", _nvml(["RTX 5090"], (12, 0), 32607), "rtx5090")["tensorrt_rtx"]
    assert (found.good, found.remedy) == (good, "pip install 'tensorrt-rtx-cu13<2,>=1.7'")


def test_the_packages_are_those_of_the_project_s_extras() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, text in REQUIREMENTS.items():
        wanted = Requirement(text)
        extra = [Requirement(each) for each in project["optional-dependencies"][name.replace("_", "-")]]
        of_it = [each for each in extra if each.name.startswith(wanted.name)]
        assert of_it
        assert {each.specifier for each in of_it} == {wanted.specifier}
