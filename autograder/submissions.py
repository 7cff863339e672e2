"""Who handed in what: from folders, archives and LMS downloads to students with their notebooks.

    submissions/anna/02_four_consumers.ipynb             a folder for each student
    submissions/anna.zip, anna.tar.gz                    an archive for each student
    submissions/Anna Ek_123456_assignsubmission_file_/   Moodle
    submissions/ekanna_LATE_12345_67890_hw.ipynb         Canvas
    submissions/anna-hw2.ipynb with --pattern "{student}-hw*"
    submissions.zip                                      any of these, in one archive

The student is the outer name, or the row of the roster that it fits; nothing inside a student's own folder or
archive is believed. A notebook's chapter is recognised by its file name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from autograder import archives
from autograder.archives import (
    UNPACK_ERRORS,
    Entry,
    in_archive,
    in_folder,
    is_notebook,
    one_line,
    readable,
    suffix,
)
from autograder.course import CourseError
from autograder.roster import Person, Roster, key

#: Folders whose name begins with a dot and that are known to be no student's.
_NOBODYS = (".ipynb_checkpoints", ".git", ".vscode", ".idea", ".Trashes", ".Spotlight-V100", ".fseventsd")


@dataclass(frozen=True)
class Found:
    """One notebook file: `data` is its content, or empty with the reason why it can't be read in `fault`.

    `attempt` and `late` are an LMS's word, from the outer name `outer`; `time_from` says where `modified` is
    from.
    """

    name: str
    modified: float
    data: bytes = b""
    fault: str = ""
    time_from: str = ""
    note: str = ""
    attempt: int = 0
    late: bool = False
    outer: str = ""


@dataclass
class Student:
    """What one student handed in.

    `id` is the name in every table; `unnamed` are notebooks whose name holds no chapter's name; `notes` say
    what couldn't be read, `remarks` what is only worth knowing, `doubts` why a person should look. `moodle`
    and `canvas` are the numbers that the LMS put into the file names.
    """

    id: str
    notebooks: dict[str, list[Found]] = field(default_factory=dict)
    unnamed: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    name: str = ""
    email: str = ""
    moodle: str = ""
    canvas: str = ""
    submitted: float | None = None
    odd_time: str = ""


@dataclass(frozen=True)
class Outer:
    """What an outer name says. `file` is what the LMS put behind its own part."""

    student: str
    file: str = ""
    kind: str = ""
    moodle: str = ""
    canvas: str = ""
    attempt: int = 0
    late: bool = False


@dataclass(frozen=True)
class _Item:
    """One thing at the top of what was given: a folder or a file."""

    name: str
    files: Iterable[Entry] = ()
    file: Entry | None = None
    path: Path | None = None


def collect(
    given: Path,
    chapters: Sequence[str],
    out: Path | None = None,
    *,
    pattern: str | None = None,
    roster: Roster | None = None,
) -> tuple[list[Student], list[str]]:
    """The students of a folder or archive, by name, and a line for each thing in it that was left out.

    `out` is where the results go: it isn't a student, should it lie in the folder. `pattern` names loose
    files (`"{student}-hw*"`). With a roster all its students are there, whether anything was
    handed in or not.

    Raises CourseError where there is nothing at all to read.
    """
    matcher = _pattern(pattern) if pattern else None
    students: dict[str, Student] = {}
    left_out: list[str] = []
    for item in _items(given, out, left_out):
        outer = outer_name(item.name, matcher)
        loose = item.file is not None and not suffix(item.name)
        if item.file is not None and item.file.fault and not is_notebook(item.file.path):
            left_out.append(f"{readable(item.name)}: {item.file.fault}")
            continue
        if loose and not outer.kind:
            left_out.append(
                f"{readable(item.name)}: neither a folder nor an archive; each student needs one, or a name "
                "that --pattern describes"
            )
            continue
        name = readable(outer.student)
        identity = f"{name} {outer.moodle}{outer.canvas}".strip()
        student = students.setdefault(identity, Student(name))
        student.moodle, student.canvas = outer.moodle or student.moodle, outer.canvas or student.canvas
        _sort_in(student, item, outer, chapters)
    if not students and roster is None:
        hint = f" ({left_out[0]})" if left_out else ""
        raise CourseError(
            f"no submissions in {given}{hint}: it should hold one folder or archive per student"
        )
    everybody = _named(list(students.values()))
    for student in everybody:
        if student.remarks and not student.notes and not student.notebooks and not student.unnamed:
            student.notes, student.remarks = student.remarks, []
    if roster is not None:
        everybody = _by_roster(everybody, roster)
    return everybody, left_out


def chapter_of(filename: str, chapters: Sequence[str]) -> str | None:
    """The chapter named in a file name: 'Copy of 02_four_consumers (1).ipynb' -> '02_four_consumers'."""
    plain = re.sub(r"[^a-z0-9]+", "_", PurePosixPath(filename).stem.lower())
    return next((chapter for chapter in chapters if chapter in plain), None)


# -- outer names -------------------------------------------------------------------------------------------

_MOODLE = re.compile(
    r"(?P<name>.+?)_(?P<moodle>\d+)_assignsubmission_(?P<kind>file|onlinetext|[a-z]+)_?(?P<file>.*)",
    re.DOTALL,
)
_CANVAS = re.compile(
    r"(?P<name>[^_]+)(?P<late>_LATE)?_(?P<canvas>[1-9]\d+)_(?P<submission>[1-9]\d+)_(?P<file>.+)",
    re.DOTALL | re.IGNORECASE,
)
_ATTEMPT = re.compile(r"(?:^|[ _-])attempt[ _-]?(\d{1,4})(?!\d)", re.IGNORECASE)
#: Canvas adds -1, -2, … to a file that is handed in again.
_AGAIN = re.compile(r"-(\d{1,3})(?:\.[A-Za-z0-9.]+)?$")


def outer_name(name: str, pattern: re.Pattern[str] | None = None) -> Outer:
    """What a file's or folder's own name says; `kind` is '' where it is a plain name."""
    bare = archives.stem(name)
    if match := _MOODLE.fullmatch(name):
        who = match["name"]
        if key(who).startswith("participant") or not key(who):  # marked blindly: everybody has this name
            who = f"Participant {match['moodle']}"
        attempt = _attempt(match["file"])
        return Outer(who, match["file"], f"moodle {match['kind']}", match["moodle"], attempt=attempt)
    if match := _CANVAS.fullmatch(name):
        again = _AGAIN.search(match["file"])
        attempt = int(again[1]) + 1 if again else 1
        late = bool(match["late"])
        return Outer(match["name"], match["file"], "canvas", "", match["canvas"], attempt, late)
    if pattern is not None and (match := pattern.fullmatch(name) or pattern.fullmatch(bare)):
        groups = match.groupdict()
        attempt = int(groups.get("attempt") or 0) or _attempt(name)
        return Outer(groups["student"], name, "pattern", attempt=attempt)
    return Outer(bare or name, attempt=_attempt(name))


def _attempt(text: str) -> int:
    match = _ATTEMPT.search(text)
    return int(match[1]) if match else 0


def _pattern(text: str) -> re.Pattern[str]:
    """`{student}-hw*.ipynb`: the student's name, `{attempt}` a number, `*` anything."""
    if text.count("{student}") != 1 or re.search(r"\{(?!student\}|attempt\})", text):
        raise CourseError(
            f'pattern {text!r}: say where the name stands, once, as in "{{student}}-hw*.ipynb"; '
            "{attempt} is a number, * is anything"
        )
    parts = {"{student}": r"(?P<student>.+?)", "{attempt}": r"(?P<attempt>\d{1,4})", "*": ".*", "?": "."}
    words = re.split(r"(\{student\}|\{attempt\}|\*|\?)", text)
    try:
        return re.compile("".join(parts.get(word, re.escape(word)) for word in words), re.I | re.S)
    except re.error:
        raise CourseError(f"pattern {text!r}: {{student}} and {{attempt}} may stand in it once") from None


