"""Code that takes time, memory, processes, disk or output without end, by accident or not.

The one exercise loses its points (8 of 10 are left), or the machine stops and says so; the rest is graded.
"""

# ruff: noqa: E501 - students' lines are as long as they are

from __future__ import annotations

from tests.submissions.case import FULL, GRADED, REVIEW, TAMPERED, Hand, between, case, exactly

#: Exercise 1.2 is lost, the others are graded.
LOST = between(8, 8, GRADED, REVIEW)
#: Nothing is lost: the code isn't part of an answer.
HARMLESS = between(10, 10, GRADED, REVIEW)
SOME = between(0, 10, GRADED, REVIEW)


@case(LOST, slow=True)
def endless_loop(hand: Hand) -> None:
    """`while True` in a cell."""
    hand.first(
        "1.2",
        """
        while True:
            pass
        """,
    )


@case(LOST, slow=True)
def endless_while_checked(hand: Hand) -> None:
    """An answer that never returns."""
    hand.answer(
        "1.2",
        """
        def transfer_time(*a):
            while True: pass
        def path(*a): return None
        """,
    )


@case(LOST, slow=True)
def endless_in_c(hand: Hand) -> None:
    """A loop in C, that Python can't interrupt."""
    hand.code("1.2", "sum(iter(int, 1))")


