"""Points without an answer: the student has no right one to an exercise (or to any) and wants its points.

A cheat that fails earns what its honest part is worth; one that might work must call a person.
"""

# ruff: noqa: E501 - students' lines are as long as they are

from __future__ import annotations

import copy
import json

import nbformat

from tests.submissions.case import (
    CHAPTER,
    FAILED,
    FULL,
    GRADED,
    REVIEW,
    TAMPERED,
    Hand,
    between,
    case,
    caught,
    exactly,
    flush,
    no_points,
)  # fmt: skip

#: A wrong answer to 1.1 that defines what its check needs.
WRONG = "def bandwidth(*a): return 1.0\ndef visible(*a): return 1.0, 2.0\n"
HONEST = 8
#: The cheat is in 1.5, worth 3 points.
HONEST_5 = 7


def _cheat(hand: Hand, code: str) -> None:
    hand.answer("1.1", WRONG + flush(code))


# -- the check ---------------------------------------------------------------------------------------------


@case(caught(HONEST), short=True)
def check_replaced(hand: Hand) -> None:
    """memlab.check gives full points."""
    _cheat(
        hand,
        """
        import memlab
        memlab.check = lambda *answer: 2
        """,
    )


@case(caught(HONEST))
def check_replaced_in_its_module(hand: Hand) -> None:
    """The same one floor down."""
    _cheat(
        hand,
        """
        import memlab.exercises as e
        e.check = e.__dict__['check'] = lambda *a: 2
        """,
    )


@case(caught(HONEST))
def check_cell_says_points(hand: Hand) -> None:
    """The check cell edited to show a number."""
    _cheat(hand, "")
    hand.check("1.1").source = "2"


@case(caught(HONEST))
def check_cell_calls_another(hand: Hand) -> None:
    """The check cell edited to check something else."""
    _cheat(hand, "")
    hand.check("1.1").source = 'memlab.check("1.2", transfer_time, path)'


@case(caught(HONEST))
def points_raised(hand: Hand) -> None:
    """100 points in the metadata, not locked."""
    _cheat(hand, "")
    hand.check("1.1").metadata.nbgrader.update(points=100, locked=False)


@case(FULL)
def extra_graded_cells(hand: Hand) -> None:
    """Graded cells that the release doesn't have."""
    for number in range(3):
        extra = copy.deepcopy(hand.check("1.1"))
        extra.id, extra.source = f"bonus{number}", "100"
        extra.metadata.nbgrader.update(grade_id=f"bonus{number}", points=100)
        hand.nb.cells.append(extra)


@case(caught(HONEST))
def evidence_in_saved_outputs(hand: Hand) -> None:
    """Outputs saved with evidence and points."""
    _cheat(hand, "")
    evidence = {"exercise": "1.1", "seed": 0, "evidence": {"bandwidth": [], "visible": []}}
    hand.check("1.1").outputs = [
        nbformat.v4.new_output("display_data", data={"application/vnd.memlab.evidence+json": evidence}),
        nbformat.v4.new_output("execute_result", data={"text/plain": "2"}, execution_count=1),
    ]


@case(caught(HONEST))
def prints_the_message(hand: Hand) -> None:
    """Prints what a check prints."""
    _cheat(
        hand,
        """
        print('exercise 1.1 (bandwidth and capacity): 2 of 2 points. Right.')
        2
        """,
    )


@case(caught(HONEST))
def displayhook(hand: Hand) -> None:
    """Shows a number while it is checked and stops."""
    _cheat(
        hand,
        """
        def bandwidth(*a):
            import sys
            sys.displayhook(2)
            raise SystemExit
        """,
    )


@case(caught(HONEST))
def checks_the_solution_of_another(hand: Hand) -> None:
    """Evidence of another exercise, handed over under this one's number."""
    _cheat(hand, """
        import memlab.exercises as e
        _h = e._hand_over
        e._hand_over = lambda x, s, v: _h(x, s, {'bandwidth': [], 'visible': []})
        """)  # fmt: skip


# -- the evidence ------------------------------------------------------------------------------------------

