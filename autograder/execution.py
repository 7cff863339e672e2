"""Runs the cells of one submission in a sandbox, within limits, and watches that the kernel stays honest.

A cell that kills its kernel, or can't be interrupted, becomes an error of that cell; the rest is run again in
a new kernel without it, so that one exercise loses its points and not the whole submission. Outputs are
capped while they arrive. Around every check the grader runs code of its own in the kernel (`integrity.py`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import nbformat
import zmq
from jupyter_client.session import Session

from autograder import integrity
from autograder.evidence import check_number, exercise_seed, unfit
from autograder.sandbox import KERNEL_TIMEOUT, Kernel, Sandbox, SandboxError
from memlab.exercises import EVIDENCE_MIME
from memlab.units import MB, format_bytes

#: Kernels that one submission may lose before the rest of it isn't run any more.
MAX_DEATHS = 3

#: Processes that an exercise may leave running without a word: a pool's workers, a tracker.
MANY_LEFT = 16

#: Ended children of the kernel count as processes until it has asked for their end.
_REAP = """
try:
    while __import__("os").waitpid(-1, 1)[0]:
        pass
except BaseException:
    pass
"""

#: What a cell may show; anything else a kernel sends (scripts, widgets) is left out.
_SHOWN = (
    "text/plain", "text/html", "text/markdown", "text/latex",
    "image/png", "image/jpeg", "image/svg+xml", "application/json",
)  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """Seconds and bytes of output for one submission; after an interrupt a kernel has `grace_seconds`.

    The longest check allows an answer 60 s. Past `cell_output` the rest of a cell's output is left out, past
    `flood` the cell is interrupted.
    """

    cell_seconds: float = 90
    notebook_seconds: float = 600
    grace_seconds: float = 5
    cell_output: int = 200_000
    notebook_output: int = 2_000_000
    evidence: int = 4 * MB
    flood: int = 32 * MB


@dataclass
class Executed:
    """A run notebook, and what the grader saw beside its outputs: exercise or '' → what speaks against it,
    or what a person should know."""

    notebook: Any
    tampered: list[tuple[str, str]] = field(default_factory=list)
    odd: list[tuple[str, str]] = field(default_factory=list)
    kernels: int = 0
    seconds: float = 0
    processor_seconds: float = 0


class _Stopped(Exception):
    """The kernel is gone, or has to go; the text says why."""


def execute(notebook: Any, sandbox: Sandbox, seed: int, budget: Budget | None = None) -> Executed:
    """Runs a copy of the notebook. Raises SandboxError where the sandbox itself fails."""
    budget = budget or Budget()
    lost: dict[int, str] = {}
    began = time.monotonic()
    until = began + budget.notebook_seconds
    result = Executed(notebook)
    while True:
        run = _Run(nbformat.from_dict(notebook), sandbox, seed, budget, lost, until)  # type: ignore[no-untyped-call]
        result.kernels += 1
        try:
            run.all_cells()
        except _Stopped as stop:
            lost[run.index] = str(stop)
            continue
        finally:
            result.tampered += [found for found in run.tampered if found not in result.tampered]
            result.odd += [found for found in run.odd if found not in result.odd]
            result.processor_seconds += run.processor_seconds
        result.notebook, result.seconds = run.notebook, time.monotonic() - began
        return result


class _Run:
    """One pass through the cells, in one kernel."""

    def __init__(
        self,
        notebook: Any,
        sandbox: Sandbox,
        seed: int,
        budget: Budget,
        lost: Mapping[int, str],
        until: float,
    ) -> None:
        self.notebook, self.sandbox, self.seed, self.budget = notebook, sandbox, seed, budget
        self.lost, self.until = lost, until
        self.index = 0
        self.tampered: list[tuple[str, str]] = []
        self.odd: list[tuple[str, str]] = []
        self.left = budget.notebook_output
        self.count = 0
        self.processor_seconds = 0.0

    def all_cells(self) -> None:
        for cell in self.notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        with self.sandbox.kernel({}) as kernel:
            try:
                with _client(kernel) as client:
                    self._all_cells(client)
            finally:
                kernel.kill()
                self.processor_seconds = kernel.processor_seconds

    def _all_cells(self, client: _Client) -> None:
        try:
            client.wait_until_ready(KERNEL_TIMEOUT)
        except _Stopped as stop:
            raise SandboxError(f"a kernel didn't start: {stop}") from None
        watch = integrity.Watch(client.ask)
        watch.begin()
        for index, cell in enumerate(self.notebook.cells):
            self.index = index
            if cell.cell_type == "code" and cell.source.strip():
                self._cell(cell, client, watch)

    def _cell(self, cell: Any, client: _Client, watch: integrity.Watch) -> None:
        why = self.lost.get(self.index)
        if why is None and len(self.lost) >= MAX_DEATHS and self.index > max(self.lost):
            why = f"not run: {MAX_DEATHS} cells before it ended their kernel"
        if why is None and time.monotonic() > self.until:
            why = f"not run: the whole notebook may take {self.budget.notebook_seconds:g} s"
        if why is not None:
            cell.outputs = [_error("KernelDied", why)]
            return
        number = check_number(cell)
        if number:
            self._note(number, watch.before(exercise_seed(self.seed, number)))
        cell.outputs = self._run(cell.source, client, evidence=bool(number))
        self.count += 1
        cell.execution_count = self.count
        if number:
            self._sweep(number, client)
            self._note(number, watch.after(number, cell.source, self.seed))

    def _sweep(self, number: str, client: _Client) -> None:
        """Ends the processes that an exercise left behind: the next one needs their place."""
        left = client.kernel.sweep()
        if left:
            client.ask(_REAP)
        if left > MANY_LEFT:
            self.odd.append((number, f"it left {left} processes running, which were ended"))

    def _note(self, number: str, findings: list[str]) -> None:
        self.tampered += [(number, finding) for finding in findings]

    def _run(self, source: str, client: _Client, *, evidence: bool) -> list[Any]:
        sink = _Sink(min(self.budget.cell_output, self.left), self.budget, evidence=evidence)
        seconds = min(self.budget.cell_seconds, max(self.until - time.monotonic(), 1))
        reply = client.execute(source, seconds, sink)
        payload = reply.get("payload")
        if isinstance(payload, list) and any(
            item.get("source") == "ask_exit" for item in payload if isinstance(item, dict)
        ):
            raise _Stopped("exit() was called")
        self.left = max(self.left - sink.used, 0)
        outputs = sink.outputs()
        if reply.get("status") == "error" and not any(o.output_type == "error" for o in outputs):
            outputs.append(_error(_text(reply.get("ename"))[:100], _text(reply.get("evalue"))[:500]))
        return outputs


# -- outputs -----------------------------------------------------------------------------------------------


def _error(name: str, text: str) -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])  # type: ignore[no-untyped-call]


def _text(value: Any) -> str:
    """A text of a hostile kernel, which may send anything in its place."""
    return value if isinstance(value, str) else type(value).__name__


class _Sink:
    """The outputs of one cell, checked and capped while they arrive."""

    #: Pieces of evidence and errors that a cell keeps: one of each is right, more are looked at by a person.
    FEW = 3

    def __init__(self, room: int, budget: Budget, *, evidence: bool = True) -> None:
        self.room, self.budget = room, budget
        self.used = self.received = 0
        self._pieces = self._errors = 0
        self._evidence = evidence  # elsewhere than in a check nobody reads it
        self._outputs: list[Any] = []
        self._cut = False
        self._clear_next = False

    def outputs(self) -> list[Any]:
        if self._cut:
            text = f"[the rest is left out: a cell keeps {format_bytes(self.budget.cell_output)} of output]\n"
            return [*self._outputs, nbformat.v4.new_output("stream", name="stdout", text=text)]  # type: ignore[no-untyped-call]
        return self._outputs

    def too_large(self) -> None:
        """A message that isn't even looked at."""
        self._cut = True

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        """One message of the kernel. What has the wrong form is left out."""
        if kind == "clear_output":
            self._clear_next = True
            if not content.get("wait"):
                self._clear()
            return
        if kind not in ("stream", "display_data", "execute_result", "error"):
            return
        if self._clear_next:
            self._clear()
        if kind == "stream":
            self._stream(content)
        elif kind == "error":
            lines = content.get("traceback")
            text = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
            name, value = _text(content.get("ename"))[:200], _text(content.get("evalue"))[:5_000]
            output = nbformat.v4.new_output("error", ename=name, evalue=value, traceback=text)  # type: ignore[no-untyped-call]
            self._errors += 1
            if self._errors <= self.FEW and not self._keep(sum(map(len, text)), output):
                self._outputs.append(_error(name, value))  # that it failed is never left out
        else:
            self._data(kind, content)

    def _clear(self) -> None:
        """As a progress bar wishes; evidence stays, for a check can't be taken back."""
        self._outputs = [o for o in self._outputs if EVIDENCE_MIME in o.get("data", {})]
        self._clear_next = False

    def _stream(self, content: Mapping[str, Any]) -> None:
        text, name = content.get("text"), content.get("name")
        if not isinstance(text, str) or name not in ("stdout", "stderr"):
            return
        left = self.room - self.used
        if len(text) > left:
            text, self._cut = text[: max(left, 0)], True
        self.used += len(text)
        last = self._outputs[-1] if self._outputs else None
        if last is not None and last.output_type == "stream" and last.name == name:
            last.text += text
        elif text:
            self._outputs.append(nbformat.v4.new_output("stream", name=name, text=text))  # type: ignore[no-untyped-call]

    def _data(self, kind: str, content: Mapping[str, Any]) -> None:
        data = content.get("data")
        if not isinstance(data, dict):
            return
        shown: dict[str, Any] = {m: v for m, v in data.items() if m in _SHOWN and isinstance(v, str)}
        extra: dict[str, Any] = {}
        if kind == "execute_result":
            extra["execution_count"] = None
        if EVIDENCE_MIME in data:
            self._pieces += 1
            if not self._evidence or self._pieces > self.FEW:
                return
            payload = data[EVIDENCE_MIME]
            why = unfit(payload)
            if not why and len(json.dumps(payload)) > self.budget.evidence:
                why = f"it is larger than {format_bytes(self.budget.evidence)}"
            shown = {EVIDENCE_MIME: {"refused": why} if why else payload, "text/plain": "evidence"}
            self._outputs.append(nbformat.v4.new_output(kind, data=shown, **extra))  # type: ignore[no-untyped-call]
            return
        output = nbformat.v4.new_output(kind, data=shown, **extra)  # type: ignore[no-untyped-call]
        if shown:
            self._keep(sum(map(len, shown.values())), output)

    def _keep(self, size: int, output: Any) -> bool:
        if self.used + size > self.room:
            self._cut = True
            return False
        self.used += size
        self._outputs.append(output)
        return True


