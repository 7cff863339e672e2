"""A class of honest, broken and hostile submissions: each with what must come of it.

    python -m tests.submissions OUT          writes a course, the class, and expected.json under OUT
    cd OUT && autograder grade submissions --out graded
    python -m tests.submissions OUT --compare    which of them came out otherwise

`case.py` has the tools, the other files the cases by kind. `harness.py` grades a class and counts the harm.
"""

from tests.submissions import attacks, cheating, damage, honest, lms, resources
from tests.submissions.case import CASES, Case

__all__ = ["CASES", "Case", "attacks", "cheating", "damage", "honest", "lms", "resources"]
