"""Planted wrong answers of chapter 6: exercise -> what is wrong -> edits of the solution, each (old, new)."""

# ruff: noqa: E501

CHAPTER = "06_combined"

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "6.1": {
        "the article's bf16 halves all": [
            ('items["total"] = sum(items.values())', 'items = {name: n // 2 for name, n in items.items()}\n    items["total"] = sum(items.values())')
        ],
        "stage 1 shards gradients": [("stage >= 2", "stage >= 1")],
        "only stage 3 shards": [("stage >= 1", "stage >= 3"), ("stage >= 2", "stage >= 3")],
        "gathered blocks divided": [("(2 * weight + gradient)", "(2 * weight + gradient) // N")],
        "one block gathered": [("(2 * weight + gradient)", "(weight + gradient)")],
        "the recomputed block forgotten": [("inputs + block if ckpt", "inputs if ckpt")],
        "activations divided by N": [("inputs + block if ckpt else m.layers * block", "(inputs + block if ckpt else m.layers * block) // N")],
        "one head's scores": [("mb * m.heads * s * s", "mb * s * s")],
        "logits in 16 bit alone": [("(2 + 4 + 4)", "2")],
        "the total without the logits": [("sum(items.values())", 'sum(items.values()) - items["logits"]')],
    },
    "6.2": {
        "the article's 10 bytes for bf16": [("moments = 2 if way.optimizer == \"adamw-8bit\" else 8 if master else 4", "moments = 2")],
        "no master weights": [("master = 4 if way.precision == \"bf16-master\" else 0", "master = 0")],
        "8-bit moments of half a byte": [("moments = 2 if", "moments = 1 if")],
        "fp32 gradients everywhere": [("gradients = 4 if way.fp32_gradients else 2", "gradients = 4")],
        "a foreach step is free": [("step = moments // 2 * P", "step = 0")],
        "tensor parallel's step is free": [("step = 4 * P", "step = 0")],
        "phases added": [("max(states / way.cards + rest, (states + step) / way.cards)", "(states + step) / way.cards + rest")],
        "frozen weights have gradients": [("2 * P + (2 + moments)", "4 * P + (2 + moments)")],
        "rest divided too": [("states / way.cards + rest", "(states + rest) / way.cards")],
        "marketed bytes and no context": [("card + 2 * 10**9 <= capacity", "card <= 90 * 10**9")],
    },
    "6.3": {
        "the article's halves": [("backward = 16 * P + kept\n", "backward = (16 * P + kept) // 2\n")],
        "accumulation changes nothing": [("if parts > 1 or not freed", "if not freed")],
        "gradients always there": [("if parts > 1 or not freed", "if True")],
        "freed gradients never come": [("max(12 * P + kept, 16 * P + block)", "12 * P + kept")],
        "fused takes 20": [("(20 if foreach else 16)", "20")],
        "foreach takes 16": [("(20 if foreach else 16)", "16")],
        "one moment": [("16 * P", "12 * P"), ("12 * P + kept, ", "8 * P + kept, ")],
        "activations in the step": [("optimizer = (20 if foreach else 16) * P", "optimizer = (20 if foreach else 16) * P + kept")],
        "always the backward": [('phase = "backward" if backward >= optimizer else "optimizer"', 'phase = "backward"')],
    },
    "6.4": {
        "parts not divided": [(" / parts", "")],
        "the first part alone": [("strict=True):", "strict=True):\n        if rows is not x[:len(rows)] and rows.data_ptr() != x.data_ptr():\n            continue")],
        "no checkpoints": [("if checkpointing:\n                    h", "if False:\n                    h")],
        "eager for sdpa": [("if sdpa:", "if False:")],
        "never bf16": [("enabled=amp", "enabled=False")],
        "one backward for all parts": [
            ("loss.backward()\n        del h, loss", "kept = [*kept, loss] if rows.data_ptr() != x.data_ptr() else [loss]\n    sum(kept).backward()")
        ],
        "the parts' graphs kept": [("loss.backward()\n        del h, loss", "loss.backward(retain_graph=True)\n        model.kept = [*getattr(model, 'kept', ()), loss]")],
        "a mask forgotten": [("is_causal=True", "is_causal=False")],
        "predict: parameters alone": [("return 4 * parameters * (parts > 1) + copies + kept", "return 12 * shape.layers * shape.width**2")],
        "predict: no scores": [("scores = 0 if sdpa else", "scores = 0 *")],
    },
    "6.5": {
        "one scale for all": [
            ("scales = blocks.abs().amax(dim=1)", "scales = blocks.abs().amax().expand(len(blocks)).contiguous()")
        ],
        "evenly spaced squares": [
            ("share.sqrt().sqrt().mul(255).round().clamp(min=1) * (share > 0)", "share.mul(255).round()"),
            ("(x / 255) ** 4", "x / 255"),
        ],
        "signed values as if positive": [("if signed:\n        codes = share.abs().sqrt().copysign(share)", "if signed:\n        codes = share.abs().sqrt()")],
        "a slice of padded codes": [("codes.flatten()[: len(x)].to(torch.uint8)", "codes.to(torch.uint8).flatten()[: len(x)]")],
        "codes of 16 bits": [(".to(torch.uint8)", ".to(torch.int16)")],
        "the moments also in fp32": [("del root", "del root\n            self.kept = getattr(self, 'kept', {}) | {i: (m, v)}")],
        "moments in bf16": [
            ("self.moments[i] = pack(m, True), pack(v, False)", "self.moments[i] = m.bfloat16(), v.bfloat16()"),
            ("(unpack(*self.moments[i][k], signed=not k) for k in (0, 1))", "(t.float() for t in self.moments[i])"),
        ],
        "the first moment alone": [
            ("self.moments[i] = pack(m, True), pack(v, False)", "self.moments[i] = (pack(m, True),)"),
            ("m, v = (unpack(*self.moments[i][k], signed=not k) for k in (0, 1))", "m, v = unpack(*self.moments[i][0], True), torch.zeros_like(g)"),
        ],
        "no bias correction": [("(1 - second**self.t)", "1"), ("(1 - first**self.t)", "1")],
        "all unpacked at once": [
            ("self.t += 1", "self.t += 1\n        every = [[unpack(*packed, s) for packed, s in zip(pair, (True, False))] for pair in self.moments.values()]\n        every += [[t.clone() for t in pair] for pair in every] + [[t.clone() for t in pair] for pair in every]")
        ],
    },
    "6.6": {
        "the first that fits": [("if cost < least and", "if best is None and")],
        "no budget": [("and memlab.compute(model, recipe, card).peak_bytes <= 0.9 * budget", "")],
        "no room left": [("<= 0.9 * budget", "<= budget")],
        "states alone": [("memlab.compute(model, recipe, card).peak_bytes", "8 * model.parameter_count / cards")],
        "always checkpoints": [('for checkpointing in ("none", "full")', 'for checkpointing in ("full",)')],
        "never on the host": [('for offload in ((), ("optimizer_states:cpu",))', "for offload in ((),)")],
        "micro-batch 1": [("for micro_batch in (1, 2, 4, 8, 16, 32, 64)", "for micro_batch in (1,)")],
        "never None": [("return best", "return best or recipe")],
        "recomputation is free": [('(8 if recipe.checkpointing == "full" else 6)', "6")],
        "the article: a smaller batch in its place": [("accumulation=batch // (cards * micro_batch)", "accumulation=1")],
    },
}  # fmt: skip