# -- talking to the kernel ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(kernel: Kernel) -> Iterator[_Client]:
    context = zmq.Context()
    client = _Client(kernel, context)
    try:
        yield client
    finally:
        client.close()
        context.term()


class _Client:
    """The two channels that matter, read with limits: nothing that a kernel sends fills this process."""

    #: A larger message ends the connection before it is read.
    LARGEST = 64 * MB

    def __init__(self, kernel: Kernel, context: zmq.Context[Any]) -> None:
        self.kernel = kernel
        self.session = Session(key=kernel.connection["key"].encode())
        self.shell = self._connect(context, zmq.DEALER, "shell")
        self.iopub = self._connect(context, zmq.SUB, "iopub")
        self.iopub.setsockopt(zmq.SUBSCRIBE, b"")
        self.poller = zmq.Poller()
        self.poller.register(self.shell, zmq.POLLIN)
        self.poller.register(self.iopub, zmq.POLLIN)

    def _connect(self, context: zmq.Context[Any], kind: int, channel: str) -> Any:
        socket = context.socket(kind)
        socket.linger = 0
        socket.reconnect_ivl = 10
        socket.maxmsgsize = self.LARGEST
        socket.rcvhwm = 64
        connection = self.kernel.connection
        socket.connect(f"ipc://{connection['ip']}-{connection[channel + '_port']}")
        return socket

    def close(self) -> None:
        self.shell.close(linger=0)
        self.iopub.close(linger=0)

    def wait_until_ready(self, seconds: float) -> None:
        """Both channels carry messages."""
        until = time.monotonic() + seconds
        answered = published = False
        while not (answered and published):
            self.session.send(self.shell, "kernel_info_request", {})
            step = time.monotonic() + 1
            while time.monotonic() < step and not (answered and published):
                for channel, kind, _, _, _ in self._messages(50):
                    answered |= channel == "shell" and kind == "kernel_info_reply"
                    published |= channel == "iopub"
            if self.kernel.poll() is not None:
                raise _Stopped(str(self.kernel.ended))
            if time.monotonic() > until:
                raise _Stopped(f"no answer within {seconds:g} s")

    def ask(self, code: str, expression: str = "") -> tuple[str, str, list[Any]]:
        """The grader's own code: the reply's status, what the expression gives as text, and the outputs."""
        sink = _Sink(100_000, Budget())
        expressions = {"answer": expression} if expression else {}
        reply = self.execute(code, Budget.cell_seconds, sink, silent=True, expressions=expressions)
        status = _text(reply.get("ename") if reply.get("status") == "error" else reply.get("status"))
        found: Any = reply
        for name in ("user_expressions", "answer", "data", "text/plain"):
            found = found.get(name) if isinstance(found, dict) else None
        return status, _text(found or ""), sink.outputs()

    def execute(
        self,
        code: str,
        seconds: float,
        sink: _Sink,
        *,
        silent: bool = False,
        expressions: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Runs a cell and returns the content of its reply. Raises _Stopped."""
        request = {
            "code": code, "silent": silent, "store_history": not silent, "allow_stdin": False,
            "user_expressions": dict(expressions or {}), "stop_on_error": False,
        }  # fmt: skip
        sent: Any = self.session.send(self.shell, "execute_request", request)
        own = sent["header"]["msg_id"]
        until, why = time.monotonic() + seconds, ""
        reply: Mapping[str, Any] | None = None
        idle = False
        while reply is None or not idle:
            now = time.monotonic()
            if now > until:
                if reply is not None:
                    break  # the reply is here and the channel of outputs stays silent: go on without it
                if why:
                    raise _Stopped(f"{why}, and an interrupt didn't help")
                why, until = f"no answer within {seconds:g} s", now + sink.budget.grace_seconds
                self.kernel.interrupt()
            quiet = True
            for channel, kind, parent, content, size in self._messages(200):
                quiet = False
                sink.received += size
                if parent != own:
                    continue
                if content is None:
                    sink.too_large()
                elif channel == "shell" and kind == "execute_reply":
                    reply, until = content, time.monotonic() + 2
                elif channel == "iopub" and kind == "status":
                    idle |= content.get("execution_state") == "idle"
                elif channel == "iopub":
                    sink.add(kind, content)
            if sink.received > sink.budget.flood and not why and reply is None:
                why, until = (
                    f"it printed more than {format_bytes(sink.budget.flood)}",
                    now + sink.budget.grace_seconds,
                )
                self.kernel.interrupt()
            if quiet and self.kernel.poll() is not None:
                raise _Stopped(_death(self.kernel.ended or ""))
        if not idle:  # a message was too large and ended the connection
            self.wait_until_ready(seconds)
        return reply

    def _messages(self, milliseconds: int) -> Iterator[tuple[str, str, str, Mapping[str, Any] | None, int]]:
        """(channel, kind, id of the request, content, bytes); content None where it is too large to read."""
        ready = dict(self.poller.poll(milliseconds))
        parts: Any
        for socket, channel in ((self.iopub, "iopub"), (self.shell, "shell")):
            if socket not in ready:
                continue
            for _ in range(32):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                size = sum(map(len, frames))
                try:
                    _, parts = self.session.feed_identities(frames)
                    if size > 8 * MB:
                        parent = json.loads(parts[2]).get("msg_id", "")
                        yield channel, "", parent, None, size
                        continue
                    message = self.session.deserialize(parts)
                    content: Any = message["content"]
                    if isinstance(content, dict):
                        parent = message["parent_header"].get("msg_id", "")
                        yield channel, str(message["msg_type"]), str(parent), content, size
                except Exception:  # whatever a hostile kernel sends is no message
                    yield channel, "", "", {}, size


def _death(ended: str) -> str:
    if ended == "too much memory":
        return "it used more memory than a submission may"
    reasons = {"signal 24": "its processor time was used up", "signal 25": "a file grew too large"}
    return reasons.get(ended, "the kernel died while this cell ran")


Ask = Callable[[str, str], tuple[str, str, list[Any]]]