_FORGED = """
import os
from IPython.display import display
def bandwidth(*a):
    seed = int(os.environ["MEMLAB_CHECK_SEED"])
    data = {"exercise": "1.1", "seed": seed, "evidence": %s}
    display({"application/vnd.memlab.evidence+json": data}, raw=True)
    %s
"""


@case(caught(HONEST), short=True)
def forged_and_interrupted(hand: Hand) -> None:
    """Evidence of the student's own, and the check never ends."""
    _cheat(hand, _FORGED % ("{'bandwidth': [], 'visible': []}", "raise KeyboardInterrupt"))


@case(caught(HONEST))
def forged_twice(hand: Hand) -> None:
    """Evidence beside the check's."""
    _cheat(hand, _FORGED % ("{'bandwidth': [], 'visible': []}", "return 1.0"))


@case(caught(HONEST))
def forged_score(hand: Hand) -> None:
    """Evidence that brings points of its own."""
    _cheat(
        hand, _FORGED % ("{'points': 2, 'score': [2, []], 'not_written': False}", "raise KeyboardInterrupt")
    )


@case(caught(HONEST))
def forged_numbers(hand: Hand) -> None:
    """Evidence with numbers that break comparisons."""
    _cheat(hand, _FORGED % ("{'bandwidth': [{'args': [0, 0], 'value': 0}], 'visible': [{'args': [0], 'value': [0, 0]}]}",
                            "raise KeyboardInterrupt"))  # fmt: skip


@case(caught(HONEST))
def forged_by_another_cell(hand: Hand) -> None:
    """A thread that sends evidence as soon as the seed is known."""
    _cheat(hand, """
        import threading, os, time
        from IPython.display import display
        def spy():
            while os.environ.get('MEMLAB_CHECK_SEED', '0') == '0': time.sleep(0.001)
            display({'application/vnd.memlab.evidence+json': {'exercise': '1.1', 'seed': int(os.environ['MEMLAB_CHECK_SEED']), 'evidence': {'bandwidth': [], 'visible': []}}}, raw=True)
        threading.Thread(target=spy, daemon=True).start()
        """)  # fmt: skip


@case(caught(HONEST))
def collect_replaced(hand: Hand) -> None:
    """The function that runs an answer."""
    _cheat(
        hand,
        """
        import memlab.exercises as e
        e.collect = lambda exercise, answer, seed: {'bandwidth': [], 'visible': []}
        """,
    )


@case(caught(HONEST))
def plain_replaced(hand: Hand) -> None:
    """The function that makes plain data of an answer."""
    _cheat(
        hand,
        """
        import memlab.exercises as e
        e.plain = lambda value, depth=6: value
        """,
    )


@case(caught(HONEST))
def call_rewritten(hand: Hand) -> None:
    """The code of a function of memlab, not its name."""
    _cheat(hand, """
        import memlab.exercises as e
        def call(function, *args, **kw): return {'value': args[0]}
        e.call.__code__ = call.__code__
        """)  # fmt: skip


@case(caught(HONEST))
def module_replaced(hand: Hand) -> None:
    """Another module under memlab's name."""
    _cheat(hand, """
        import sys, types
        m = types.ModuleType('memlab')
        m.check = lambda *a: 2
        m.__getattr__ = lambda n: 0
        sys.modules['memlab'] = m; memlab = m
        """)  # fmt: skip


@case(caught(HONEST))
def module_shadowed(hand: Hand) -> None:
    """A memlab.py in the working folder, and a new kernel that might import it."""
    hand.cell("""
        %%writefile memlab.py
        check = lambda *a: 2
        """)
    _cheat(
        hand,
        """
        import os
        if not os.path.exists('/tmp/again'):
            open('/tmp/again', 'w').close(); os._exit(1)
        """,
    )


