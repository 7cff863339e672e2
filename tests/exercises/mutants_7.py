"""Planted wrong answers of chapter 7: exercise -> what is wrong -> edits of the solution, each (old, new)."""

# ruff: noqa: E501

CHAPTER = "07_faq"

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "7.1": {
        "the article's one more each time": [
            ("low, high = high, 2 * high", "low, high = high, high + 1"),
        ],
        "doubling alone": [("while high - low > 1:", "while False:")],
        "always at least one": [("return max(min(low, 1), low - math.ceil(margin * low))", "return max(1, low - math.ceil(margin * low))")],
        "no margin": [("low - math.ceil(margin * low)", "low")],
        "rounded up": [("math.ceil(margin", "math.floor(margin")],
        "the first that fails": [("low - math.ceil(margin * low)", "high - math.ceil(margin * high)")],
        "the limit forgotten": [("high <= limit and fits(high)", "fits(high)"), ("high = min(high, limit + 1)", "pass")],
        "every error is lack of memory": [("except torch.OutOfMemoryError:", "except Exception:")],
        "the errors kept": [
            ("def fits(b):", "errors = []\n\n    def fits(b):"),
            ("except torch.OutOfMemoryError:", "except torch.OutOfMemoryError as error:\n            errors.append(error)"),
        ],
        "the search goes on inside except": [
            ("except torch.OutOfMemoryError:\n            return False", "except torch.OutOfMemoryError:\n            if b == 1:\n                return False\n            low, high = b // 2, b\n            while high - low > 1:\n                middle = (low + high) // 2\n                try:\n                    step(middle)\n                    low = middle\n                except torch.OutOfMemoryError:\n                    high = middle\n            found.append(low)\n            return False"),
            ("def fits(b):", "found = []\n\n    def fits(b):"),
            ("high = min(high, limit + 1)", "if found:\n        low, high = found[0], found[0] + 1\n    high = min(high, limit + 1)"),
        ],
    },
    "7.2": {
        "the article's exactly equivalent": [
            ('stays["with Dropout(0.3), preserve_rng_state=False"] = False', 'stays["with Dropout(0.3), preserve_rng_state=False"] = True'),
            ('stays["with BatchNorm"] = False', 'stays["with BatchNorm"] = True'),
            ('stays["scaled by random.random()"] = False', 'stays["scaled by random.random()"] = True'),
        ],
        "dropout differs": [('stays["with Dropout(0.3)"] = True', 'stays["with Dropout(0.3)"] = False')],
        "batch norm stays": [('stays["with BatchNorm"] = False', 'stays["with BatchNorm"] = True')],
        "only torch seeded": [("        random.seed(0)\n", "")],
        "never seeded": [("        torch.manual_seed(0)\n", "")],
        "no checkpoint": [("if checkpointed else module(x_in)", "if checkpointed == 2 else module(x_in)")],
        "options forgotten": [(", **options) if", ") if")],
        "buffers before the backward": [
            ("        y.square().sum().backward()\n", "        buffers = [t.clone() for t in module.buffers()]\n        y.square().sum().backward()\n"),
            ("list(module.buffers())", "buffers"),
        ],
        "the input's gradient alone": [("[x_in.grad, *(p.grad for p in module.parameters())]", "[x_in.grad * 0]")],
        "always equal": [("all(map(torch.equal, plain[part], again[part]))", "True")],
    },
    "7.3": {
        "the article's little and much": [
            ('4 * 2 * tokens * h if kind == "tp"', '2 * tokens * h if kind == "tp"'),
        ],
        "two all-reduces a layer": [("4 * 2 * tokens * h", "2 * 2 * tokens * h")],
        "an all-reduce counted once": [("4 * 2 * tokens * h", "4 * tokens * h")],
        "gathered once": [("3 * 12 * h * h", "2 * 12 * h * h")],
        "the article's two matrices": [("3 * 12 * h * h", "3 * 2 * h * h")],
        "the whole tensor sent": [("* (ranks - 1) // ranks", "")],
        "pipeline times layers": [("return 2 * tokens * h * size", "return layers * 2 * tokens * h * size")],
        "elements": [("return layers * whole * size", "return layers * whole"), ("tokens * h * size", "tokens * h")],
        "floats": [("//", "/")],
        "the break-even of one all-reduce": [("(8 * h)", "(4 * h)")],
    },
    "7.4": {
        "the article's code": [
            (
                "    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)",
                "    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5\n"
                "    if causal:\n"
                "        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float('-inf'))\n"
                "    if mask is not None:\n"
                "        scores = scores.masked_fill(~mask, float('-inf'))\n"
                "    out = F.dropout(scores.softmax(-1), p) @ v",
            ),
            ("import torch.nn.functional as F", "import torch\nimport torch.nn.functional as F"),
        ],
        "the layout ignored": [('if layout == "bshd":\n', 'if layout == "never":\n'), ('if layout == "bshd" else out', 'if layout == "never" else out')],
        "not turned back": [('out.transpose(1, 2) if layout == "bshd" else out', "out")],
        "viewed, not transposed": [("(t.transpose(1, 2) for t in (q, k, v))", "(t.reshape(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v))"), ("out.transpose(1, 2) if", "out.reshape(out.shape[0], out.shape[2], out.shape[1], out.shape[3]) if")],
        "the mask upside down": [("~padding", "padding")],
        "no padding": [("attn_mask=mask, ", "")],
        "never causal": [("is_causal=causal", "is_causal=False")],
        "dropout in evaluation": [("dropout if training else 0.0", "dropout")],
        "never dropout": [("dropout if training else 0.0", "0.0")],
        "a mask of tokens x tokens": [
            ("p = dropout", "if causal:\n        mask, causal = torch.ones(q.shape[0], q.shape[1], q.shape[2], q.shape[2]).tril().log(), False\n    p = dropout"),
            ("import torch.nn.functional as F", "import torch\nimport torch.nn.functional as F"),
        ],
    },
    "7.5": {
        "the article's num_workers alone": [("        persistent_workers=True,\n", "")],
        "no workers": [("num_workers=workers,\n        persistent_workers=True,", "num_workers=0,")],
        "one worker": [("num_workers=workers", "num_workers=1")],
        "the sampler forgotten": [("batch_sampler=loader.batch_sampler", "batch_size=loader.batch_size")],
        "shuffled": [("batch_sampler=loader.batch_sampler", "batch_size=loader.batch_size, shuffle=True, drop_last=loader.drop_last")],
        "collate_fn forgotten": [("        collate_fn=loader.collate_fn,\n", "")],
        "drop_last forgotten": [("batch_sampler=loader.batch_sampler", "batch_size=loader.batch_size, sampler=loader.sampler")],
        "the same loader": [("return DataLoader(", "return loader\n    return DataLoader(")],
        "a list": [("return DataLoader(", "return list(loader)\n    return DataLoader(")],
    },
    "7.6": {
        "the article's 16 bytes and one activation": [
            ("return 4 * max(loss, last_block, first_block, step)", "return 16 * spec.blocks * 2 * h * h + 4 * spec.blocks * n * h")
        ],
        "the sum of all": [("4 * max(loss, last_block, first_block, step)", "4 * (always + weights + kept + again + 3 * n * v)")],
        "no activations": [("4 * max(loss, last_block, first_block, step)", "4 * max(first_block - inside, step)")],
        "foreach forgotten": [('(weights if spec.optimizer == "adamw-foreach" else 0)', "0")],
        "no scores": [("(spec.tokens if eager else 1)", "1")],
        "checkpointing forgotten": [("(n * h if spec.checkpoint else inside)", "inside")],
        "no logits": [("3 * n * v", "0")],
        "one moment": [('"adamw-foreach": 2, "adamw-fused": 2', '"adamw-foreach": 1, "adamw-fused": 1')],
        "elements": [("return 4 * max", "return max")],
        "it runs the model": [
            ("n, h, f, v = spec.batch", "from memlab.exercises.faq import Spec, probe_trace\n\n    return probe_trace(Spec(**vars(spec))).peak_bytes\n    n, h, f, v = spec.batch")
        ],
    },
}  # fmt: skip