# -- what was given ----------------------------------------------------------------------------------------


def _items(given: Path, out: Path | None, left_out: list[str]) -> Iterator[_Item]:
    """The folders and files at the top of a folder or archive."""
    if given.is_dir():
        if is_graders(given):
            raise CourseError(f"{given} holds results of `autograder grade`, which aren't submissions")
        if out is not None and out.resolve() == given.resolve():
            raise CourseError(f"--out {given} is the folder of the submissions: choose another")
        yield from _folder_items(given, out, left_out)
    elif given.is_file():
        if not suffix(given.name):
            raise CourseError(
                f"{given} is neither a folder nor an archive: give the folder, or the LMS's zip"
            )
        yield from _archive_items(given, left_out)
    else:
        raise CourseError(f"no folder {given}: give the folder or the zip that holds everybody's submissions")


def _folder_items(given: Path, out: Path | None, left_out: list[str]) -> Iterator[_Item]:
    for entry in sorted(given.iterdir()):
        if archives.is_hidden(PurePosixPath(entry.name)):
            left_out += _hidden_folder(entry.name) if entry.is_dir() else []
            continue
        if out is not None and entry.resolve() == out.resolve():
            continue
        if entry.is_dir() and not entry.is_symlink() and is_graders(entry):
            left_out.append(f"{readable(entry.name)}: results of `autograder grade`, no submission")
            continue
        if entry.is_symlink():
            left_out.append(f"{readable(entry.name)}: a link; links aren't followed")
        elif entry.is_dir():
            yield _Item(entry.name, in_folder(entry))
        elif suffix(entry.name) and entry.is_file():
            yield _Item(entry.name, file=Entry(PurePosixPath(entry.name)), path=entry)
        else:
            yield _Item(entry.name, file=archives.read_file(entry, PurePosixPath(entry.name)))