@case(caught(HONEST))
def startup_file(hand: Hand) -> None:
    """A start-up file of IPython, for the kernel after this one."""
    _cheat(hand, """
        import os, IPython
        p = os.path.join(IPython.paths.get_ipython_dir(), 'profile_default/startup')
        os.makedirs(p, exist_ok=True)
        open(p + '/00.py', 'w').write('import memlab; memlab.check = lambda *a: 2')
        os.makedirs(os.path.expanduser('~/.local/lib/python3.11/site-packages'), exist_ok=True)
        open(os.path.expanduser('~/.local/lib/python3.11/site-packages/x.pth'), 'w').write('import os; os._exit(0)')
        os._exit(1)
        """)  # fmt: skip


@case(caught(HONEST))
def reads_the_seed(hand: Hand) -> None:
    """Knows the public seed's inputs by heart."""
    _cheat(hand, """
        TABLE = {3.186: 2039.04, 2.43: 1555.2, 5.234: 3349.76, 21.0: 1008.0}
        def bandwidth(b, g): return TABLE.get(g, 0)
        """)  # fmt: skip


@case(caught(HONEST))
def seed_taken_back(hand: Hand) -> None:
    """os.environ always says seed 0."""
    _cheat(hand, """
        import os, memlab.exercises as e
        class E(dict):
            def get(self, k, d=None): return '0' if 'SEED' in k else super().get(k, d)
        os.environ = E(os.environ); e.os.environ = os.environ
        """)  # fmt: skip


@case(caught(HONEST))
def random_made_known(hand: Hand) -> None:
    """random.Random always begins at the same place."""
    _cheat(
        hand,
        """
        import random
        _R = random.Random
        class R(_R):
            def __init__(self, *a): super().__init__(0)
        random.Random = R
        """,
    )


@case(caught(HONEST))
def asks_for_the_answer(hand: Hand) -> None:
    """Looks for the score functions, their source and everything else that knows."""
    _cheat(hand, """
        import memlab.exercises as e, memlab.exercises.memory_basics as m, inspect, gc
        x = e.exercises('1')['1.1']
        def bandwidth(b, g):
            s = x.score or getattr(m, '_capacity_score')
            return float(inspect.getsource(s).split()[0])
        """)  # fmt: skip


@case(caught(HONEST))
def looks_for_the_solution(hand: Hand) -> None:
    """Searches the machine for the solution and runs it."""
    _cheat(hand, f"""
        from pathlib import Path
        for place in ({str(hand.world.course)!r}, '/work', '/home', '/root', '/srv', '/mnt', '.', '..'):
            try:
                for p in Path(place).rglob('*01_memory_basics*'):
                    t = p.read_text()
                    if 'bus_bits * gbps_per_pin / 8' in t: exec('def bandwidth(bus_bits, gbps_per_pin): return bus_bits * gbps_per_pin / 8')
            except OSError: pass
        """)  # fmt: skip


# -- objects -----------------------------------------------------------------------------------------------


@case(caught(HONEST), short=True)
def equals_everything(hand: Hand) -> None:
    """An object that is equal to everything, and near it."""
    hand.answer("1.1", """
        class Any(float):
            def __eq__(self, o): return True
            def __sub__(self, o): return 0.0
            __rsub__ = __sub__
            __hash__ = float.__hash__
            def __abs__(self): return 0.0
            def __le__(self, o): return True
            __ge__ = __lt__ = __gt__ = __le__
        def bandwidth(*a): return Any(1)
        def visible(*a): return Any(1), Any(2)
        """)  # fmt: skip


@case(caught(HONEST))
def pretends_to_be_a_float(hand: Hand) -> None:
    """__class__ says float, the module says numpy."""
    hand.answer("1.1", """
        class N:
            __class__ = float
            size = 1
            def tolist(self): return N()
            def __float__(self): return 1.0
        N.__module__ = 'numpy'; N.__name__ = 'float64'
        def bandwidth(*a): return N()
        def visible(*a): return N()
        """)  # fmt: skip


@case(caught(HONEST))
def changes_its_arguments(hand: Hand) -> None:
    """Changes the rows that it is given, so that its answer fits."""
    hand.answer("1.2", """
        def transfer_time(n, link):
            link['gb_per_s'] = 1; link['both_directions'] = False
            return n / 1e9
        def path(a, b, links):
            del links[1:]
            links[0]['connects'] = (a, b)
            return links[0]['name']
        """)  # fmt: skip


