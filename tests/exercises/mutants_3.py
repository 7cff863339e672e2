"""Planted wrong answers of chapter 3: exercise -> what is wrong -> edits of the solution, each (old, new)."""

CHAPTER = "03_deep"

_GRADIENTS = "return None, *(next(found) if t.requires_grad else None for t in (x, *parameters))"
_LOOP = """    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x"""

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "3.1": {
        "the article's guess: 1 MB a layer": [("sum(found.values())", "152 * len(images) * 10**6")],
        "addresses that are all 0": [
            ("found[storage._cdata] =", "found[storage.data_ptr()] ="),
        ],
        "one storage counted for each tensor": [
            ("found[storage._cdata] = storage.nbytes()", "found[len(found)] = storage.nbytes()")
        ],
        "weights counted with the activations": [("if storage._cdata not in own:", "if True:")],
        "elements for bytes": [("= storage.nbytes()", "= t.numel()")],
        "buffers counted with the parameters": [
            (
                "sum(p.numel() for p in model.parameters())",
                "sum(t.numel() for t in model.state_dict().values())",
            )
        ],
        "GB": [("sum(found.values())", "sum(found.values()) / 1e9")],
        "frozen parameters left out": [
            (
                "p.numel() for p in model.parameters()",
                "p.numel() for p in model.parameters() if p.requires_grad",
            )
        ],
        "one number": [("sum(p.numel() for p in model.parameters()), ", "")],
        "buffers counted with the activations": [
            ("(*model.parameters(), *model.buffers())", "model.parameters()")
        ],
        "of a slice its numbers, not its storage": [("= storage.nbytes()", "= t.nbytes")],
        "the hook returns t itself": [("return t.detach()", "return t")],
    },
    "3.2": {
        "the article's formula: g + dL/dF": [("skip + J.T @ g", "2 * skip")],
        "J for its transpose": [("skip + J.T @ g", "skip + J @ g")],
        "the branch alone": [("skip + J.T @ g", "J.T @ g")],
        "the skip alone": [("skip + J.T @ g", "skip")],
        "the projection forgotten": [("g if P is None else P.T @ g", "g")],
        "the projection not transposed": [("P.T @ g", "P @ g")],
        "the projection for the branch": [("skip + J.T @ g", "skip + (J.T @ g if P is None else 0)")],
    },
    "3.3": {
        "the skip has no effect": [("x = x + y if skip else y", "x = y")],
        "a skip everywhere": [("x = x + y if skip else y", "x = x + y")],
        "no activation": [("y = torch.tanh(y)", "y = 1.0 * y")],
        "ReLU for tanh": [("torch.tanh(y)", "torch.relu(y)")],
        "the init has no effect": [('if init == "xavier":', "if False:")],
        "Xavier always": [('if init == "xavier":', "if True:")],
        "the norm has no effect": [('if norm == "layer":', "if False:")],
        "the norm squared": [("gradient.norm().item()", "gradient.square().sum().item()")],
        "the gradient at the output": [
            ("torch.autograd.grad(x.sum(), x0)", "torch.autograd.grad(x.sum(), x)")
        ],
        "a tensor": [("gradient.norm().item()", "gradient")],
        "a tensor of one number": [("gradient.norm().item()", "gradient.norm()")],
        "Xavier with the default biases": [("            nn.init.zeros_(linear.bias)\n", "")],
    },
    "3.4": {
        "the plain step": [("return Checkpoint.apply(module, x, *module.parameters())", "return module(x)")],
        "PyTorch's own": [
            (
                "return Checkpoint.apply(module, x, *module.parameters())",
                "from torch.utils.checkpoint import checkpoint\n"
                "    return checkpoint(module, x.requires_grad_(), use_reentrant=True)",
            )
        ],
        "the course's own": [
            (
                "return Checkpoint.apply(module, x, *module.parameters())",
                "from memlab.techniques.checkpointing import recompute\n    return recompute(module, x)",
            )
        ],
        "the random state isn't restored": [("            torch.set_rng_state(ctx.rng_state)\n", "")],
        "the generator is left behind": [(", torch.random.fork_rng(devices=[])", "")],
        "the graph of the first forward is kept": [
            (
                "        with torch.no_grad():\n            return module(x)",
                "        with torch.enable_grad():\n            ctx.y = module(x.detach().requires_grad_())\n"
                "        return ctx.y.detach()",
            )
        ],
        "the weights aren't handed over": [(", *module.parameters())", ")")],
        "no gradients for the weights": [
            (_GRADIENTS, "return None, next(found) if x.requires_grad else None, *(None for _ in parameters)")
        ],
        "gradients in another order": [
            ("for t in (x, *parameters))", "for t in (x, *parameters))[::-1]"),
            ("return None, *(next(found)", "return None, *tuple(next(found)"),
        ],
        "the gradient that comes in is ignored": [
            ("(y, wanted, gradient)", "(y, wanted, torch.ones_like(y) * 2)")
        ],
        "the second forward starts from x itself": [
            ("x.detach().requires_grad_(x.requires_grad)", "x.requires_grad_(x.requires_grad)")
        ],
    },
    "3.5": {
        "every block a segment": [("return min(plans, key=peak)", "return [1] * min(blocks, extra)")],
        "the whole model in one": [("return min(plans, key=peak)", "return [min(blocks, extra)]")],
        "sqrt(N), whatever a block saves": [
            (
                "return min(plans, key=peak)",
                "k = round(blocks**0.5)\n    return [k] * (min(blocks, extra) // k)",
            )
        ],
        "the budget ignored": [("max(blocks - extra, 0)", "0")],
        "the plain tail forgotten": [
            (
                "max([tail, *plan]) * inside",
                "max([0, *plan]) * inside + (tail > blocks - extra) * blocks * inside",
            )
        ],
        "the inputs forgotten": [("len(plan) * boundary + ", "")],
        "no segment": [("return min(plans, key=peak)", "return []")],
        "one length for a list": [("return min(plans, key=peak)", "return min(plans, key=peak)[0]")],
    },
    "3.6": {
        "the article's snippet": [(_LOOP, "    return checkpoint(torch.nn.Sequential(*blocks), x)")],
        "the whole model in one segment": [
            (_LOOP, "    return checkpoint(torch.nn.Sequential(*blocks), x, use_reentrant=False)")
        ],
        "a block each, still reentrant": [("use_reentrant=False", "use_reentrant=True")],
        "an input that needs a gradient, still reentrant": [
            ("    for block in blocks:", "    x = x.detach().requires_grad_()\n    for block in blocks:"),
            (", use_reentrant=False", ""),
        ],
        "nothing checkpointed": [("x = checkpoint(block, x, use_reentrant=False)", "x = block(x)")],
        "the last half only": [
            (
                "    for block in blocks:",
                "    x = torch.nn.Sequential(*blocks[:6])(x)\n    for block in blocks[6:]:",
            )
        ],
        "detached between the blocks": [("checkpoint(block, x, ", "checkpoint(block, x.detach(), ")],
        "the article's stages: only what trains is kept": [
            ("layers - min(trained) + 1 if trained else 0", "len(trained)")
        ],
        "frozen layers keep nothing": [
            ("layers - min(trained) + 1 if trained else 0", "len(trained) + 1 if trained else 0")
        ],
        "the first named for the lowest": [("min(trained)", "trained[0]")],
        "nothing trains, something is kept": [
            ("layers - min(trained) + 1 if trained else 0", "layers - min(trained, default=0) + 1")
        ],
    },
}
