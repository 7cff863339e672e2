"""python execute.py NOTEBOOK FOLDER: every cell, by this environment's nbclient; the result in FOLDER.

Runs in environments that have neither memlab's tools nor pytest. A failing cell doesn't stop it.
"""

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import nbformat  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbclient.exceptions import DeadKernelError  # noqa: E402

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
notebook = nbformat.read(source, as_version=4)
client = NotebookClient(
    notebook, timeout=600, startup_timeout=120, kernel_name="python3", allow_errors=True, record_timing=False
)
try:
    client.execute(cwd=str(folder))
except DeadKernelError:
    sys.exit("the kernel died")
finally:
    nbformat.write(notebook, folder / source.name)