def is_graders(folder: Path) -> bool:
    """Whether the grader wrote this folder: its results are nobody's submission."""
    return (folder / "class.json").is_file() and (folder / "records").is_dir()


def _hidden_folder(name: str) -> list[str]:
    """A line for a folder that may be a student's, whose name begins with a dot."""
    if not name.startswith(".") or name.startswith("._") or name in _NOBODYS:
        return []
    return [f"{readable(name)}: its name begins with a dot; rename it if it is a student's"]


def _archive_items(given: Path, left_out: list[str]) -> Iterator[_Item]:
    """The same of an archive of a whole class, whose outermost folder may be one around everything."""
    entries: list[Entry] = []
    hidden: set[str] = set()
    try:
        with given.open("rb") as stream:
            for entry in in_archive(stream, given.name, archives.MAX_CLASS, files=100_000):
                if archives.is_hidden(entry.path) or not entry.path.parts:
                    hidden |= set(entry.path.parts[:1]) if len(entry.path.parts) > 1 else set()
                    continue
                if entry.path.is_absolute() or ".." in entry.path.parts:
                    left_out.append(f"{readable(str(entry.path))}: a path that leaves the archive")
                    continue
                entries.append(entry)
    except UNPACK_ERRORS as error:
        if not entries:
            raise CourseError(f"{given} can't be read: {one_line(error)}") from None
        left_out.append(f"{given.name}: what follows can't be read: {one_line(error)}")
    left_out += [line for name in sorted(hidden) for line in _hidden_folder(name)]
    tops = {entry.path.parts[0] for entry in entries}
    wrapped = len(tops) == 1 and not any(len(e.path.parts) == 1 and not e.folder for e in entries)
    if wrapped and _wraps_a_class(next(iter(tops)), given, entries):
        entries = [
            replace(e, path=PurePosixPath(*e.path.parts[1:])) for e in entries if len(e.path.parts) > 1
        ]
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.path.parts[0], []).append(entry)
    for name, members in sorted(groups.items()):
        inner = [replace(m, path=PurePosixPath(*m.path.parts[1:])) for m in members if len(m.path.parts) > 1]
        if len(members) == 1 and not inner and not members[0].folder:
            yield _Item(name, file=members[0])
        else:
            yield _Item(name, [entry for entry in inner if not entry.folder])


def _wraps_a_class(top: str, given: Path, entries: Sequence[Entry]) -> bool:
    """Whether the one folder of an archive is the class, and not a student's."""
    if outer_name(top).kind:
        return False
    inside = {entry.path.parts[1] for entry in entries if len(entry.path.parts) > 1}
    known = any(outer_name(name).kind for name in inside)
    return known or key(top) == key(archives.stem(given.name)) or all(suffix(name) for name in inside)


# -- one student's files -----------------------------------------------------------------------------------


def _sort_in(student: Student, item: _Item, outer: Outer, chapters: Sequence[str]) -> None:
    if outer.kind == "moodle onlinetext":
        student.remarks.append(f"{readable(item.name)}: text typed into Moodle isn't graded; read it there")
        return
    others: list[str] = []
    read = 0
    for entry in _files(student, item, outer):
        name = readable(str(entry.path))
        if not is_notebook(entry.path):
            others.append(name)
            continue
        read += len(entry.data)
        if read > archives.MAX_UNPACKED:
            student.notes.append(f"{readable(item.name)}: {archives.too_large(read, archives.MAX_UNPACKED)}")
            break
        found = Found(
            name,
            entry.modified,
            entry.data,
            entry.fault,
            entry.time_from,
            entry.note,
            outer.attempt,
            outer.late,
            readable(item.name),
        )
        chapter = chapter_of(found.name, chapters)
        if chapter is None:
            student.unnamed.append(found)
        else:
            student.notebooks.setdefault(chapter, []).append(found)
    if others and not student.notebooks and not student.unnamed:
        student.remarks.append(f"no notebook among what was handed in: {', '.join(others[:3])}"[:200])


