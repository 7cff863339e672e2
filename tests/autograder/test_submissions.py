"""What was handed in is found, and what can't be read costs only itself."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder import archives
from autograder.course import CourseError
from autograder.roster import Roster, read_roster
from autograder.submissions import Student, chapter_of, collect, outer_name

CHAPTERS = ["01_memory_basics", "02_four_consumers"]


@pytest.mark.parametrize(
    ("name", "chapter"),
    [
        ("02_four_consumers.ipynb", "02_four_consumers"),
        ("Copy of 02_four_consumers (1).ipynb", "02_four_consumers"),
        ("anna-02-four-consumers-final.IPYNB", "02_four_consumers"),
        ("homework.ipynb", None),
    ],
)
def test_a_chapter_is_recognised_by_its_name_in_the_file_name(name: str, chapter: str | None) -> None:
    assert chapter_of(name, CHAPTERS) == chapter


def archive(path: Path, damage: bool = False, method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as stream:
        stream.writestr("02_four_consumers.ipynb", "x" * 5000)
        stream.writestr("__MACOSX/02_four_consumers.ipynb", "fork")
        stream.writestr(".ipynb_checkpoints/02_four_consumers-checkpoint.ipynb", "old")
    if damage:
        data = bytearray(path.read_bytes())
        data[60:75] = b"\xff" * 15
        path.write_bytes(data)


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
@pytest.mark.parametrize("damage", [False, True])
def test_archives_of_every_kind_whole_or_damaged(tmp_path: Path, method: int, damage: bool) -> None:
    archive(tmp_path / "anna.zip", damage, method)
    [student], ignored = collect(tmp_path, CHAPTERS)
    assert ignored == [] and student.id == "anna"
    [found] = student.notebooks["02_four_consumers"]
    assert (found.fault != "") == damage and (found.data == b"x" * 5000) != damage


def test_odd_entries_are_said_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "anna").mkdir()
    (tmp_path / "loose.ipynb").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "anna")
    os.mkfifo(tmp_path / "pipe.zip")
    (tmp_path / "out").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcller\nB")).mkdir()
    students, ignored = collect(tmp_path, CHAPTERS, tmp_path / "out")
    assert sorted(s.id for s in students) == ["M\ufffdller B", "anna"]
    assert len(ignored) == 3
    for student in students:
        student.id.encode("utf-8")


def test_a_folder_whose_name_begins_with_a_dot_is_said(tmp_path: Path) -> None:
    for name in ("anna", ".bo", ".ipynb_checkpoints", "__MACOSX", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "01_memory_basics.ipynb").write_text("{}")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("anna", ".bo", ".ipynb_checkpoints"):
            archive.writestr(f"{name}/01_memory_basics.ipynb", "{}")
    for handed_in in (tmp_path, path):
        students, ignored = collect(handed_in, CHAPTERS)
        assert "anna" in [s.id for s in students]
        assert [line for line in ignored if "dot" in line] == [
            ".bo: its name begins with a dot; rename it if it is a student's"
        ]


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("02_four_consumers.ipynb", b"0" * (129 << 20))
    [student], _ = collect(tmp_path, CHAPTERS)
    assert "larger than 128.00 MiB" in student.notebooks["02_four_consumers"][0].fault


def test_no_folder_and_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no folder"):
        collect(tmp_path / "nowhere", CHAPTERS)
    with pytest.raises(CourseError, match="no submissions"):
        collect(tmp_path, CHAPTERS)


# -- tarballs, archives in archives ------------------------------------------------------------------------

NOTEBOOK = "02_four_consumers.ipynb"


def tarball(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as stream:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_700_000_000
            stream.addfile(info, io.BytesIO(data))
    return path


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def only(students: list[Student]) -> Student:
    [student] = students
    return student


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.bz2", "w:bz2"), (".tar.xz", "w:xz")],
)
def test_tarballs_of_every_kind(tmp_path: Path, suffix: str, mode: str) -> None:
    tarball(tmp_path / f"anna.b{suffix}", {NOTEBOOK: b"x", "../../etc/passwd": b"no"}, mode)
    student = only(collect(tmp_path, CHAPTERS)[0])
    assert student.id == "anna.b"
    [found] = student.notebooks["02_four_consumers"]
    assert found.data == b"x" and found.modified == 1_700_000_000 and found.time_from == "the tarball's entry"


def test_a_tarball_with_the_suffix_of_a_zip_and_the_other_way_round(tmp_path: Path) -> None:
    tarball(tmp_path / "anna.zip", {NOTEBOOK: b"x"}, "w:gz")
    (tmp_path / "bert.tar.gz").write_bytes(zipped({NOTEBOOK: b"x"}))
    assert [s.notebooks["02_four_consumers"][0].data for s in collect(tmp_path, CHAPTERS)[0]] == [b"x", b"x"]


@pytest.mark.parametrize("name", ["anna.7z", "anna.rar", "anna.gz", "anna.zip", "anna.tar"])
def test_what_is_no_readable_archive_is_refused_aloud(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello, I am no archive")
    student = only(collect(tmp_path, CHAPTERS)[0])
    assert student.id == "anna" and name in student.notes[0] and not student.notebooks


def test_links_and_devices_in_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "anna.tar", "w") as stream:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(NOTEBOOK)
            info.type, info.linkname = kind, "/etc/passwd"
            stream.addfile(info)
    with zipfile.ZipFile(tmp_path / "bert.zip", "w") as archive_:
        link = zipfile.ZipInfo(NOTEBOOK)
        link.external_attr = 0o120777 << 16
        archive_.writestr(link, "/etc/passwd")
    for student in collect(tmp_path, CHAPTERS)[0]:
        for found in student.notebooks["02_four_consumers"]:
            assert found.data == b""
        assert "a link" in student.notebooks["02_four_consumers"][0].fault


def test_an_archive_in_a_folder_is_opened_and_one_in_an_archive_is_not(tmp_path: Path) -> None:
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "work.zip").write_bytes(zipped({NOTEBOOK: b"x"}))
    (tmp_path / "bert.zip").write_bytes(zipped({"work.zip": zipped({NOTEBOOK: b"x"})}))
    anna, bert = collect(tmp_path, CHAPTERS)[0]
    assert anna.notebooks["02_four_consumers"][0].name == f"work.zip/{NOTEBOOK}"
    assert not bert.notebooks and "an archive in an archive isn't opened" in bert.notes[0]


def test_too_many_files_and_too_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tarball(tmp_path / "many.tar.gz", {f"{n}.txt": b"" for n in range(archives.MAX_FILES + 1)}, "w:gz")
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as stream:
        for n in range(archives.MAX_FILES + 1):
            stream.writestr(f"{n}.txt", b"")
    tarball(tmp_path / "bomb.tar.bz2", {"zeros.bin": bytes(3 << 20), NOTEBOOK: b"x"}, "w:bz2")
    monkeypatch.setattr(archives.in_archive, "__defaults__", (2 << 20, archives.MAX_FILES))
    students = {s.id: s for s in collect(tmp_path, CHAPTERS)[0]}
    assert "more than 2,000 files" in "".join(students["many"].notes)
    assert "2.00 MiB when unpacked" in students["bomb"].notes[0]


def test_a_hundred_megabytes_of_output_are_left_out_and_said(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "a = 1", "outputs": [{"text": "y" * (20 << 20)}]}] * 5
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / NOTEBOOK).write_text(json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))
    [found] = only(collect(tmp_path, CHAPTERS)[0]).notebooks["02_four_consumers"]
    assert not found.fault and len(found.data) < 1000 and "100.00 MiB) were left out" in found.note
    assert json.loads(found.data)["cells"][4]["source"] == "a = 1"


def test_a_password_and_a_suffix_too_many(tmp_path: Path) -> None:
    content = bytearray(zipped({NOTEBOOK: b"x"}))
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.find(mark) + at] |= 1
    (tmp_path / "anna.zip").write_bytes(content)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / f"{NOTEBOOK}.json").write_bytes(b"b")
    anna, bert = collect(tmp_path, CHAPTERS)[0]
    assert "without a password" in anna.notebooks["02_four_consumers"][0].fault
    assert bert.notebooks["02_four_consumers"][0].data == b"b"


# -- what an LMS makes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "student", "numbers", "attempt", "late"),
    [
        ("Anna Maria Müller_123456_assignsubmission_file_", "Anna Maria Müller", ("123456", ""), 0, False),
        ("Bo_Li_7_assignsubmission_file_02_four.ipynb", "Bo_Li", ("7", ""), 0, False),
        ("Participant_99_assignsubmission_file_", "Participant 99", ("99", ""), 0, False),
        ("mulleranna_LATE_12345_67890_02_four-2.ipynb", "mulleranna", ("", "12345"), 3, True),
        ("mulleranna_12345_67890_hw.zip", "mulleranna", ("", "12345"), 1, False),
        ("anna_01_02_four_consumers", "anna_01_02_four_consumers", ("", ""), 0, False),
        ("anna attempt 2", "anna attempt 2", ("", ""), 2, False),
        ("anna.tar.gz", "anna", ("", ""), 0, False),
    ],
)
def test_outer_names(name: str, student: str, numbers: tuple[str, str], attempt: int, late: bool) -> None:
    found = outer_name(name)
    assert (found.student, (found.moodle, found.canvas)) == (student, numbers)
    assert (found.attempt, found.late) == (attempt, late)


MOODLE = {
    f"Anna Ek_101_assignsubmission_file_/{NOTEBOOK}": b"a",
    "Anna Ek_101_assignsubmission_onlinetext_/onlinetext.html": b"<p>hello",
    f"Bo Li_102_assignsubmission_file_/{NOTEBOOK}": b"b",
    f"Bo Li_103_assignsubmission_file_/{NOTEBOOK}": b"another Bo Li",
    "Cy_104_assignsubmission_onlinetext_/onlinetext.html": b"text only",
    "Di_105_assignsubmission_file_/work.zip": zipped({NOTEBOOK: b"d"}),
}


@pytest.mark.parametrize("wrapper", ["", "Course-Exercise 2-1234/"])
def test_a_moodle_download(tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "download.zip"
    path.write_bytes(zipped({wrapper + name: data for name, data in MOODLE.items()}))
    students = {s.id: s for s in collect(path, CHAPTERS)[0]}
    assert sorted(students) == ["Anna Ek", "Bo Li 102", "Bo Li 103", "Cy", "Di"]
    assert students["Anna Ek"].remarks and not students["Anna Ek"].notes
    assert "typed into Moodle" in students["Cy"].notes[0]
    assert students["Di"].notebooks["02_four_consumers"][0].data == b"d"
    assert students["Bo Li 103"].moodle == "103"


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_canvas_download(tmp_path: Path, as_zip: bool) -> None:
    files = {
        f"ekanna_11_500_{NOTEBOOK}": b"first",
        f"ekanna_LATE_11_501_{NOTEBOOK[:-6]}-1.ipynb": b"second",
        "libo_12_502_hw.zip": zipped({NOTEBOOK: b"b"}),
        "cy_13_503_essay.pdf": b"%PDF",
        "readme.txt": b"from nobody",
    }
    path = tmp_path / "submissions"
    if as_zip:
        path = path.with_suffix(".zip")
        path.write_bytes(zipped(files))
    else:
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
    found, left_out = collect(path, CHAPTERS)
    students = {s.id: s for s in found}
    assert sorted(students) == ["cy", "ekanna", "libo"]
    assert [(f.attempt, f.late) for f in students["ekanna"].notebooks["02_four_consumers"]] == [
        (1, False),
        (2, True),
    ]
    assert students["libo"].notebooks["02_four_consumers"][0].data == b"b"
    assert "no notebook" in students["cy"].notes[0]
    assert len(left_out) == 1 and left_out[0].startswith("readme.txt")


def test_a_class_in_a_tarball_with_paths_that_leave_it(tmp_path: Path) -> None:
    path = tarball(
        tmp_path / "class.tar.gz",
        {f"class/anna/{NOTEBOOK}": b"a", "class/bert.zip": zipped({NOTEBOOK: b"b"})},
        "w:gz",
    )
    assert [s.id for s in collect(path, CHAPTERS)[0]] == ["anna", "bert"]
    evil = tarball(tmp_path / "evil.tar", {f"../anna/{NOTEBOOK}": b"a", f"/bert/{NOTEBOOK}": b"b"})
    with pytest.raises(CourseError, match="leaves the archive"):
        collect(evil, CHAPTERS)


def test_loose_files_by_pattern(tmp_path: Path) -> None:
    for name in ("anna-hw2.ipynb", "bo li-hw2.ipynb", "stray.ipynb"):
        (tmp_path / name).write_bytes(b"x")
    students, left_out = collect(tmp_path, CHAPTERS, pattern="{student}-hw*.ipynb")
    assert [s.id for s in students] == ["anna", "bo li"] and left_out[0].startswith("stray.ipynb")
    for pattern in ("hw*.ipynb", "{student}{student}", "{student}-{chapter}"):
        with pytest.raises(CourseError, match="pattern"):
            collect(tmp_path, CHAPTERS, pattern=pattern)


# -- the roster --------------------------------------------------------------------------------------------


def roster(tmp_path: Path, text: str, encoding: str = "utf-8") -> Roster:
    path = tmp_path / "roster.csv"
    path.write_bytes(text.encode(encoding))
    return read_roster(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rosters_of_every_dialect(tmp_path: Path, encoding: str, delimiter: str) -> None:
    rows = ["Student ID,First name,Surname,Email address,Section", "s1,Anna,Müller,am@x.org,A"]
    found = roster(tmp_path, "\r\n".join(rows).replace(",", delimiter), encoding)
    [person] = found.people
    assert (person.id, person.name, person.email) == ("s1", "Anna Müller", "am@x.org")
    assert found.said == [
        "roster.csv: 1 students; id from 'Student ID'; name from 'First name' + 'Surname'; "
        "e-mail from 'Email address'; not used: 'Section'"
    ]


def test_students_are_known_by_whatever_their_row_holds(tmp_path: Path) -> None:
    listed = roster(
        tmp_path,
        "ID,SIS Login ID,Student,Email\n"
        '11,aek,"Ek, Anna",anna@x.org\n12,bli,"Li, Bo",b@x.org\n'
        '13,bli2,"Li, Bo",b2@x.org\n14,cy,"Øst, Cy",\n',
    )
    folder = tmp_path / "class"
    for name in ("ekanna_11_500_x.ipynb", "aek", "Cy Øst", "Bo Li", "Eve"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix:
            path.write_bytes(b"1")
        else:
            path.mkdir()
            (path / NOTEBOOK).write_bytes(b"2")
    found, said = collect(folder, CHAPTERS, roster=listed)
    students = {s.id: s for s in found}
    assert sorted(students) == ["11", "12", "13", "14", "Bo Li", "Eve"]
    assert len(students["11"].unnamed) == 1 and len(students["11"].notebooks["02_four_consumers"]) == 1
    assert students["14"].notebooks and not students["12"].notebooks
    assert "fits several students of the roster (12, 13)" in students["Bo Li"].doubts[0]
    assert "isn't in the roster" in students["Eve"].doubts[0] and said == []


def test_numbers_decide_between_namesakes_and_never_against_a_name(tmp_path: Path) -> None:
    listed = roster(tmp_path, "id,name\n11,Anna Ek\n12,Bo Li\n13,Bo Li\n")
    assert [p.id for p in listed.match("", "13", "libo")] == ["13"]
    assert [p.id for p in listed.match("", "99", "ekanna")] == ["11"]
    assert [p.id for p in listed.match("", "12", "ekanna")] == ["11", "12"]  # a person has to look
    assert [p.id for p in listed.match("", "12", "somebody")] == ["12"]


def test_a_moodle_worksheet_is_a_roster_with_times(tmp_path: Path) -> None:
    listed = roster(
        tmp_path,
        "Identifier,Full name,Email address,Grade,Last modified (submission)\n"
        'Participant 101,Anna Ek,a@x.org,,"Monday, 30 November 2026, 11:58 PM"\n',
    )
    path = tmp_path / "download.zip"
    path.write_bytes(zipped({f"Somebody Else_101_assignsubmission_file_/{NOTEBOOK}": b"a"}))
    student = only(collect(path, CHAPTERS, roster=listed)[0])
    assert student.id == "Anna Ek" and student.moodle == "101" and student.submitted is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column called id, name or email among 'a', 'b'"),
        ("id,name\n", "no student below it"),
        ("id\n1\n1\n", "stands in 2 rows"),
        ("", "no column"),
        ("PK\x03\x04\0\0", "not a CSV"),
    ],
)
def test_a_roster_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CourseError, match=message):
        roster(tmp_path, text)


@given(st.binary(max_size=300), st.sampled_from(["a.zip", "a.tar", "a.tgz", "a.tar.xz", "a.tbz2", "a.rar"]))
def test_no_bytes_make_an_archive_crash(data: bytes, name: str) -> None:
    for head in (b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\x00"):
        try:
            for entry in archives.in_archive(io.BytesIO(head + data), name):
                assert len(entry.data) <= archives.MAX_UNPACKED
        except archives.UNPACK_ERRORS as error:
            assert "\n" not in archives.one_line(error)


def test_namesakes_in_a_moodle_worksheet(tmp_path: Path) -> None:
    """No id but Moodle's: they are called as without a roster, and each keeps their own files."""
    listed = roster(
        tmp_path,
        "Identifier,Full name,Email address\nParticipant 101,Anna Ek,a@uni.edu\n"
        "Participant 102,Bo Li,b@uni.edu\nParticipant 103,Bo Li,b2@uni.edu\n"
        "Participant 106,Bo Li,b3@uni.edu\n",
    )
    path = tmp_path / "download.zip"
    path.write_bytes(zipped(MOODLE))
    students = {s.id: s for s in collect(path, CHAPTERS, roster=listed)[0]}
    assert {"Anna Ek", "Bo Li 102", "Bo Li 103", "Bo Li 106"} <= set(students)
    assert students["Bo Li 102"].notebooks["02_four_consumers"][0].data == b"b"
    assert students["Bo Li 103"].notebooks["02_four_consumers"][0].data == b"another Bo Li"
    assert not students["Bo Li 106"].notebooks and students["Bo Li 106"].email == "b3@uni.edu"
    plain = roster(tmp_path, "name,email\nBo Li,b@uni.edu\nBo Li,b2@uni.edu\n")
    assert [person.id for person in plain.people] == ["b@uni.edu", "b2@uni.edu"]


def test_a_time_in_the_roster_that_is_none_is_said(tmp_path: Path) -> None:
    listed = roster(tmp_path, "id,submitted\nanna,gestern\nbert,-\ncleo,2026-12-01T10:00+01:00\n")
    assert (
        len(listed.said) == 2
        and "1 times of submission aren't understood, like 'gestern' of anna" in listed.said[1]
    )
    assert [bool(person.odd_time) for person in listed.people] == [True, False, False]


def test_results_of_the_grader_are_nobodys_submission(tmp_path: Path) -> None:
    for name in ("anna", "graded/feedback/anna", "graded/records"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "anna" / NOTEBOOK).write_bytes(b"a")
    (tmp_path / "graded" / "class.json").write_text("{}")
    students, left_out = collect(tmp_path, CHAPTERS, tmp_path / "elsewhere")
    assert [student.id for student in students] == ["anna"]
    assert left_out == ["graded: results of `autograder grade`, no submission"]
    with pytest.raises(CourseError, match="choose another"):
        collect(tmp_path, CHAPTERS, tmp_path)
    with pytest.raises(CourseError, match="aren't submissions"):
        collect(tmp_path / "graded", CHAPTERS, tmp_path / "elsewhere")