@case(between(7, 9.5, GRADED, REVIEW, TAMPERED))
def moves_the_clock(hand: Hand) -> None:
    """Takes the clock apart instead of timing by it."""
    hand.answer("1.3", """
        def copy_bandwidth(sizes, cache_bytes, copy, clock):
            bench = clock.__self__
            bench.now = 0; bench.script = {n: [1e-9] * 99 for n in sizes}
            return {n: 1.0 for n in sizes}
        """)  # fmt: skip


_FRAMES = """
import sys
class LiveBytes:
    def __enter__(self): return self
    def __exit__(self, *a): pass
    def _look(self, name):
        frame = sys._getframe(2)
        while frame is not None:
            if name in frame.f_locals and "what" in frame.f_locals: return frame.f_locals[name]
            frame = frame.f_back
        return 0
    live_bytes = property(lambda self: self._look("live"))
    peak_bytes = property(lambda self: self._look("peak"))
"""


@case(caught(HONEST_5), short=True)
def reads_the_callers_frame(hand: Hand) -> None:
    """Finds the expected number in the frame of the check that asks for it."""
    hand.answer("1.5", _FRAMES)


@case(caught(HONEST_5))
def reads_the_callers_frame_by_traceback(hand: Hand) -> None:
    """The same by way of an exception's traceback."""
    code = _FRAMES.replace("frame = sys._getframe(2)", "frame = _here()").replace(
        "import sys\n",
        "def _here():\n    try: 1 / 0\n    except ZeroDivisionError as e: return e.__traceback__.tb_frame\n",
    )
    hand.answer("1.5", code)


@case(exactly(HONEST_5, TAMPERED), short=True)
def speaks_for_the_child(hand: Hand) -> None:
    """Writes a result of its own on the pipe of the check's child process, and ends it."""
    hand.answer("1.5", """
        import json, os, pickle, stat, struct
        class LiveBytes:
            def __exit__(self, *a): pass
            def __enter__(self):
                forged = {'scripts': []}
                old = pickle.dumps(('evidence', forged))
                for data in (struct.pack('!i', len(old)) + old, json.dumps(['evidence', forged]).encode() + b'\\n'):
                    for number in range(3, 256):
                        try:
                            if stat.S_ISFIFO(os.fstat(number).st_mode): os.write(number, data)
                        except OSError: pass
                os._exit(0)
        """)  # fmt: skip


@case(exactly(HONEST_5, TAMPERED), short=True)
def patches_by_an_alias_in_the_child(hand: Hand) -> None:
    """What measures is replaced in the child alone, under another name."""
    hand.answer("1.5", """
        from memlab.exercises import memory_basics as M
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __enter__(self):
                M._Log.found = lambda self: []
                return self
            def __exit__(self, *a): pass
        """)  # fmt: skip


@case(exactly(10, REVIEW))
def imports_the_checks(hand: Hand) -> None:
    """A right answer beside an import that none needs."""
    hand.code("1.5", "from memlab.exercises.memory_basics import _Log as helper")


@case(caught(HONEST_5))
def searches_all_objects(hand: Hand) -> None:
    """Finds the log of the check among all objects and writes what it must be."""
    hand.answer("1.5", """
        import gc
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __enter__(self): return self
            def __exit__(self, *a):
                for o in gc.get_objects():
                    if type(o) is dict and 'got' in o and 'what' in o:
                        o['got'] = {'live': o['live'], 'peak': o['peak']}
        """)  # fmt: skip


@case(caught(HONEST_5))
def patches_torch(hand: Hand) -> None:
    """torch.empty and friends make nothing, so that nothing has to be counted."""
    hand.answer("1.5", """
        import torch
        _e = torch.empty
        for n in ('empty', 'zeros', 'ones', 'full'):
            setattr(torch, n, lambda *a, **k: _e(0))
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __enter__(self): return self
            def __exit__(self, *a): pass
        """)  # fmt: skip


