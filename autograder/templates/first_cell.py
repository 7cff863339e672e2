# Colab only: installs memlab and nothing else, once. Anywhere else, and the second time, this does nothing.
import importlib.util
import subprocess
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("memlab") is None:
    address = "https://github.com/memlab-course/memlab/archive/refs/heads/main.zip"
    pip = f"-m pip install --quiet --disable-pip-version-check --no-deps {address}".split()
    done = subprocess.run([sys.executable, *pip], capture_output=True, text=True)
    if done.returncode:
        why = next(
            (line for line in done.stderr.splitlines() if line.startswith("ERROR: ")), "no reason given"
        )

        class NotInstalled(Exception):
            def _render_traceback_(self):  # in a notebook: the message, without a traceback
                return [str(self)]

        raise NotInstalled(
            f"memlab isn't installed. Check the network and this address, {address}, "
            f"then run this cell again. pip says: {why.removeprefix('ERROR: ')}"
        )
    importlib.invalidate_caches()

    from memlab.chapter import versions

    print(versions())
