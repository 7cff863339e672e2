"""What Colab, JupyterLab and learning management systems make of a submission: names, archives, copies."""

from __future__ import annotations

import io
import json
import zipfile

import nbformat

from tests.submissions.case import (
    CHAPTER,
    FAILED,
    FULL,
    GRADED,
    MISSING,
    REVIEW,
    Hand,
    between,
    case,
    exactly,
    no_points,
    tarball,
    zipped,
)  # fmt: skip

FILE = f"{CHAPTER}.ipynb"


# -- Colab -------------------------------------------------------------------------------------------------


def _colab(hand: Hand, *, keeps_nbgrader: bool) -> None:
    plain = json.loads(nbformat.writes(hand.nb))
    plain["nbformat_minor"] = 0
    plain["metadata"] = {
        "colab": {"provenance": [], "toc_visible": True},
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python"},
        "accelerator": "GPU",
    }
    for number, cell in enumerate(plain["cells"]):
        metadata = {"id": f"Xy{number}kQ", "colab": {"base_uri": "https://localhost:8080/"}}
        if keeps_nbgrader:
            metadata |= cell["metadata"]
        cell["metadata"] = metadata
        del cell["id"]
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
    hand.give(json.dumps(plain, indent=0))


@case(FULL, short=True)
def colab(hand: Hand) -> None:
    """Saved by Colab: format 4.0, its own ids, no metadata of nbgrader."""
    _colab(hand, keeps_nbgrader=False)


@case(FULL)
def colab_with_metadata(hand: Hand) -> None:
    """Saved by Colab with nbgrader's metadata kept."""
    _colab(hand, keeps_nbgrader=True)


@case(FULL)
def colab_form(hand: Hand) -> None:
    """Colab's form fields and widgets' state."""
    hand.cell("""
        #@title Run me { display-mode: "form" }
        x = 3 #@param {type:'slider', min:0, max:9}
        """)
    hand.nb.metadata["widgets"] = {
        "application/vnd.jupyter.widget-state+json": {"state": {"a": {"x": "y" * 10_000}}}
    }
    _colab(hand, keeps_nbgrader=False)


@case(FULL)
def colab_drive(hand: Hand) -> None:
    """Mounts Google Drive, which isn't there."""
    hand.cell("""
        from google.colab import drive
        drive.mount('/content/drive')
        """)
    hand.cell("%cd /content/drive/MyDrive")


@case(FULL)
def colab_gpu(hand: Hand) -> None:
    """Asks for the GPU that Colab gave."""
    hand.cell("""
        import torch
        print(torch.cuda.get_device_name(0))
        x = torch.ones(1).cuda()
        """)
    hand.cell("!nvidia-smi")


@case(FULL)
def colab_copy(hand: Hand) -> None:
    """Colab's name of a copy."""
    hand.give(name=f"Copy of {FILE}")


@case(FULL)
def colab_copy_of_copy(hand: Hand) -> None:
    """And of a copy of a copy, downloaded twice."""
    hand.give(name=f"Copy of Copy of {CHAPTER} (2).ipynb")


# -- names of files ----------------------------------------------------------------------------------------


@case(FULL)
def browser_copy(hand: Hand) -> None:
    """A second download of the browser."""
    hand.give(name=f"{CHAPTER} (1).ipynb")


@case(FULL)
def jupyter_copy(hand: Hand) -> None:
    """JupyterLab's duplicate."""
    hand.give(name=f"{CHAPTER}-Copy1.ipynb")


@case(FULL)
def own_name(hand: Hand) -> None:
    """The student's name added to the file's."""
    hand.give(name=f"{CHAPTER}_Ada_Lovelace_FINAL.ipynb")


@case(FULL)
def homework(hand: Hand) -> None:
    """A name that doesn't say which chapter it is."""
    hand.give(name="homework.ipynb")


@case(FULL)
def capitals(hand: Hand) -> None:
    """Capitals, blanks and hyphens."""
    hand.give(name="01 Memory-Basics.IPYNB")


@case(FULL)
def deeper(hand: Hand) -> None:
    """Folders in folders."""
    hand.give(name=f"course/week 1/notebooks/{FILE}")


@case(between(0, 10, GRADED, FAILED))
def json_suffix(hand: Hand) -> None:
    """`.ipynb.json`, as some browsers save it: read, or said to be missing, never 0 points."""
    hand.give(name=f"{FILE}.json")
    hand.give(b"see the other file", name="readme.txt")


