"""Students who mean no harm: other ways to be right, ways to be partly right, habits, slips."""

# ruff: noqa: E501 - students' lines are as long as they are

from __future__ import annotations

import nbformat

from tests.submissions.case import FULL, Hand, between, case, exactly


@case(FULL, short=True)
def right(hand: Hand) -> None:
    """The solution."""


@case(exactly(0))
def untouched(hand: Hand) -> None:
    """The release, handed in as it was."""
    hand.nb = hand.untouched()


@case(exactly(4), short=True)
def half(hand: Hand) -> None:
    """Only the first two exercises are written."""
    empty = {c.id: c.source for c in hand.untouched().cells}
    for number in ("1.3", "1.4", "1.5"):
        cell = hand.exercise(number)
        cell.source = empty[cell.id]


@case(FULL)
def executed(hand: Hand) -> None:
    """Saved with outputs and execution counts."""
    for number, cell in enumerate(c for c in hand.nb.cells if c.cell_type == "code"):
        cell.execution_count = number + 1
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="earlier\n")]


@case(FULL, short=True)
def warns(hand: Hand) -> None:
    """Warnings, logging and stderr in every cell."""
    noise = "import sys, warnings, logging; warnings.warn('careful'); print('careful', file=sys.stderr)\n"
    for cell in hand.nb.cells:
        if cell.cell_type == "code" and not cell.id.startswith("check"):
            cell.source = noise + "logging.basicConfig(level=10); logging.error('hm')\n" + cell.source


@case(FULL)
def warns_while_checked(hand: Hand) -> None:
    """The functions themselves warn and print each time they are called."""
    hand.code("1.1", """
        _b = bandwidth
        def bandwidth(*a):
            import warnings, sys
            warnings.warn('x')
            print('called', file=sys.stderr)
            return _b(*a)
        """)  # fmt: skip


@case(FULL)
def helper_cells(hand: Hand) -> None:
    """Helpers in cells of their own, before and between."""
    hand.cell("""
        def eighth(x):
            return x / 8
        """)
    hand.answer("1.1", """
        def bandwidth(bits, rate):
            return eighth(bits * rate)

        def visible(n):
            return n / 1e9, n / 1024**3
        """)  # fmt: skip
    hand.cell("note = 'done with 1.1'", after="1.1")


@case(FULL)
def lambdas(hand: Hand) -> None:
    """Functions that aren't written with def."""
    hand.answer(
        "1.1",
        """
        bandwidth = lambda bits, rate: bits * rate / 8
        visible = lambda n: (n / 10**9, n / 2**30)
        """,
    )


@case(FULL)
def callable_objects(hand: Hand) -> None:
    """An object with __call__, and a partial."""
    hand.answer("1.1", """
        import functools
        class B:
            def __call__(self, a, b):
                return a * b / 8
        bandwidth = B()
        visible = functools.partial(lambda g, n: (n / g, n / 2**30), 10**9)
        """)  # fmt: skip


@case(FULL)
def numpy_numbers(hand: Hand) -> None:
    """numpy's floats are as good as Python's."""
    hand.answer("1.1", """
        import numpy as np
        def bandwidth(b, g):
            return np.float64(b) * g / 8
        def visible(n):
            return np.array([n / 1e9, n / 2**30])
        """)  # fmt: skip


@case(FULL)
def fractions(hand: Hand) -> None:
    """Exact arithmetic."""
    hand.answer("1.1", """
        from fractions import Fraction
        def bandwidth(b, g):
            return Fraction(b) * Fraction(g) / 8
        def visible(n):
            return Fraction(n, 10**9), Fraction(n, 2**30)
        """)  # fmt: skip


@case(FULL)
def annotated(hand: Hand) -> None:
    """Types, defaults, docstrings, keyword arguments."""
    hand.answer("1.1", """
        def bandwidth(bus_bits: int, gbps_per_pin: float, *, byte: int = 8) -> float:
            '''GB/s'''
            return bus_bits * gbps_per_pin / byte

        def visible(nbytes: int = 0) -> tuple[float, float]:
            return nbytes / 10**9, nbytes / 2**30
        """)  # fmt: skip


@case(FULL)
def cached(hand: Hand) -> None:
    """A decorated function."""
    hand.code(
        "1.1",
        """
        import functools
        bandwidth = functools.lru_cache(bandwidth)
        """,
    )


@case(FULL)
def own_tests(hand: Hand) -> None:
    """Assertions of the student's own, and a failing one in a cell that isn't graded."""
    hand.code("1.1", "assert bandwidth(8, 1) == 1")
    hand.cell("assert bandwidth(8, 1) == 2, 'hm'", after="1.1")


