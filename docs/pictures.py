"""Makes the README's picture: python docs/pictures.py"""

from pathlib import Path

import memlab
from memlab import plots

HERE = Path(__file__).parent / "images"


def main() -> None:
    trace = memlab.trace_step("gpt2", micro_batch=4, sequence=512, precision="fp32")
    figure = plots.timeline(
        trace, title="GPT-2, one fp32 AdamW step of 4 x 512 tokens: the peak is in the backward"
    )
    figure.savefig(HERE / "timeline.png", dpi=110)


if __name__ == "__main__":
    main()
