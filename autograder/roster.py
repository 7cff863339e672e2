"""The instructor's list of students: who a submission belongs to, and who handed nothing in.

A roster is a CSV file, as Canvas and Moodle export it or written by hand. Its columns are recognised by their
names; which were taken for what is said aloud. A submission is matched by anything that the row holds: id,
login, e-mail, name in either order. What fits two rows, or none, is never guessed.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from autograder.archives import readable
from autograder.course import CourseError

#: What a column is called, in small letters and digits alone. The first of several is the id in every table.
_IDS = (
    "id", "studentid", "studentnumber", "studentno", "matriculation", "matriculationnumber", "matrikelnummer",
    "idnumber", "sisuserid", "sisloginid", "userid", "username", "login", "loginid", "user", "netid",
    "orgdefinedid", "externalid",
)  # fmt: skip
_NAMES = ("name", "student", "fullname", "studentname", "displayname", "sortablename",
          "vollstandigername")  # fmt: skip
_FIRST, _LAST = (
    ("firstname", "givenname", "forename", "vorname"),
    ("lastname", "surname", "familyname", "nachname"),
)
_MAILS = ("email", "emailaddress", "mail", "emailadresse")
_MOODLE = ("identifier",)
_TIMES = ("lastmodifiedsubmission", "submitted", "submittedat", "submissiontime", "submittedon",
          "zuletztgeandertabgabe")  # fmt: skip


@dataclass
class Person:
    """One row. `id` is the name in every table; `keys` are all texts by which a submission may call it."""

    id: str
    name: str = ""
    email: str = ""
    keys: set[str] = field(default_factory=set)
    submitted: float | None = None
    moodle: str = ""
    #: What stands as time of submission and isn't understood.
    odd_time: str = ""

    @property
    def number(self) -> str:
        """Moodle's number in 'Participant 123456'; '' where there is none."""
        match = re.search(r"\d+$", self.moodle)
        return match[0] if match else ""


@dataclass
class Roster:
    """All rows, and what was made of the columns, in one line."""

    people: list[Person]
    said: list[str]

    def match(self, moodle: str, canvas: str, *names: str) -> list[Person]:
        """The people that a submission can be of, by the LMS's number and by names.

        Moodle's number is unmistakable. Canvas's may be another student's number elsewhere: it decides
        between namesakes, and against a name it leaves both in question.
        """
        if moodle and (found := [person for person in self.people if person.number == moodle]):
            return found
        by_name = self.find(*filter(None, names))
        by_number = self.find(canvas) if canvas else []
        both = [person for person in by_name if person in by_number]
        return both or by_name + [person for person in by_number if person not in by_name]

    def find(self, *names: str) -> list[Person]:
        """The people that the first telling one of these names fits: one, none, or several."""
        for name in names:
            keys = {key(name), *_name_keys(name)} - {""}
            found = [person for person in self.people if keys & person.keys]
            if found:
                return found
        return []


def key(text: str) -> str:
    """Small letters and digits alone, without accents: 'Müller, Anna' -> 'mulleranna'."""
    plain = unicodedata.normalize("NFKD", text.casefold().replace("ø", "o").replace("ł", "l"))
    return "".join(c for c in plain if c.isalnum() and not unicodedata.combining(c))


def _name_keys(name: str) -> set[str]:
    """Both orders of a name's first and last part."""
    if "," in name:
        last, _, first = name.partition(",")
        return {key(first + last), key(last + first)}
    words = name.split()
    return {key(name), *(key("".join(words[n:] + words[:n])) for n in range(1, len(words)))}


def read_roster(path: Path) -> Roster:
    """Raises CourseError where there is no such file or no column that says who is who."""
    rows, names = read_table(path)
    kinds, unused = _kinds(names)
    if not any(kinds[kind] for kind in ("id", "name", "last", "email", "moodle")):
        shown = ", ".join(map(repr, names[:8])) or "none"
        raise CourseError(
            f"{path}: no column called id, name or email among {shown}: name them in its first line"
        )
    people = [person for row in rows if (person := _person(row, kinds)) is not None]
    if not people:
        raise CourseError(f"{path}: a first line with names of columns, and no student below it")
    _tell_apart(people)
    times = Counter(person.id for person in people)
    for name, number in times.most_common(1):
        if number > 1:
            raise CourseError(f"{path}: {name!r} stands in {number} rows; the id of a student is unique")
    said = [_said(path, kinds, unused, len(people))]
    odd = [person for person in people if person.odd_time]
    if odd:
        said.append(
            f"{path.name}: {len(odd)} times of submission aren't understood, "
            f"like {odd[0].odd_time[:40]!r} of {odd[0].id}; write them like 2026-12-01T23:59+01:00"
        )
    return Roster(people, said)


def _tell_apart(people: Sequence[Person]) -> None:
    """Namesakes without an id get Moodle's number behind their name, as without a roster, else e-mails."""
    times = Counter(person.id for person in people)
    for person in people:
        if times[person.id] > 1 and person.id == person.name:
            person.id = f"{person.name} {person.number}" if person.number else person.email or person.id
            person.keys.add(key(person.id))