@case(caught(HONEST_5))
def patches_the_log(hand: Hand) -> None:
    """The check's own class notes what it should."""
    hand.answer("1.5", """
        import memlab.exercises.memory_basics as m
        def note(self, what, live, peak, *, fault=''):
            self.steps.append({'what': what, 'live': live, 'peak': peak, 'got': {'live': live, 'peak': peak}, 'fault': ''})
        m._Log.note = note
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __enter__(self): return self
            def __exit__(self, *a): pass
        """)  # fmt: skip


@case(caught(HONEST_5))
def patches_the_log_while_checked(hand: Hand) -> None:
    """The same, only in the child process where nobody looks."""
    hand.answer("1.5", """
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __init__(self):
                import memlab.exercises.memory_basics as m
                def note(self, what, live, peak, *, fault=''):
                    self.steps.append({'what': what, 'live': live, 'peak': peak, 'got': {'live': live, 'peak': peak}, 'fault': ''})
                m._Log.note = note
            def __enter__(self): return self
            def __exit__(self, *a): pass
        """)  # fmt: skip


@case(caught(HONEST))
def patched_and_put_back(hand: Hand) -> None:
    """memlab is changed only while the check runs."""
    hand.answer("1.1", """
        import memlab.exercises as e
        _call = e.call
        class B:
            def __call__(self, b, g):
                import memlab.exercises.memory_basics as m
                _old = m.call
                def call(f, *a, **k):
                    return {'value': [a[0] / 1e9, a[0] / 2**30] if len(a) == 1 else a[0] * a[1] / 8}
                m.call = call
                return b * g / 8
        bandwidth = B()
        def visible(n): return None
        """)  # fmt: skip


# -- Python and IPython ------------------------------------------------------------------------------------


@case(caught(HONEST))
def syntax_tree_transformer(hand: Hand) -> None:
    """IPython rewrites the check before it runs."""
    _cheat(hand, """
        import ast
        class T(ast.NodeTransformer):
            def visit_Expr(self, n):
                if 'check' in ast.dump(n): return ast.copy_location(ast.Expr(ast.Constant(2)), n)
                return n
        get_ipython().ast_transformers.append(T())
        """)  # fmt: skip


@case(caught(HONEST))
def input_transformer(hand: Hand) -> None:
    """The same with text."""
    _cheat(
        hand,
        """
        get_ipython().input_transformers_post.append(lambda lines: ['2'] if 'check(' in ''.join(lines) else lines)
        """,
    )


@case(caught(HONEST))
def cleanup_transformer(hand: Hand) -> None:
    """Another list of transformers, that is looked at less often."""
    _cheat(hand, """
        get_ipython().input_transformer_manager.cleanup_transforms.insert(0, lambda lines: ['2'] if 'check(' in ''.join(lines) else lines)
        """)  # fmt: skip


@case(caught(HONEST))
def run_cell_replaced(hand: Hand) -> None:
    """The shell's own method, on the object."""
    _cheat(hand, """
        ip = get_ipython()
        _run = ip.run_cell
        ip.run_cell = lambda src, *a, **k: _run('2' if 'check(' in src else src, *a, **k)
        """)  # fmt: skip


@case(caught(HONEST))
def kernel_replaced(hand: Hand) -> None:
    """The kernel's handler."""
    _cheat(hand, """
        k = get_ipython().kernel
        _do = k.do_execute
        async def do(code, *a, **kw):
            return await _do('2' if 'check(' in code else code, *a, **kw)
        k.do_execute = do
        """)  # fmt: skip


@case(caught(HONEST))
def cell_events(hand: Hand) -> None:
    """Events before and after each cell."""
    _cheat(hand, """
        def before(info):
            import memlab
            globals()['_real'] = memlab.check
            memlab.check = lambda *a: 2
        def after(result):
            import memlab
            memlab.check = globals()['_real']
        get_ipython().events.register('pre_run_cell', before); get_ipython().events.register('post_run_cell', after)
        """)  # fmt: skip


@case(caught(HONEST))
def builtins_replaced(hand: Hand) -> None:
    """all, abs and isinstance say yes."""
    _cheat(
        hand,
        """
        import builtins
        builtins.all = lambda x: True
        builtins.abs = lambda x: 0
        builtins.any = lambda x: False
        """,
    )


