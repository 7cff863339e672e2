"""Files written whole or not at all, read up to a limit, never put in a device's place."""

import gzip
import os

import pytest

from memlab.files import read_up_to, unpack_up_to, write_whole


def test_a_file_is_there_whole_with_the_mode_of_any_new_one(tmp_path):
    (tmp_path / "plain").touch()
    for data in ("text\n", b"\0\xff"):
        write_whole(tmp_path / "new", data)
        assert (tmp_path / "new").read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "plain"]


def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        write_whole(tmp_path / "file", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "to pipe", ""):
        with pytest.raises(ValueError, match="isn't a regular file"):
            write_whole(path, "text")
    assert (tmp_path / "pipe").is_fifo()


def test_reading_ends_at_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    assert read_up_to(file, 100) == bytes(100)
    with pytest.raises(ValueError, match="file has more than 99 B"):
        read_up_to(file, 99)
    with pytest.raises(ValueError, match="/dev/zero has more than"):
        read_up_to("/dev/zero", 1000)
    file.write_bytes(gzip.compress(bytes(100)))
    assert unpack_up_to(file, 100) == bytes(100)
    with pytest.raises(ValueError, match="unpacks to more than 99 B"):
        unpack_up_to(file, 99)
    file.write_bytes(gzip.compress(bytes(100))[:-6])
    with pytest.raises(ValueError, match="damaged"):
        unpack_up_to(file, 100)
