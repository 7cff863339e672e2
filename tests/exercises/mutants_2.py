"""Wrong answers to the exercises of chapter 2 that must lose points, as the source a student would write.

Exercise -> what is wrong -> the whole source of the student's cell.
"""

from __future__ import annotations

_STATES = """
def states(parameters, precision, optimizer, offload=False):
    weight = {weight}
    moments = {{"sgd": 0, "momentum": {momentum}, "adamw": {adam}, "adamw-8bit": {adam}}}[optimizer]
    moment = {moment}
    master = {master}
    return {{
        "parameters": {parameters},
        "gradients": parameters * weight,
        "optimizer_states": {states},
    }}
"""


def _states(**wrong: str) -> str:
    right = {
        "weight": '4 if precision in ("fp32", "amp-bf16") else 2',
        "momentum": "1",
        "adam": "2",
        "moment": '1 if optimizer == "adamw-8bit" else 2 if precision == "bf16" else 4',
        "master": '4 if precision == "bf16-master" else 0',
        "parameters": "parameters * weight",
        "states": "0 if offload else parameters * (moments * moment + master)",
    }
    return _STATES.format(**right | wrong)


_MEASURE = """
def measure_states(model, optimizer):
    def total(tree):
        tensors = [t for t in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(t)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    return {
        "parameters": total([*model.parameters(), *model.buffers()]),
        "gradients": total([p.grad for p in model.parameters() if p.grad is not None]),
        "optimizer_states": total(list(optimizer.state.values())),
    }


def step_peak(sizes, implementation):
    extra = {"foreach": sum(sizes), "for-loop": 2 * max(sizes), "fused": 0}[implementation]
    return 4 * (4 * sum(sizes) + extra)
"""

_NAIVE = """
def measure_states(model, optimizer):
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return {
        "parameters": sum(t.nbytes for t in [*model.parameters(), *model.buffers()]),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer_states": sum(t.nbytes for t in states),
    }


def step_peak""" + _MEASURE.split("def step_peak")[1]

_SAVED = """
def saved_bytes(module, *inputs):
    known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*inputs)
    return sum(found.values())
"""

_CARDS = """
def min_cards(parameters, bytes_per_parameter, card_bytes):
    return -(-parameters * bytes_per_parameter // card_bytes)


def train_days(parameters, tokens, cards, flops_per_second=140e12, recompute=True):
    flops = (8 if recompute else 6) * parameters * tokens
    return flops / (cards * flops_per_second) / 86_400
"""


def _act(**wrong: str) -> str:
    right = {
        "linear": "(18 if dropout else 16) * h + 4 * f",
        "scores": "4 * a * b * s if fused else (5 if dropout else 2) * a * b * s * s",
        "total": "L * (linear + scores)",
    } | wrong
    return f"""
def act_bytes(s, b, h, a, f, L, dropout=True, fused=False):
    linear = b * s * ({right["linear"]})
    scores = {right["scores"]}
    return {right["total"]}
"""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