@case(FULL)
def calls_check_again(hand: Hand) -> None:
    """Checks and progress called from a cell of the student's."""
    hand.cell(
        """
        from memlab import check, progress
        check('1.1', bandwidth, visible)
        progress()
        """,
        after="1.1",
    )


@case(FULL, short=True)
def shadowed_names(hand: Hand) -> None:
    """Variables with the names of builtins and of the course."""
    hand.cell(
        """
        list = [1]; sum = 3; type = 'x'; id = 4; lab2 = check = 5; dir = vars = str = int = 0; json = random = os = 'mine'
        """,
        after="1.1",
    )


@case(FULL)
def progress_bar(hand: Hand) -> None:
    """A bar that redraws itself on stderr, and clear_output."""
    hand.cell("""
        from tqdm.auto import tqdm
        from IPython.display import clear_output
        for _ in tqdm(range(50)):
            clear_output(wait=True); print(_)
        """)  # fmt: skip


@case(FULL)
def figures_and_widgets(hand: Hand) -> None:
    """Plots, a table, a slider."""
    hand.cell("""
        import matplotlib.pyplot as plt
        plt.plot([1, 2]); plt.show()
        import ipywidgets
        display(ipywidgets.IntSlider())
        from IPython.display import HTML, Markdown
        display(HTML('<b>x</b>'), Markdown('*y*'))
        """)  # fmt: skip


@case(FULL)
def magics(hand: Hand) -> None:
    """Line and cell magics, shell escapes."""
    hand.cell(
        """
        %matplotlib inline
        %config InlineBackend.figure_format = 'retina'
        %time x = 1
        !echo hello
        files = !ls
        %pwd
        """
    )
    hand.cell(
        """
        %%time
        sum(range(10))
        """,
        after="1.1",
    )
    hand.cell(
        """
        %%bash
        echo from bash
        """,
        after="1.1",
    )


@case(FULL)
def timed_exercise(hand: Hand) -> None:
    """A cell magic above an answer."""
    hand.first("1.1", "%%time")


@case(FULL)
def autoreload(hand: Hand) -> None:
    """The extension that half of the world begins with."""
    hand.cell("""
        %load_ext autoreload
        %autoreload 2
        """)


@case(FULL)
def shows_everything(hand: Hand) -> None:
    """IPython set to show every expression."""
    hand.cell("""
        from IPython.core.interactiveshell import InteractiveShell
        InteractiveShell.ast_node_interactivity = 'all'
        """)  # fmt: skip


@case(FULL)
def own_module(hand: Hand) -> None:
    """A helper written to a file and imported."""
    hand.cell("""
        %%writefile helper.py
        def eighth(x):
            return x / 8
        """)
    hand.first("1.1", "from helper import eighth")
    hand.code(
        "1.1",
        """
        def bandwidth(b, g):
            return eighth(b * g)
        """,
    )


@case(FULL)
def files_threads_processes(hand: Hand) -> None:
    """Temporary files, a thread, a pool, a subprocess: all end."""
    hand.cell("""
        import tempfile, threading, subprocess, sys, multiprocessing as mp
        with tempfile.TemporaryFile() as f: f.write(b'x')
        open('notes.txt', 'w').write('x')
        t = threading.Thread(target=print); t.start(); t.join()
        print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout)
        with mp.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))
        """)  # fmt: skip


@case(FULL)
def await_at_top(hand: Hand) -> None:
    """Top-level await."""
    hand.cell("""
        import asyncio
        await asyncio.sleep(0.01)
        async def f(): return 1
        await f()
        """)


@case(FULL)
def seeds_and_options(hand: Hand) -> None:
    """Global settings that people make."""
    hand.cell("""
        import random, numpy as np, torch, warnings, gc, sys
        random.seed(1); np.random.seed(1)
        torch.manual_seed(1); torch.set_num_threads(1); torch.set_printoptions(precision=3)
        np.set_printoptions(precision=2); warnings.filterwarnings('ignore'); gc.collect()
        sys.setrecursionlimit(5000)
        """)  # fmt: skip


@case(FULL)
def asks_for_input(hand: Hand) -> None:
    """input() in a cell that isn't graded."""
    hand.cell("name = input('who are you? ')", after="1.2")


@case(FULL)
def pip_and_missing_packages(hand: Hand) -> None:
    """Installs and imports that fail."""
    hand.cell("%pip install --quiet --retries 0 --timeout 1 not-a-package-of-this-course")
    hand.cell("import a_package_that_nobody_has")


@case(FULL)
def other_script(hand: Hand) -> None:
    """Comments, names and prints in other scripts."""
    hand.code(
        "1.1",
        r"""
        # 显存带宽 — ширина шины × скорость ☃
        π = 3.14159
        память = '显存'
        print(память, '\N{SNOWMAN}')
        """,
    )


