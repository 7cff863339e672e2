"""What the writer of the gradebook owes to a run that is interrupted."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from autograder.gradebook import interrupts_wait


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_an_entry_is_made(name: signal.Signals) -> None:
    done = []
    before = signal.getsignal(name)
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        try:
            os.kill(os.getpid(), name)
            done.append("entered")
        except KeyboardInterrupt:  # as nbgrader does
            done.append("faulty")
    assert done == ["entered"]
    assert signal.getsignal(name) is before


def test_an_interrupt_is_told_in_place_of_what_it_broke() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("a child process was interrupted too")


def test_other_threads_and_quiet_blocks_change_nothing() -> None:
    def work() -> None:
        with interrupts_wait():
            ran.append(True)

    ran: list[bool] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert ran == [True, True]
