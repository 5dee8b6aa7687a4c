"""A server's log is read as it grows, and does not grow for ever."""

from __future__ import annotations

from pathlib import Path

from triton_repo.server_log import FollowedLog, keep_previous


def test_whole_lines_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("one\ntw")
    log = FollowedLog(path)
    assert log.new_lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert log.new_lines() == ["two"]
    assert log.new_lines() == []


def test_a_log_begins_anew_beyond_its_size_and_keeps_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("ab") as writer:
        writer.write(b"old\n" * 10)
        writer.flush()
        log = FollowedLog(path)
        log.bound(30)
        assert path.stat().st_size == 40  # not read yet
        assert len(log.new_lines()) == 10
        log.bound(30)
        writer.write(b"new\n")
        writer.flush()
        assert log.new_lines() == ["new"]
    assert path.read_bytes() == b"new\n"
    assert (tmp_path / "server.log.1").read_bytes() == b"old\n" * 10


def test_the_log_of_the_server_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    keep_previous(path)
    path.write_text("why it died")
    keep_previous(path)
    assert not path.exists()
    assert (tmp_path / "server.log.1").read_text() == "why it died"