@case(FULL)
def other_line_ends(hand: Hand) -> None:
    """Carriage returns in every source."""
    for cell in hand.nb.cells:
        cell.source = cell.source.replace("\n", "\r\n")


@case(FULL)
def tabs(hand: Hand) -> None:
    """Tabs for indentation."""
    for number in ("1.1", "1.2", "1.3", "1.4"):
        cell = hand.exercise(number)
        cell.source = cell.source.replace("    ", "\t")


@case(FULL)
def edits_prose(hand: Hand) -> None:
    """Notes in the margin: changed texts, a comment in a check."""
    hand.cell("my notes: *bus times rate*", after="1.1", kind="markdown")
    hand.check("1.1").source += "  # this works!"


@case(FULL)
def other_words(hand: Hand) -> None:
    """The meter written in another way: a dict, closures with numbers."""
    cell = hand.exercise("1.5")
    cell.source = cell.source.replace("self.known = set()", "self.known = {}").replace(
        "self.known.add(key)", "self.known[key] = nbytes"
    ).replace("self.known.discard(key)", "self.known.pop(key, None)")  # fmt: skip


@case(exactly(9))
def one_stub_left(hand: Hand) -> None:
    """One exercise isn't written."""
    hand.answer("1.3", 'raise NotImplementedError("exercise 1.3")')


@case(exactly(8), short=True)
def syntax_error(hand: Hand) -> None:
    """One cell can't be parsed; no person is needed for that."""
    hand.answer(
        "1.2",
        """
        def transfer_time(nbytes, link)
            return 1
        """,
    )


@case(exactly(8))
def raises(hand: Hand) -> None:
    """An answer that stops with an error."""
    hand.answer(
        "1.2",
        """
        def transfer_time(nbytes, link):
            return nbytes / 0
        def path(a, b, links):
            return links[99]
        """,
    )


@case(exactly(8))
def recursion(hand: Hand) -> None:
    """An answer that calls itself for ever."""
    hand.answer(
        "1.4",
        """
        def bytes_in_flight(*a):
            return bytes_in_flight(*a)
        threads_per_sm = bytes_in_flight
        """,
    )


@case(between(8, 9.5))
def wrong_unit(hand: Hand) -> None:
    """A slip: GiB for GB."""
    cell = hand.exercise("1.1")
    cell.source = cell.source.replace("nbytes / 10**9", "nbytes / 2**30")


@case(between(8, 9.5))
def rounded(hand: Hand) -> None:
    """A slip: rounded down."""
    cell = hand.exercise("1.4")
    cell.source = cell.source.replace("math.ceil(", "int(")


@case(between(7, 9.5))
def leaks(hand: Hand) -> None:
    """A meter that keeps what it counts."""
    cell = hand.exercise("1.5")
    cell.source = cell.source.replace(
        "self.known.add(key)", "self.known.add(key); self.kept = (getattr(self, 'kept', ()), result)"
    )


@case(exactly(8))
def text_for_numbers(hand: Hand) -> None:
    """Answers that look right when printed."""
    hand.answer(
        "1.1",
        """
        def bandwidth(b, g):
            return f'{b * g / 8}'
        def visible(n):
            return f'{n / 1e9}, {n / 2**30}'
        """,
    )


@case(exactly(8))
def deleted_functions(hand: Hand) -> None:
    """A cell that takes back what an exercise defined."""
    hand.code("1.2", "del transfer_time, path")


@case(exactly(8))
def merge_conflict_in_a_cell(hand: Hand) -> None:
    """Two friends and git."""
    hand.first(
        "1.1",
        """
        <<<<<<< HEAD
        x = 1
        =======
        x = 2
        >>>>>>> friend
        """,
    )


@case(FULL)
def interrupted_himself(hand: Hand) -> None:
    """KeyboardInterrupt and SystemExit in cells that aren't graded."""
    hand.cell("raise KeyboardInterrupt", after="1.1")
    hand.cell("import sys; sys.exit(1)", after="1.2")


@case(FULL)
def star_imports(hand: Hand) -> None:
    """`from math import *` and friends."""
    hand.cell(
        """
        from math import *
        from os.path import *
        from memlab.units import *
        """,
        after="1.2",
    )


@case(FULL)
def reloads(hand: Hand) -> None:
    """importlib.reload of a module of the student's and of a standard one."""
    hand.cell(
        """
        import importlib, textwrap, string
        importlib.reload(textwrap); importlib.reload(string)
        """,
        after="1.1",
    )


@case(FULL)
def looks_around(hand: Hand) -> None:
    """Help, inspect, dir: how people learn."""
    hand.cell("""
        import inspect, memlab
        help(memlab.check)
        print(inspect.signature(memlab.footprint.footprint))
        memlab.Meter?
        print(inspect.getsource(memlab.units)[:50])
        """, after="1.1")  # fmt: skip