@case(no_points(MISSING, FAILED))
def checkpoint_only(hand: Hand) -> None:
    """Only Jupyter's checkpoint."""
    hand.give(name=f".ipynb_checkpoints/{CHAPTER}-checkpoint.ipynb")


@case(FULL)
def checkpoint_too(hand: Hand) -> None:
    """A checkpoint beside the notebook, newer and empty."""
    hand.give(modified=1_777_000_000)
    hand.give(hand.untouched(), name=f".ipynb_checkpoints/{CHAPTER}-checkpoint.ipynb", modified=1_777_900_000)


@case(exactly(0))
def older_and_newer(hand: Hand) -> None:
    """Two versions: the latest counts, though it is worse."""
    hand.give(modified=1_777_000_000)
    hand.give(hand.untouched(), name=f"{CHAPTER} (1).ipynb", modified=1_777_900_000)


@case(FULL)
def same_age(hand: Hand) -> None:
    """The release and the answer, downloaded in the same second."""
    hand.give(hand.untouched(), modified=1_777_000_000)
    hand.give(name=f"{CHAPTER} (1).ipynb", modified=1_777_000_000)


@case(FULL)
def broken_and_whole(hand: Hand) -> None:
    """The newer of two files can't be read."""
    hand.give(modified=1_777_000_000)
    hand.give(b'{"cells": [', name=f"{CHAPTER} (1).ipynb", modified=1_777_900_000)


@case(FULL)
def everything_else_too(hand: Hand) -> None:
    """The whole folder of the course, with other chapters and a virtual environment."""
    hand.give()
    hand.give(hand.untouched(), name="02_four_consumers.ipynb")
    for number in range(300):
        hand.give(b"x", name=f".venv/lib/file{number}.py")
    hand.give(b"# notes", name="README.md")


@case(no_points(FAILED, MISSING))
def pdf_only(hand: Hand) -> None:
    """The notebook printed."""
    hand.give(b"%PDF-1.7\n", name=f"{CHAPTER}.pdf")


@case(no_points(FAILED, MISSING))
def script_only(hand: Hand) -> None:
    """Exported as Python."""
    code = "\n".join(c.source for c in hand.nb.cells if c.cell_type == "code")
    hand.give(code, name=f"{CHAPTER}.py")


@case(no_points(MISSING), short=True)
def nothing(hand: Hand) -> None:
    """An empty folder."""
    hand.handed_in = bool(hand.own)


@case(no_points())
def folder_for_a_file(hand: Hand) -> None:
    """A folder with the notebook's name."""
    (hand.own / FILE).mkdir()
    hand.handed_in = True


@case(FULL)
def old_dates(hand: Hand) -> None:
    """A file of 1970."""
    hand.give(modified=0)


@case(FULL)
def future_dates(hand: Hand) -> None:
    """A file of 2096."""
    hand.give(modified=4e9)


# -- archives ----------------------------------------------------------------------------------------------


@case(FULL, short=True)
def zip_file(hand: Hand) -> None:
    """One zip."""
    hand.beside(f"{hand.name}.zip", zipped({f"homework/{FILE}": hand.nb}))


@case(FULL)
def zip_in_a_folder(hand: Hand) -> None:
    """A zip in the student's folder, as Moodle's "in folders" has it."""
    hand.give(zipped({FILE: hand.nb}), name="upload.zip")


@case(FULL)
def tar_gz(hand: Hand) -> None:
    """A tarball."""
    hand.beside(f"{hand.name}.tar.gz", tarball({f"x/{FILE}": hand.nb}))


@case(FULL)
def tar_xz(hand: Hand) -> None:
    """Another compression."""
    hand.beside(f"{hand.name}.tar.xz", tarball({FILE: hand.nb}, "w:xz"))


@case(FULL)
def tar_called_zip(hand: Hand) -> None:
    """A tarball renamed to .zip, since the LMS accepts only zips."""
    hand.beside(f"{hand.name}.zip", tarball({FILE: hand.nb}))


@case(FULL)
def zip_of_a_mac(hand: Hand) -> None:
    """Resource forks beside every file."""
    hand.beside(
        f"{hand.name}.zip", zipped({FILE: hand.nb, f"__MACOSX/._{FILE}": b"\x00\x05", ".DS_Store": b"\x00"})
    )


@case(FULL)
def zip_of_windows(hand: Hand) -> None:
    """Backslashes in paths."""
    hand.beside(f"{hand.name}.zip", zipped({f"work\\week 1\\{FILE}": hand.nb}))