@case(LOST, slow=True)
def deaf(hand: Hand) -> None:
    """A loop that catches every interrupt."""
    hand.first(
        "1.2",
        """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
    )


@case(LOST, slow=True)
def sleeps(hand: Hand) -> None:
    """A sleep of a day."""
    hand.first("1.2", "import time; time.sleep(86_400)")


@case(LOST, slow=True)
def catastrophic_pattern(hand: Hand) -> None:
    """A regular expression that backtracks for years."""
    hand.first("1.2", "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')")


@case(LOST)
def huge_power(hand: Hand) -> None:
    """A number with too many digits: memory or time runs out."""
    hand.first("1.2", "x = 9 ** 9 ** 9 if False else bytes(1 << 40)")


@case(HARMLESS, slow=True)
def endless_print_in_thread(hand: Hand) -> None:
    """A thread that prints for ever."""
    hand.cell("""
        import threading, time
        def noise():
            while True:
                print('noise'); time.sleep(0.05)
        threading.Thread(target=noise, daemon=True).start()
        """)  # fmt: skip


@case(HARMLESS)
def thread_that_never_ends(hand: Hand) -> None:
    """A thread that isn't a daemon, and handlers at exit that hang."""
    hand.cell("""
        import threading, time, atexit
        threading.Thread(target=time.sleep, args=(9999,)).start()
        atexit.register(time.sleep, 9999)
        """)  # fmt: skip


@case(exactly(8, GRADED, REVIEW), short=True)
def memory_at_once(hand: Hand) -> None:
    """30 GB in one go: MemoryError."""
    hand.answer(
        "1.2",
        """
        def transfer_time(*a):
            return bytearray(30 * 10**9)
        def path(*a): return bytearray(30 * 10**9)
        """,
    )


@case(LOST)
def memory_bit_by_bit(hand: Hand) -> None:
    """A list that grows until the machine stops it."""
    hand.code(
        "1.2",
        """
        kept = []
        while True:
            kept.append(bytearray(b'x') * 50_000_000)
        """,
    )


@case(LOST)
def memory_in_children(hand: Hand) -> None:
    """Many processes, none of them too large."""
    hand.code("1.2", """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                x = bytearray(b'x') * 500_000_000; time.sleep(30); os._exit(0)
        time.sleep(40)
        """)  # fmt: skip


@case(HARMLESS)
def memory_of_tensors(hand: Hand) -> None:
    """A tensor that doesn't fit, in a cell that isn't graded."""
    hand.cell(
        """
        import torch
        x = torch.ones(10**11)
        """,
        after="1.1",
    )


@case(LOST, short=True)
def os_exit(hand: Hand) -> None:
    """The process ends itself."""
    hand.code("1.2", "import os; os._exit(0)")


@case(LOST)
def exit_builtin(hand: Hand) -> None:
    """exit()."""
    hand.code("1.2", "exit()")


@case(LOST)
def kills_itself(hand: Hand) -> None:
    """SIGKILL to itself."""
    hand.code("1.2", "import os; os.kill(os.getpid(), 9)")


@case(LOST)
def stops_itself(hand: Hand) -> None:
    """SIGSTOP to itself: nobody answers any more."""
    hand.code("1.2", "import os; os.kill(os.getpid(), 19)")


@case(LOST)
def segmentation_fault(hand: Hand) -> None:
    """Reads address 0."""
    hand.code("1.2", "import ctypes; ctypes.string_at(0)")


@case(LOST)
def stack_overflow(hand: Hand) -> None:
    """A recursion that ends the C stack."""
    hand.code(
        "1.2",
        """
        import sys; sys.setrecursionlimit(10**9)
        def f(): return [*map(lambda x: f(), [1])]
        f()
        """,
    )


@case(SOME)
def dies_everywhere(hand: Hand) -> None:
    """Every exercise ends the kernel."""
    for number in ("1.1", "1.2", "1.3", "1.4", "1.5"):
        hand.code(number, "import os; os._exit(1)")


@case(exactly(8, GRADED, REVIEW))
def dies_while_checked(hand: Hand) -> None:
    """The function ends the process when it is called."""
    hand.code(
        "1.2",
        """
        def transfer_time(*a):
            import os; os._exit(1)
        """,
    )


@case(SOME)
def fork_bomb(hand: Hand) -> None:
    """Processes that make processes."""
    hand.code(
        "1.2",
        """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
    )


@case(exactly(8, REVIEW), short=True)
def fork_bomb_while_checked(hand: Hand) -> None:
    """The processes of one answer cost that exercise alone."""
    hand.code("1.2", """
        def transfer_time(*a):
            import os
            while True: os.fork()
        """)  # fmt: skip


@case(HARMLESS)
def twenty_orphans(hand: Hand) -> None:
    """Detached processes that want to outlive the grading."""
    hand.cell("""
        import subprocess, sys
        for _ in range(20):
            subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(9999)'], start_new_session=True)
        """)  # fmt: skip


@case(HARMLESS)
def daemons(hand: Hand) -> None:
    """Double forks, sessions of their own, ignored signals."""
    hand.cell("""
        import os, signal, time
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for s in range(1, 32):
                        try: signal.signal(s, signal.SIG_IGN)
                        except OSError: pass
                    time.sleep(9999)
                os._exit(0)
        """)  # fmt: skip


@case(HARMLESS)
def floods_lines(hand: Hand) -> None:
    """A million lines."""
    hand.cell("for n in range(1_000_000): print('line', n)", after="1.1")


@case(HARMLESS)
def floods_bytes(hand: Hand) -> None:
    """100 MB in 100 lines."""
    hand.cell("for n in range(100): print('x' * 1_000_000)", after="1.1")


@case(HARMLESS)
def floods_one_message(hand: Hand) -> None:
    """300 MB in one message."""
    hand.cell("print('x' * 300_000_000)", after="1.1")


@case(HARMLESS)
def floods_displays(hand: Hand) -> None:
    """Pages of HTML and pictures."""
    hand.cell(
        """
        from IPython.display import HTML, display
        for n in range(2_000): display(HTML('<p>' + 'y' * 20_000))
        """,
        after="1.1",
    )


@case(LOST, slow=True)
def floods_for_ever(hand: Hand) -> None:
    """Prints without end."""
    hand.first("1.2", "while True: print('z' * 1000)")


@case(LOST)
def floods_an_error(hand: Hand) -> None:
    """An error message of 50 MB."""
    hand.first("1.2", "raise ValueError('e' * 50_000_000)")


@case(exactly(8, GRADED, REVIEW))
def huge_answers(hand: Hand) -> None:
    """Text and lists of hundreds of megabytes for numbers."""
    hand.answer(
        "1.2",
        """
        def transfer_time(*a):
            return 'x' * 200_000_000
        def path(*a):
            return [0] * 20_000_000
        """,
    )


@case(exactly(8, GRADED, REVIEW))
def deep_answers(hand: Hand) -> None:
    """Lists in lists in lists, and one that contains itself."""
    hand.answer("1.2", """
        def transfer_time(*a):
            x = []
            x.append(x)
            return x
        def path(*a):
            x = []
            for _ in range(100_000): x = [x]
            return x
        """)  # fmt: skip


@case(exactly(8, GRADED, REVIEW))
def endless_generator(hand: Hand) -> None:
    """Answers that never end when iterated."""
    hand.answer("1.2", """
        import itertools
        def transfer_time(*a):
            return itertools.count()
        def path(*a):
            while True:
                yield 1
        """)  # fmt: skip


@case(exactly(8, GRADED, REVIEW))
def hostile_objects(hand: Hand) -> None:
    """Answers whose every method raises."""
    hand.answer("1.2", """
        class Bad:
            def __getattr__(self, name): raise SystemExit
            def __repr__(self): raise KeyError
            def __eq__(self, o): raise MemoryError
            def __float__(self): raise ValueError
            def __bool__(self): raise TypeError
        def transfer_time(*a): return Bad()
        def path(*a): return Bad
        """)  # fmt: skip


@case(exactly(8, GRADED, REVIEW, TAMPERED))
def interrupts_the_check(hand: Hand) -> None:
    """Answers that raise KeyboardInterrupt and GeneratorExit."""
    hand.answer(
        "1.2",
        """
        def transfer_time(*a): raise KeyboardInterrupt
        def path(*a): raise GeneratorExit
        """,
    )


@case(HARMLESS)
def fills_the_disk(hand: Hand) -> None:
    """Writes until nothing can be written."""
    hand.cell("""
        import os
        for place in ('.', '/tmp', '/dev/shm'):
            try:
                for n in range(10_000):
                    with open(f'{place}/f{n}', 'wb') as f: f.write(bytes(100_000_000))
            except OSError as e: print(place, n, e)
        """, after="1.1")  # fmt: skip


@case(HARMLESS)
def fills_inodes(hand: Hand) -> None:
    """A hundred thousand empty files."""
    hand.cell(
        """
        import os
        os.makedirs('many', exist_ok=True)
        for n in range(100_000): open(f'many/{n}', 'w').close()
        """,
        after="1.1",
    )


@case(HARMLESS)
def opens_everything(hand: Hand) -> None:
    """File descriptors until there are none."""
    hand.cell("""
        import os
        held = []
        try:
            while True: held.append(os.open('/dev/null', 0))
        except OSError as e: print(e)
        for fd in held: os.close(fd)
        """, after="1.1")  # fmt: skip


@case(SOME)
def keeps_everything_open(hand: Hand) -> None:
    """The same, and never closed."""
    hand.cell(
        """
        import os
        held = []
        try:
            while True: held.append(os.open('/dev/null', 0))
        except OSError as e: print(e)
        """,
        after="1.1",
    )


@case(HARMLESS)
def closes_its_streams(hand: Hand) -> None:
    """Closes standard input, output and error."""
    hand.cell(
        """
        import os, sys
        for fd in (0, 1, 2): os.close(fd)
        """,
        after="1.1",
    )


@case(SOME)
def closes_every_descriptor(hand: Hand) -> None:
    """And the sockets of the kernel."""
    hand.cell(
        """
        import os
        os.closerange(0, 4096)
        """,
        after="1.1",
    )


@case(SOME)
def a_thousand_threads(hand: Hand) -> None:
    """Threads until there are none."""
    hand.cell("""
        import threading, time
        try:
            for _ in range(1000): threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
        except RuntimeError as e: print(e)
        """, after="1.1")  # fmt: skip


@case(HARMLESS)
def alarm(hand: Hand) -> None:
    """Signals that arrive later."""
    hand.cell(
        """
        import signal
        signal.signal(signal.SIGALRM, lambda *a: None)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        """,
        after="1.1",
    )


@case(SOME)
def alarm_that_kills(hand: Hand) -> None:
    """A death that comes in another cell than its cause."""
    hand.cell("import signal; signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)", after="1.1")


@case(HARMLESS)
def dies_in_del(hand: Hand) -> None:
    """Objects that misbehave when they are collected."""
    hand.cell("""
        class D:
            def __init__(self): self.me = self
            def __del__(self): raise RuntimeError('in __del__')
        for _ in range(100): D()
        import gc; gc.collect()
        """, after="1.1")  # fmt: skip


@case(FULL)
def a_long_answer(hand: Hand) -> None:
    """A written answer of a megabyte."""
    hand.written().source += "\nword" * 250_000
