"""Where perf_analyzer comes from, and what a machine without one is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.perf import debian, install
from bench.perf.debian import DebianError
from bench.perf.install import InstallError, perf_analyzer

REAL = "#!/bin/sh\necho 'Perf Analyzer Version 2.60.0 (commit 0a1b2c)'\n"
PLACEHOLDER = "#!/bin/sh\necho 'a placeholder'\n"


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def _fetched(home: Path) -> None:
    _program(home / "perf_analyzer" / "bin" / "perf_analyzer", REAL)


def test_one_on_the_path_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin" / "perf_analyzer", REAL)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = perf_analyzer(tmp_path / "work")
    assert (found.origin, found.commit, found.command) == ("PATH", "0a1b2c", (str(tmp_path / "bin" / "perf_analyzer"),))
    assert not (tmp_path / "work").exists()


def test_the_placeholder_of_older_systems_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin" / "perf_analyzer", PLACEHOLDER)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(install, "_make", _fetched)
    assert perf_analyzer(tmp_path / "work").origin == f"wheel {install.VERSION}"


def test_it_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(install, "_make", lambda home: (made.append(home), _fetched(home)))
    assert perf_analyzer(tmp_path) == perf_analyzer(tmp_path)
    assert len(made) == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"perf_analyzer-{install.VERSION}", "perf_analyzer.lock"}


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(home: Path) -> None:
        (home / "half").touch()
        raise InstallError("the mirror is away")

    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(install, "_make", fails)
    with pytest.raises(InstallError, match="the mirror is away"):
        perf_analyzer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["perf_analyzer.lock"]


def test_an_old_system_without_apt_is_told_what_else_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloaded(requirement: str, sha256: str, folder: Path, *options: str) -> Path:
        import zipfile

        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("perf_analyzer/bin/perf_analyzer", REAL)
        return folder / "x.whl"

    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(install, "pip_download", downloaded)
    monkeypatch.setattr(install, "libc", lambda: (2, 36))
    with pytest.raises(InstallError) as told:
        perf_analyzer(tmp_path)
    for part in ("needs glibc 2.38, here is 2.36", "apt-get, dpkg-deb not found", "h3trt perf --url", "on PATH"):
        assert part in str(told.value)


def test_the_archive_is_that_of_the_machines_own_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "bookworm-security https://a.example/security/\nbookworm https://a.example/debian/\n"
    monkeypatch.setattr(debian, "_run", lambda *arguments: listed)
    monkeypatch.setattr(debian, "_os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "bookworm"})
    assert debian.archive_of_this_system() == "https://a.example/debian/"
    monkeypatch.setattr(debian, "_os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "sid"})
    with pytest.raises(DebianError, match="no source of apt is for sid"):
        debian.archive_of_this_system()