@case(FULL)
def zip_with_umlauts(hand: Hand) -> None:
    """Names in other scripts."""
    hand.beside(f"{hand.name}.zip", zipped({f"Übung/作业/{FILE}": hand.nb}))


@case(FULL)
def zip_of_somebody_else(hand: Hand) -> None:
    """A path in the archive that names another student: the outer name counts."""
    hand.beside(f"{hand.name}.zip", zipped({f"right/{FILE}": hand.nb, "student.txt": b"right"}))


@case(no_points(), short=True)
def zip_damaged(hand: Hand) -> None:
    """Not a zip, though it begins like one."""
    hand.beside(f"{hand.name}.zip", b"PK\x03\x04 and then nothing")


@case(no_points())
def zip_cut_off(hand: Hand) -> None:
    """An upload that broke off."""
    content = zipped({FILE: hand.nb})
    hand.beside(f"{hand.name}.zip", content[: len(content) // 2])


@case(no_points(FAILED, MISSING))
def zip_empty(hand: Hand) -> None:
    """A zip with nothing in it."""
    hand.beside(f"{hand.name}.zip", zipped({}))


@case(no_points())
def zip_of_no_bytes(hand: Hand) -> None:
    """A zip of 0 bytes."""
    hand.beside(f"{hand.name}.zip", b"")


@case(no_points())
def zip_encrypted(hand: Hand) -> None:
    """A zip with a password."""
    content = bytearray(zipped({FILE: hand.nb}))
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = content.find(mark)
        content[start + at] |= 1
    hand.beside(f"{hand.name}.zip", bytes(content))


@case(no_points(FAILED, MISSING))
def rar(hand: Hand) -> None:
    """An archive of a kind that isn't read: said, not guessed."""
    hand.give(b"Rar!\x1a\x07\x01\x00" + bytes(100), name="homework.rar")


@case(FULL)
def two_in_a_zip(hand: Hand) -> None:
    """The same name twice in one zip: the last is the one that an unpacking leaves."""
    hand.beside(f"{hand.name}.zip", zipped([(FILE, hand.nb), (FILE, hand.nb)]))


# -- LMS naming --------------------------------------------------------------------------------------------


@case(FULL)
def moodle(hand: Hand) -> None:
    """Moodle's folder per student."""
    hand.called("Moo Dell", "Moo Dell_4711_assignsubmission_file_", "Moo Dell_4711_assignsubmission_file")
    hand.name = "Moo Dell_4711_assignsubmission_file_"
    hand.give()


@case(FULL)
def moodle_loose(hand: Hand) -> None:
    """Moodle's download without folders."""
    hand.called("Loo Smith")
    hand.beside(f"Loo Smith_4712_assignsubmission_file_{FILE}", nbformat.writes(hand.nb).encode())


@case(FULL)
def canvas(hand: Hand) -> None:
    """Canvas puts everybody's files into one folder."""
    hand.called("vascan")
    hand.beside(f"vascan_90125_5150_{FILE}", nbformat.writes(hand.nb).encode())


@case(FULL)
def canvas_late_again(hand: Hand) -> None:
    """Canvas's mark of a late one, handed in again."""
    hand.called("latecanvas")
    hand.beside(f"latecanvas_LATE_90126_5151_{CHAPTER}-1.ipynb", nbformat.writes(hand.nb).encode())


@case(FULL)
def other_alphabet(hand: Hand) -> None:
    """A student whose name has no Latin letter."""
    hand.called("Жанна 李")
    hand.name = "Жанна 李"
    hand.give()


@case(FULL)
def apostrophe(hand: Hand) -> None:
    """Blanks, apostrophes, commas."""
    hand.called("O'Hara, Tara-Ann (jr.)")
    hand.name = "O'Hara, Tara-Ann (jr.)"
    hand.give()


@case(FULL)
def nearly_the_same_name(hand: Hand) -> None:
    """Two students whose names become one in a URL: neither may get the other's grade."""
    hand.called("a b")
    hand.name = "a b"
    hand.give()
    other = hand.folder / "a_b"
    other.mkdir()
    (other / FILE).write_text(nbformat.writes(hand.untouched()), "utf-8")


@case(between(0, 10, GRADED, REVIEW, FAILED))
def long_name(hand: Hand) -> None:
    """A folder name as long as a file system allows."""
    hand.name = "x" * 240
    hand.called("x" * 240, "x" * 200)
    hand.give()


def bomb(size: int) -> bytes:
    """A zip with one member of `size` zero bytes."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open(FILE, "w", force_zip64=True) as member,
    ):
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return stream.getvalue()