MUTANTS: dict[str, dict[str, str]] = {
    "2.1": {
        "autocast halves everything": _states(
            weight='4 if precision == "fp32" else 2',
            moment='1 if optimizer == "adamw-8bit" else 2 if precision in ("bf16", "amp-bf16") else 4',
        ),
        "the master is a parameter": _states(
            parameters="parameters * (weight + master)",
            states="0 if offload else parameters * moments * moment",
        ),
        "a wrong key": _states().replace("optimizer_states", "optimizer"),
        "only one Adam moment": _states(adam="1"),
        "no master copy": _states(master="0"),
        "GB instead of bytes": _states(parameters="parameters * weight / 1e9"),
        "floats instead of ints": _states(states="float(parameters * (moments * moment + master))"),
        "moments are always fp32": _states(moment='1 if optimizer == "adamw-8bit" else 4'),
        "offloaded states are still counted": _states(states="parameters * (moments * moment + master)"),
        "an object that equals everything": """
class Any:
    def __eq__(self, other): return True
    def __hash__(self): return 0

def states(parameters, precision, optimizer, offload=False):
    return {"parameters": Any(), "gradients": Any(), "optimizer_states": Any()}
""",
    },
    "2.2": {
        "the naive sum over tensors": _NAIVE,
        "each view counted, storages not in full": _changed(
            _MEASURE,
            "sum(storage.nbytes() for storage in storages.values())",
            "sum(t.nbytes for t in tensors)",
        ),
        "a shared storage counted for each view": _changed(
            _MEASURE,
            "sum(storage.nbytes() for storage in storages.values())",
            "sum(t.untyped_storage().nbytes() for t in {id(t): t for t in tensors}.values())",
        ),
        "the list in the state overlooked": _changed(
            _MEASURE,
            "list(optimizer.state.values())",
            "[t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]",
        ),
        "forgets the buffers": _changed(
            _MEASURE, "[*model.parameters(), *model.buffers()]", "list(model.parameters())"
        ),
        "what is saved for what is held": _changed(
            _MEASURE, "[*model.parameters(), *model.buffers()]", "list(model.state_dict().values())"
        ),
        "gradients of the optimizer's parameters": _changed(
            _MEASURE,
            "[p.grad for p in model.parameters() if p.grad is not None]",
            "[p.grad for group in optimizer.param_groups for p in group['params']]",
        ),
        "two moments assumed, not measured": _changed(
            _MEASURE, "total(list(optimizer.state.values()))", "2 * sum(p.nbytes for p in model.parameters())"
        ),
        "the step counters left out": _changed(
            _MEASURE, "if torch.is_tensor(t)]", "if torch.is_tensor(t) and t.dim()]"
        ),
        "a step needs no temporaries": _changed(_MEASURE, "4 * sum(sizes) + extra", "4 * sum(sizes)"),
        "the loop keeps three of the largest": _changed(_MEASURE, "2 * max(sizes)", "3 * max(sizes)"),
        "the last tensor for the largest": _changed(_MEASURE, "2 * max(sizes)", "2 * sizes[-1]"),
        "the first tensor for the largest": _changed(_MEASURE, "2 * max(sizes)", "2 * sizes[0]"),
        "only the first function written": _changed(
            _MEASURE,
            '    extra = {"foreach": sum(sizes), "for-loop": 2 * max(sizes), "fused": 0}[implementation]\n'
            "    return 4 * (4 * sum(sizes) + extra)",
            '    raise NotImplementedError("exercise 2.2")',
        ),
    },
    "2.3": {
        "parameters counted as saved": _changed(_SAVED, "if storage.data_ptr() not in known:", "if True:"),
        "a shared storage counted twice": _changed(
            _SAVED, "found[storage.data_ptr()] =", "found[len(found)] ="
        ),
        "buffers counted as saved": _changed(
            _SAVED, "[*module.parameters(), *module.buffers()]", "module.parameters()"
        ),
        "shapes instead of storages": _changed(_SAVED, "storage.nbytes()", "t.nbytes"),
        "the pack hook returns the tensor itself": _changed(_SAVED, "return t.detach()", "return t"),
        "keeps the tensors to count them later": _changed(
            _SAVED,
            "found[storage.data_ptr()] = storage.nbytes()",
            "found[storage.data_ptr()] = storage.nbytes(); KEPT.append(t)",
        )
        + "\n\nKEPT = []\n",
        "input and output of the module": """
def saved_bytes(module, *inputs):
    return sum(t.nbytes for t in (*inputs, module(*inputs)))
""",
        "the input, frozen or not": """
def saved_bytes(module, *inputs):
    return sum(x.nbytes for x in inputs)
""",
        "KiB instead of bytes": _changed(_SAVED, "sum(found.values())", "sum(found.values()) / 1024"),
        "always nothing": """
def saved_bytes(module, *inputs):
    return 0
""",
    },
    "2.4": {
        "the article's formula: one 16-bit tensor per layer": """
def act_bytes(s, b, h, a, f, L, dropout=True, fused=False):
    return L * s * b * h * 2
""",
        "the formula of the text, whatever is asked": _act(linear="34 * h", scores="5 * a * b * s * s"),
        "no scores": _act(scores="0"),
        "without dropout only the mask goes": _act(
            scores="4 * a * b * s if fused else (5 if dropout else 4) * a * b * s * s"
        ),
        "fused keeps a mask": _act(
            scores="a * b * s * (4 + s * dropout) if fused else (5 if dropout else 2) * a * b * s * s"
        ),
        "fused without its statistic": _act(scores="0 if fused else (5 if dropout else 2) * a * b * s * s"),
        "the MLP is always 4h": _act(linear="(18 if dropout else 16) * h + 16 * h"),
        "GB instead of bytes": _act(total="L * (linear + scores) / 1e9"),
        "one layer": _act(total="linear + scores"),
        "a fraction cut off": """
def act_bytes(s, b, h, a, f, L, dropout=True, fused=False):
    scores = 4 * a // h if fused else (5 if dropout else 2) * a * s // h
    return L * s * b * h * ((18 if dropout else 16) + 4 * f // h + scores)
""",
    },
    "2.5": {
        "rounded down": _changed(
            _CARDS,
            "-(-parameters * bytes_per_parameter // card_bytes)",
            "parameters * bytes_per_parameter // card_bytes",
        ),
        "always one more": _changed(
            _CARDS,
            "-(-parameters * bytes_per_parameter // card_bytes)",
            "parameters * bytes_per_parameter // card_bytes + 1",
        ),
        "every card is 80 GB": _changed(_CARDS, "// card_bytes", "// (80 * 10**9)"),
        "GiB for GB": _changed(_CARDS, "// card_bytes", "// round(card_bytes * 1.073741824)"),
        "a card and a half": _changed(
            _CARDS,
            "-(-parameters * bytes_per_parameter // card_bytes)",
            "parameters * bytes_per_parameter / card_bytes",
        ),
        "seconds": _changed(_CARDS, " / 86_400", ""),
        "one card does all": _changed(_CARDS, "(cards * flops_per_second)", "flops_per_second"),
        "only the forward": _changed(_CARDS, "(8 if recompute else 6)", "2"),
        "recomputation is free": _changed(_CARDS, "(8 if recompute else 6)", "6"),
    },
}
