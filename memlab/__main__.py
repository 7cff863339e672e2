"""The console script `memlab`, and `python -m memlab`."""

import os
import signal


def main() -> None:
    """Runs the command line; from its first line on, Ctrl-C ends it quietly with 130."""
    # In the midst of a step an interrupt would often be raised, and lost, inside a finalizer.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from memlab.cli import main as run

    run()


if __name__ == "__main__":
    main()
