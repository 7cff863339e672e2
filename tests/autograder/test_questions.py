"""The sandbox's copy of memlab: every question, and no answer that a question can be drawn without."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memlab
from autograder.questions import defines, reached, without_answers
from memlab.exercises import CHAPTERS

#: What the copy keeps although a score uses it too. Each draws a question, is what an answer is handed, or
#: reads a value: a name that comes here must tell nobody what is right.
SHARED = {
    "1": (
        "_Bench",
        "_Sizes",
        "_benches",
        "_cards",
        "_chips",
        "_machines",
        "_row",
        "_sizes",
        "_transfers",
        "_ways",
    ),
    "2": (
        "_Model",
        "_cards_2_5",
        "_dims_2_3",
        "_models_2_2",
        "_random",
        "_recipes_2_1",
        "_runs_2_5",
        "_shapes_2_4",
        "_sizes_2_2",
    ),
    "3": (
        "_Chain",
        "_ResNetCase",
        "_Vjp",
        "_chains",
        "_equal",
        "_frozen_cases",
        "_plan_fault",
        "_resnets",
        "_stacks",
        "_value",
        "_vjp_cases",
    ),
    "4": (
        "_Attention",
        "_Sharded",
        "_Split",
        "_attentions",
        "_configs",
        "_kind",
        "_linears",
        "_long",
        "_numbered",
        "_score_cases",
        "_shardeds",
        "_splits",
        "_value",
        "_zeros",
        "model_config",
    ),
    "5": (
        "_Group",
        "_Length",
        "_Offload",
        "_Schedule",
        "_batches_5_2",
        "_groups_5_3",
        "_images_5_2",
        "_lengths_5_1",
        "_neighbours",
        "_offloads_5_6",
        "_random",
        "_rooms_5_2",
        "_schedules_5_4",
        "_values_5_5",
        "_without",
        "block_law",
        "unfelt",
    ),
    "6": (
        "Plan",
        "Row",
        "Shape",
        "Task",
        "Way",
        "_counts",
        "_edge",
        "_hidden_ways",
        "_known_ways",
        "_plans",
        "_priced",
        "_random",
        "_rows",
        "_shapes",
        "_tasks",
        "_way",
        "_width",
        "candidates",
        "transformer",
    ),
    "7": (
        "Odd",
        "Spec",
        "_Attend",
        "_Loading",
        "_Search",
        "_Sent",
        "_attends",
        "_hidden_modules",
        "_kind",
        "_loadings",
        "_long_attends",
        "_searches",
        "_sents",
        "_specs",
    ),
}


def both(chapter: str) -> tuple[ast.Module, ast.Module]:
    """A chapter's module and its copy."""
    source = (Path(memlab.__file__).parent / "exercises" / f"{CHAPTERS[chapter]}.py").read_text("utf-8")
    return ast.parse(source), ast.parse(without_answers(source))


def callables(tree: ast.Module) -> set[str]:
    return {s.name for s in tree.body if isinstance(s, ast.FunctionDef | ast.ClassDef)}


def scorers(tree: ast.Module) -> set[str]:
    """Functions and classes that the scores of a module reach."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Exercise"]
    found = reached(tree, [ast.unparse(call.args[4]) for call in calls])
    return {name for s in tree.body if id(s) in found for name in defines(s)} & callables(tree)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_is_left_of_what_scores_use_are_questions(chapter: str) -> None:
    whole, copy = both(chapter)
    assert sorted(scorers(whole) & callables(copy)) == sorted(SHARED[chapter])


def test_what_returns_a_right_answer_is_gone() -> None:
    gone = {"3": {"resnet_saved_bytes", "uniform_segments", "frozen_units"}, "2": {"_optimizer_state"}}
    for chapter, names in gone.items():
        whole, copy = both(chapter)
        assert names <= callables(whole) and not names & callables(copy)


def test_a_case_keeps_what_its_question_needs_and_loses_what_is_right() -> None:
    copy = without_answers("""
class _Case(NamedTuple):
    n: int
    def given(self): return helper(self.n)
    def expected(self): return answer(self.n)
class Handed:
    def for_the_student(self): return other()
def helper(n): return n
def answer(n): return 2 * n
def other(): return 1
def evidence(f, seed):
    answer = f
    return {"a": call(answer, _Case(seed).given(), Handed())}
def score(evidence, seed): return _Case(seed).expected()
EXERCISES = (Exercise("9.1", "answer", 1, evidence, score, "nowhere"),)
""")
    names = {n.name for n in ast.walk(ast.parse(copy)) if isinstance(n, ast.FunctionDef)}
    assert names == {"given", "helper", "for_the_student", "other", "evidence"}