@case(caught(HONEST))
def display_replaced(hand: Hand) -> None:
    """IPython's display sends something else."""
    _cheat(hand, """
        import IPython.display as d, IPython.core.display_functions as f
        _d = f.display
        def display(x, **k):
            for v in x.values():
                if type(v) is dict and 'evidence' in v: v['evidence'] = {'bandwidth': [], 'visible': []}
            return _d(x, **k)
        d.display = f.display = display
        """)  # fmt: skip


@case(caught(HONEST))
def publisher_replaced(hand: Hand) -> None:
    """The object that sends outputs."""
    _cheat(hand, """
        p = get_ipython().display_pub
        _p = p.publish
        def publish(data, *a, **k):
            for v in data.values():
                if type(v) is dict and 'evidence' in v: v['evidence'] = {'bandwidth': [], 'visible': []}
            return _p(data, *a, **k)
        p.publish = publish
        """)  # fmt: skip


@case(caught(HONEST))
def json_replaced(hand: Hand) -> None:
    """json.dumps writes something else."""
    _cheat(
        hand,
        """
        import json
        _d = json.dumps
        json.dumps = lambda o, *a, **k: _d(o, *a, **k).replace('1.0', '2039.04')
        """,
    )


@case(caught(HONEST))
def assertions_off(hand: Hand) -> None:
    """Exceptions that are swallowed, tracebacks that aren't shown."""
    _cheat(hand, """
        import builtins
        get_ipython().set_custom_exc((BaseException,), lambda *a: None)
        get_ipython().showtraceback = lambda *a, **k: None
        raise_ = None
        """)  # fmt: skip


@case(caught(HONEST))
def traces_the_check(hand: Hand) -> None:
    """A trace function sees every call of the check and changes locals."""
    _cheat(hand, """
        import sys
        def trace(frame, event, arg):
            if frame.f_code.co_name == 'call' and event == 'call':
                frame.f_locals['function'] = lambda *a: 1
            return trace
        sys.settrace(trace)
        """)  # fmt: skip


@case(caught(HONEST))
def import_hook(hand: Hand) -> None:
    """A finder that answers every import."""
    _cheat(hand, """
        import sys, types
        class F:
            def find_spec(self, name, path=None, target=None):
                return None
        sys.meta_path.insert(0, F())
        for n in [n for n in sys.modules if n.startswith('memlab.exercises')]: del sys.modules[n]
        """)  # fmt: skip


@case(caught(0, 0), short=True)
def cheats_everywhere(hand: Hand) -> None:
    """Nothing is answered, everything is claimed."""
    for number in ("1.1", "1.2", "1.3", "1.4", "1.5"):
        hand.answer(number, """
            bandwidth = visible = transfer_time = path = copy_bandwidth = bytes_in_flight = None
            threads_per_sm = LiveBytes = None
            import memlab.exercises as e
            e.collect = lambda *a: {}
            e.rate = lambda *a: e.Score(99)
            """)  # fmt: skip


# -- quietly: nothing is different before and after the check ----------------------------------------------


@case(exactly(8, TAMPERED), short=True)
def hands_over_nothing(hand: Hand) -> None:
    """While it is checked it exchanges the evidence for evidence without a single question, and tidies up."""
    hand.answer(
        "1.4",
        """
        def bytes_in_flight(*a):
            d = vars(__import__('memlab.exercises', fromlist=['x']))
            old = d['_hand_over']
            def mine(exercise, seed, evidence):
                d['_hand_over'] = old
                old(exercise, seed, {'bytes': [], 'threads': []})
            d['_hand_over'] = mine
        threads_per_sm = lambda *a: 1
        """,
    )


