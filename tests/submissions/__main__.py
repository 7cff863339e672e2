"""`python -m tests.submissions OUT`: writes the class. With --compare: what came out otherwise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.submissions.harness import CASES, deviations, make_class


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "out", type=Path, help="a folder that doesn't exist yet; with --compare, one that does"
    )
    parser.add_argument("--compare", action="store_true", help="compare OUT/graded with OUT/expected.json")
    parser.add_argument("--honest", type=int, default=50, help="honest students beside the cases")
    parser.add_argument("--kind", action="append", help="only cases of this kind; may be given again")
    parser.add_argument("--case", action="append", help="only this case; may be given again")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args()
    chosen = [
        case for case in CASES.values()
        if (not options.kind or case.kind in options.kind) and (not options.case or case.name in options.case)
    ]  # fmt: skip
    if options.list:
        for case in chosen:
            print(f"{case.kind:<10} {case.name:<40} {case.doc.splitlines()[0]}")
        return 0
    if options.compare:
        wrong = deviations(options.out, options.out / "graded")
        for name, fault in wrong.items():
            print(f"{name}: {fault}")
        return 1 if wrong else 0
    if options.out.exists():
        print(f"{options.out} exists already: choose another folder", file=sys.stderr)
        return 2
    made = make_class(options.out.resolve(), chosen, options.honest)
    print(f"{len(made)} submissions in {options.out / 'submissions'}; now, in {options.out}:")
    print("autograder grade submissions --out graded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
