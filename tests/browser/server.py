"""JupyterLab for as long as a test looks at it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

TOKEN = "a-token-of-a-test"


@contextmanager
def jupyter(command: Sequence[str], cwd: Path, log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of the JupyterLab that `python COMMAND` starts in `cwd`; its kernels end with it."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"ServerApp.port": port, "ServerApp.port_retries": 0, "IdentityProvider.token": TOKEN}
    options = ["--no-browser", *(f"--{name}={value}" for name, value in settings.items())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *options],
            cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={TOKEN}", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, log.read_text("utf-8", "replace")
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def home(folder: Path) -> dict[str, str]:
    """The environment of a user who never started JupyterLab, and who has no points yet."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run"}
    places |= {"HOME": "", "IPYTHONDIR": "ipython", "MEMLAB_HOME": "memlab"}
    left = {k: v for k, v in os.environ.items() if not k.startswith(("MEMLAB_", "JUPYTER"))}
    return left | {key: str(folder / name) for key, name in places.items()}