def people_of(rows: Sequence[dict[str, str]], names: Sequence[str]) -> list[Person | None]:
    """Who each row of a table is; None for rows that are nobody's."""
    kinds, _ = _kinds(names)
    return [_person(row, kinds) for row in rows]


def _kinds(names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """What the columns are, and those that are nothing known."""
    kinds: dict[str, list[str]] = defaultdict(list)
    unused = []
    for column in names:
        plain = key(column)
        for kind, known in (
            ("id", _IDS), ("name", _NAMES), ("first", _FIRST), ("last", _LAST), ("email", _MAILS),
            ("moodle", _MOODLE), ("time", _TIMES),
        ):  # fmt: skip
            if plain in known:
                kinds[kind].append(column)
                break
        else:
            unused.append(column)
    kinds["id"].sort(key=lambda column: _IDS.index(key(column)))
    return kinds, unused


def read_table(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a CSV file of any dialect and encoding that spreadsheets write, and its columns."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CourseError(f"can't read {path}: {error.strerror}") from None
    text = decode(data)
    if "\0" in text:
        raise CourseError(f"{path}: not a CSV file: in the spreadsheet, save it as CSV")
    first = text.lstrip("\r\n").splitlines()[0] if text.strip() else ""
    delimiter = max(",;\t", key=first.count)
    csv.field_size_limit(1_000_000)
    try:
        reader = csv.DictReader(io.StringIO(text.lstrip("\r\n"), newline=""), delimiter=delimiter)
        names = [name for name in reader.fieldnames or [] if name and name.strip()]
        rows = [{k: (v or "") for k, v in row.items() if k in names} for row in reader]
    except csv.Error as error:
        raise CourseError(f"{path}: not a CSV file ({error})") from None
    return rows, names


def decode(data: bytes) -> str:
    """UTF-8 with or without its mark, UTF-16, else Latin-1, in which every byte is a letter."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


_PARTICIPANT = re.compile(r"(?:participant|teilnehmer)\D*\d+", re.IGNORECASE)


def _person(row: dict[str, str], kinds: dict[str, list[str]]) -> Person | None:
    def first(kind: str) -> str:
        return next((readable(row[c]) for c in kinds[kind] if row[c].strip()), "")

    name = first("name") or " ".join(filter(None, (first("first"), first("last"))))
    email, moodle, id_ = first("email"), first("moodle"), first("id")
    if not moodle and _PARTICIPANT.fullmatch(id_):  # Moodle's identifier, which other languages call 'ID'
        moodle, id_ = id_, ""
    id_ = id_ or name or email or moodle
    # Canvas puts a line of possible points below the header, and a test student at the end
    if not id_ or key(name) in ("pointspossible", "studenttest"):
        return None
    person = Person(id_, name, email)
    person.keys = {key(row[c]) for kind in ("id", "name", "email", "moodle") for c in kinds[kind]}
    person.keys |= _name_keys(name) | {key(email.partition("@")[0])}
    person.keys -= {""}
    person.moodle = moodle
    time = first("time")
    person.submitted = moment(time) if time else None
    if person.submitted is None and key(time) and re.search(r"[^\W_]", time):
        person.odd_time = time
    return person


def _said(path: Path, kinds: dict[str, list[str]], unused: list[str], people: int) -> str:
    names = kinds["name"] or kinds["first"] + kinds["last"]
    parts = [f"{path.name}: {people} students"]
    if kinds["id"]:
        parts.append(f"id from {kinds['id'][0]!r}")
    if len(kinds["id"]) > 1:
        parts.append("also known by " + ", ".join(map(repr, kinds["id"][1:])))
    if names:
        parts.append("name from " + " + ".join(map(repr, names)))
    if kinds["email"]:
        parts.append(f"e-mail from {kinds['email'][0]!r}")
    if kinds["time"]:
        parts.append(f"time of submission from {kinds['time'][0]!r}")
    if unused:
        parts.append("not used: " + ", ".join(map(repr, unused[:6])) + (", …" if len(unused) > 6 else ""))
    return "; ".join(parts)


_MOODLE_TIME = re.compile(r"(\d{1,2})\.? (\w+) (\d{4}), (\d{1,2}):(\d\d)(?:\s*([AP]M))?", re.IGNORECASE)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_GERMAN = {"mär": "mar", "mai": "may", "okt": "oct", "dez": "dec"}


def moment(text: str) -> float | None:
    """Seconds since 1970 of an ISO time, or of Moodle's 'Monday, 30 November 2026, 11:58 PM'; else None.

    A time without zone is taken in this machine's.
    """
    text = text.strip()
    try:
        at = datetime.fromisoformat(text)
        return at.timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    match = _MOODLE_TIME.search(text)
    if not match:
        return None
    day, month, year, hour, minute, half = match.groups()
    month = _GERMAN.get(month[:3].lower(), month[:3].lower())
    if month not in _MONTHS:
        return None
    number = int(hour) % 12 + 12 * (half.upper() == "PM") if half else int(hour)
    try:
        return datetime(int(year), _MONTHS.index(month) + 1, int(day), number, int(minute)).timestamp()
    except (ValueError, OverflowError):
        return None


def shown(at: float) -> str:
    """A moment in UTC, as tables show it."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
