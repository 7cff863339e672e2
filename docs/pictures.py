"""Makes the README's pictures: python -m docs.pictures (Chromium and a few minutes)

timeline.png is a figure of the library; viewer.png the viewer of the same step; calculator.png the site's
calculator; explorer.gif the explorer of chapter 2 in JupyterLab, with a kernel behind it.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image
from playwright.sync_api import sync_playwright

import memlab
from docs.calculator.build import build
from memlab import plots, viewer
from tests.browser import CHROMIUM, ROOT, Watched
from tests.browser.server import home, jupyter
from tests.browser.test_calculator import Page, Server
from tests.browser.test_lab import Student

HERE = Path(__file__).parent / "images"
CELL = "from memlab import widgets\nwidgets.four_consumers(model='gpt2', gpu='T4')"
HEIGHT = 780  # of the GIF


def main() -> None:
    trace = memlab.trace_step("gpt2", micro_batch=4, sequence=512, precision="fp32")
    title = "GPT-2, one fp32 AdamW step of 4 x 512 tokens"
    figure = plots.timeline(trace, title=f"{title}: the peak is in the backward")
    figure.savefig(HERE / "timeline.png", dpi=110)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with Watched(browser, width=1100, height=900) as reader:
            reader.page.set_content(viewer.viewer_html(trace, title=title))
            reader.page.wait_for_selector("html[data-ready=true]")
            reader.page.wait_for_timeout(500)
            save(reader.page.screenshot(), "viewer.png")
        with tempfile.TemporaryDirectory() as scratch:
            build(Path(scratch))
            server = Server(Path(scratch))
            with Page(browser, server.address, width=1180, height=860) as engineer:
                engineer.open()
                save(engineer.page.screenshot(), "calculator.png")
            server.shutdown()
        with tempfile.TemporaryDirectory() as scratch:
            explorer(browser, Path(scratch))
        browser.close()


def save(screenshot: bytes, name: str) -> None:
    picture = Image.open(io.BytesIO(screenshot))
    few = picture.convert("RGB").quantize(palette=palette(picture, 128), dither=Image.Dither.NONE)
    few.save(HERE / name, optimize=True)


def explorer(browser: Any, folder: Path) -> None:
    """explorer.gif: a slider by keyboard, another card's worth of batch, checkpoints, a trace."""
    (folder / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        (folder / "notebooks" / path.name).write_bytes(path.read_bytes())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "notebooks" / "explorer.ipynb")
    command = ("-m", "autograder.lab", "--notebooks", f"{folder}/notebooks", "--out", f"{folder}/out")
    with (
        jupyter(command, ROOT, folder / "log", home(folder / "home")) as address,
        Student(browser, address, width=1280, height=1000) as student,
    ):
        page = student.page
        student.open("explorer")
        student.run_all(60)
        box = page.locator(".memlab-explorer")
        box.wait_for()
        page.wait_for_timeout(1500)
        frames: list[tuple[Image.Image, int]] = []

        def frame(milliseconds: int) -> None:
            box.evaluate("e => e.scrollIntoView({block: 'start'})")
            page.wait_for_timeout(350)
            at = box.bounding_box()
            clip = {"x": at["x"] - 8, "y": at["y"], "width": at["width"] + 16, "height": HEIGHT}
            frames.append((Image.open(io.BytesIO(page.screenshot(clip=clip))), milliseconds))

        frame(1500)
        slider = box.get_by_role("slider", name="Micro-batch")
        for _ in range(7):
            slider.focus()
            page.keyboard.press("ArrowRight")
            frame(500)
        frames[-1] = (frames[-1][0], 2000)
        box.get_by_role("combobox", name="Checkpointing", exact=True).select_option("full")
        frame(2500)
        box.get_by_role("button", name="Trace it").click()
        frame(800)
        box.get_by_role("status").filter(has_text="Traced:").wait_for(timeout=90_000)
        frame(4000)
    colours = palette(frames[-1][0], 64)
    images = [image.convert("RGB").quantize(palette=colours, dither=Image.Dither.NONE) for image, _ in frames]
    images[0].save(
        HERE / "explorer.gif", save_all=True, append_images=images[1:], loop=0, optimize=True,
        duration=[duration for _, duration in frames],
    )  # fmt: skip


def palette(picture: Image.Image, colours: int) -> Image.Image:
    """A picture's main colours, those of the consumers among them however small they are drawn."""
    wanted = [*plots.COLOURS.values(), plots.LIMIT]
    strip = Image.new("RGB", (picture.width, picture.height + 40 * len(wanted)))
    strip.paste(picture, (0, 0))
    for number, colour in enumerate(wanted):
        strip.paste(
            colour, (0, picture.height + 40 * number, picture.width, picture.height + 40 * (number + 1))
        )
    return strip.quantize(colours)


if __name__ == "__main__":
    main()