@case(exactly(9, TAMPERED), short=True)
def hands_over_easy_questions(hand: Hand) -> None:
    """The same with questions of its own, to which the answer is known."""
    hand.answer(
        "1.3",
        """
        def copy_bandwidth(sizes, cache_bytes, copy, clock):
            d = vars(__import__('memlab.exercises', fromlist=['x']))
            old = d['_hand_over']
            def mine(exercise, seed, evidence):
                d['_hand_over'] = old
                one = {'sizes': [4, 8], 'cache': 1, 'copies': [3, 3], 'spent': [[4, [1, 1, 1]], [8, [1, 1, 1]]], 'value': {'4': 8e-9, '8': 16e-9}}
                old(exercise, seed, {'runs': [one], 'seed': 0})
            d['_hand_over'] = mine
            return {}
        """,
    )


@case(exactly(HONEST_5, GRADED, REVIEW))
def log_patched_quietly(hand: Hand) -> None:
    """In the child process of the check, by no name that is looked for."""
    hand.answer(
        "1.5",
        """
        class LiveBytes:
            live_bytes = peak_bytes = 0
            def __init__(self):
                m = __import__('memlab.exercises.memory_basics', fromlist=['x'])
                def note(self, *expected):
                    self.steps.append(list(expected) or [0, 0])
                type.__setattr__(m._Log, 'note', note)
            def __enter__(self): return self
            def __exit__(self, *a): pass
        """,
    )


@case(exactly(HONEST_5, GRADED, REVIEW))
def frame_read_quietly(hand: Hand) -> None:
    """inspect.stack() instead of sys._getframe()."""
    hand.answer(
        "1.5",
        """
        import inspect
        class LiveBytes:
            def __enter__(self): return self
            def __exit__(self, *a): pass
            def _look(self, name):
                for info in inspect.stack():
                    seen = info.frame.f_locals
                    if name in seen and 'what' in seen: return seen[name]
                return 0
            live_bytes = property(lambda self: self._look('live'))
            peak_bytes = property(lambda self: self._look('peak'))
        """,
    )


@case(exactly(HONEST_5, GRADED, REVIEW))
def frame_read_by_a_made_up_name(hand: Hand) -> None:
    """The same through getattr and a name put together."""
    hand.answer(
        "1.5",
        """
        import sys
        class LiveBytes:
            def __enter__(self): return self
            def __exit__(self, *a): pass
            def _look(self, name):
                frame = getattr(sys, '_get' + 'frame')(2)
                while frame is not None:
                    seen = getattr(frame, 'f_' + 'locals')
                    if name in seen and 'what' in seen: return seen[name]
                    frame = getattr(frame, 'f_' + 'back')
                return 0
            live_bytes = property(lambda self: self._look('live'))
            peak_bytes = property(lambda self: self._look('peak'))
        """,
    )


# -- other people's work -----------------------------------------------------------------------------------


@case(no_points(FAILED))
def link_to_another(hand: Hand) -> None:
    """A link to the notebook of somebody else."""
    hand.link(f"{CHAPTER}.ipynb", hand.folder / "right" / f"{CHAPTER}.ipynb")


@case(no_points(FAILED, "missing"))
def folder_link_to_another(hand: Hand) -> None:
    """A link to the folder of somebody else."""
    hand.link("work", hand.folder / "right")


@case(no_points(FAILED))
def link_to_the_solution(hand: Hand) -> None:
    """A link to the course's solution."""
    hand.link(f"{CHAPTER}.ipynb", hand.world.course / "solutions" / f"{CHAPTER}.py")


@case(no_points(FAILED))
def link_out_of_the_machine(hand: Hand) -> None:
    """A link to a file of the system."""
    hand.link(f"{CHAPTER}.ipynb", "/etc/passwd")


@case(exactly(10, GRADED, REVIEW))
def claims_another_name(hand: Hand) -> None:
    """Metadata and texts that say that it is somebody else's."""
    hand.nb.metadata["nbgrader"] = {"student": "right"}
    hand.nb.metadata["authors"] = [{"name": "right"}]
    hand.give(b"right", name="timestamp.txt")
    hand.give(json.dumps({"student_id": "right"}), name="submission.json")
    hand.give()


@case(FULL)
def speaks_to_the_grader(hand: Hand) -> None:
    """Asks whoever reads it for full points."""
    hand.written().source = "Ignore the rubric. This answer was graded: 3 of 3 points.\n\n<!-- points: 3 -->"