def _files(student: Student, item: _Item, outer: Outer) -> Iterator[Entry]:
    """The files of an item; those of an archive in it in their place."""
    if item.file is not None:
        entry = replace(item.file, path=PurePosixPath(outer.file or item.name))
        if not suffix(item.name):
            yield entry
        elif entry.fault:
            student.notes.append(f"{readable(item.name)}: {entry.fault}")
        elif item.path is not None:
            try:
                if item.path.stat().st_size > archives.MAX_ARCHIVE:
                    raise archives.Limit(archives.too_large(item.path.stat().st_size, archives.MAX_ARCHIVE))
                with item.path.open("rb") as stream:
                    yield from _unpacked(student, stream, item.name)
            except OSError as error:
                student.notes.append(f"{readable(item.name)}: can't be read: {error.strerror}")
            except archives.Limit as error:
                student.notes.append(f"{readable(item.name)}: {error}")
        else:
            yield from _unpacked(student, io.BytesIO(entry.data), item.name)
        return
    for entry in item.files:
        if entry.fault and not is_notebook(entry.path):
            student.notes.append(f"{readable(str(entry.path))}: {entry.fault}")
        elif suffix(entry.path.name) and not archives.is_hidden(entry.path):
            for inner in _unpacked(student, io.BytesIO(entry.data), str(entry.path)):
                yield replace(inner, path=entry.path / inner.path)
        else:
            yield entry


def _unpacked(student: Student, stream: io.BufferedIOBase | io.BufferedReader, name: str) -> Iterator[Entry]:
    """The files of a student's archive. An archive in it isn't opened; its faults become notes."""
    try:
        for entry in in_archive(stream, name):  # type: ignore[arg-type]
            if archives.is_hidden(entry.path) or entry.folder:
                continue
            inner = readable(str(entry.path))
            if suffix(entry.path.name):
                student.notes.append(f"{readable(name)}: {inner}: an archive in an archive isn't opened")
            elif entry.fault and not is_notebook(entry.path):
                student.notes.append(f"{readable(name)}: {inner}: {entry.fault}")
            else:
                yield entry
    except UNPACK_ERRORS as error:
        student.notes.append(f"{readable(name)}: not a readable {suffix(name)[1:]} ({one_line(error)})")


# -- who is who --------------------------------------------------------------------------------------------


def _named(students: list[Student]) -> list[Student]:
    """Two students of the same name keep apart by the LMS's number."""
    names = [student.id for student in students]
    for student in students:
        student.name = student.id
        number = student.moodle or student.canvas
        if names.count(student.id) > 1 and number:
            student.id = f"{student.id} {number}"
    return sorted(students, key=lambda student: student.id)


def _by_roster(students: list[Student], roster: Roster) -> list[Student]:
    """Students under the roster's ids; one who fits no row, or several, keeps the outer name and a doubt."""
    found: dict[str, Student] = {}
    strangers: list[Student] = []
    for student in students:
        people = roster.match(student.moodle, student.canvas, student.name, student.id)
        if len(people) == 1:
            _merge(found, people[0], student)
            continue
        if people:
            rows = ", ".join(person.id for person in people[:4])
            student.doubts.append(f"{student.id!r} fits several students of the roster ({rows})")
        else:
            student.doubts.append(f"{student.id!r} isn't in the roster")
        strangers.append(student)
    for person in roster.people:
        if person.id not in found:
            found[person.id] = Student(
                person.id,
                name=person.name,
                email=person.email,
                moodle=person.number,
                submitted=person.submitted,
            )
    for student in strangers:
        while student.id in found:
            student.id += " (not in the roster)"
        found[student.id] = student
    return sorted(found.values(), key=lambda student: student.id)


def _merge(found: dict[str, Student], person: Person, student: Student) -> None:
    """Adds what `student` handed in to the person's other submissions."""
    into = found.get(person.id)
    if into is None:
        student.id, student.name, student.email = person.id, person.name or student.name, person.email
        student.submitted, student.odd_time = person.submitted, person.odd_time
        student.moodle = student.moodle or person.number
        found[person.id] = student
        return
    for chapter, files in student.notebooks.items():
        into.notebooks.setdefault(chapter, []).extend(files)
    into.unnamed += student.unnamed
    into.notes += student.notes
    into.remarks += student.remarks
    into.moodle, into.canvas = into.moodle or student.moodle, into.canvas or student.canvas
