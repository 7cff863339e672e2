"""Planted wrong answers of chapter 5: exercise -> what is wrong -> edits of the solution, each (old, new)."""

CHAPTER = "05_big_data"

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "5.1": {
        "the article's law: all of it quadratic": [
            ("return slope_mean - B * s_mean, B", "return 0.0, saved[-1] / lengths[-1] ** 2")
        ],
        "linear only": [("return slope_mean - B * s_mean, B", "return slope_mean, 0.0")],
        "swapped": [("return slope_mean - B * s_mean, B", "return B, slope_mean - B * s_mean")],
        "GB": [("[n / s for", "[n / 1e9 / s for")],
        "lengths taken as sorted": [
            (
                "return slope_mean - B * s_mean, B",
                "return saved[0] / lengths[0], (saved[-1] - saved[0] / lengths[0] * lengths[-1]) / "
                "lengths[-1] ** 2",
            )
        ],
        "through the end points": [
            (
                "    return slope_mean - B * s_mean, B",
                "    (a, y), *_, (b, z) = sorted(zip(lengths, slopes, strict=True))\n"
                "    B = (z - y) / (b - a)\n    return y - B * a, B",
            )
        ],
        "upside down": [("return A / B if B", "return B / A if B")],
        "a root": [("return A / B if B", "return math.sqrt(A / B) if B")],
        "divided by zero": [("return A / B if B else math.inf", "return A / B")],
        "nothing is 0 tokens": [("else math.inf", "else 0")],
    },
    "5.2": {
        "the article's 25%": [("return (S + A * k * b) / (S + A * b) - 1", "return 0.25")],
        "everything grows": [("return (S + A * k * b) / (S + A * b) - 1", "return k - 1")],
        "per cent": [("/ (S + A * b) - 1", "/ (S + A * b) * 100 - 100")],
        "new by old": [("/ (S + A * b) - 1", "/ (S + A * b)")],
        "by the new total": [
            ("return (S + A * k * b) / (S + A * b) - 1", "return A * b * (k - 1) / (S + A * k * b)")
        ],
        "one sample": [("return (S + A * k * b) / (S + A * b) - 1", "return (S + A * k) / (S + A) - 1")],
        "the states forgotten": [("(memory - S) // A", "memory // A")],
        "rounded up": [("(memory - S) // A", "-(-(memory - S) // A)")],
        "less than nothing": [("max(0, (memory - S) // A)", "(memory - S) // A")],
        "scores as pixels": [("tokens**2", "tokens")],
    },
    "5.3": {
        "the article's loop: no division": [("* (count(batch) / total)", "")],
        "by the group's full length": [("(count(batch) / total)", "(1 / every)")],
        "means of equal weight": [("(count(batch) / total)", "(1 / len(group))")],
        "by the epoch's total": [("for batch in group)\n", "for batch in batches)\n")],
        "what is left at the end is dropped": [
            ("range(0, len(batches), every)", "range(0, len(batches) - every + 1, every)")
        ],
        "never zeroed": [("        optimizer.zero_grad()\n", "")],
        "zeroed for each micro-batch": [
            ("            (loss_of", "            optimizer.zero_grad()\n            (loss_of")
        ],
        "one backward at the end": [
            ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        losses = []\n"),
            ("(loss_of(batch) * (count(batch) / total)).backward()", "losses.append(loss_of(batch) * "
                                                                     "(count(batch) / total))"),
            ("        optimizer.step()", "        sum(losses).backward()\n        optimizer.step()"),
        ],
        "a step for each": [("        optimizer.step()", "            optimizer.step()")],
        "divided once too often": [("(count(batch) / total)", "(count(batch) / total / len(group))")],
    },
    "5.4": {
        "nothing is scaled": [("return loss * self.factor", "return loss")],
        "never unscaled": [("p.grad.mul_(1 / self.factor)", "pass")],
        "unscaled twice": [("if self.overflow is None:\n            "
                            "self.unscale_", "if True:\n            self.unscale_")],
        "nan passes": [("not p.grad.isfinite().all()", "p.grad.isinf().any()")],
        "the overflow steps all the same": [("if not self.overflow:", "if True:")],
        "grows at each step": [("if self.good == self.interval:", "if True:")],
        "an overflow doesn't restart the count": [("            self.good = 0\n        "
                                                   "else:", "        else:")],
        "backs off too far": [("self.factor *= self.backoff", "self.factor = 1.0")],
        "all gradients joined": [
            (
                "        self.overflow = False\n",
                "        self.overflow = False\n"
                "        every = [p.grad for g in optimizer.param_groups for p in g['params']]\n"
                "        every = [g.flatten() for g in every if g is not None]\n"
                "        self.joined = torch.cat(every).isfinite().all()\n",
            )
        ],
        "a new gradient for each": [("p.grad.mul_(1 / self.factor)", "p.grad = p.grad / self.factor")],
        "ready once": [
            ("                self.good = 0\n        self.overflow = None", "                self.good = 0")
        ],
    },
    "5.5": {
        "to nearest": [("x.view(torch.int32) + noise", "x.view(torch.int32) + 2**15")],
        "toward zero": [("x.view(torch.int32) + noise", "x.view(torch.int32) + 0 * noise")],
        "plain bf16": [("return torch.where(x.isfinite(), bits.view(torch.float32), "
                        "x).bfloat16()", "return x.bfloat16()")],
        "half the noise": [("torch.randint(2**16,", "torch.randint(2**15,")],
        "not cut off": [("& -(2**16)", "")],
        "noise of one size": [
            (
                "bits = (x.view(torch.int32) + noise) & -(2**16)",
                "bits = (x + (torch.rand_like(x) - 0.5) / 128).bfloat16().float().view(torch.int32)",
            )
        ],
        "one number for all": [("torch.randint(2**16, x.shape,", "torch.randint(2**16, (1,),")],
        "a NaN wraps round": [("torch.where(x.isfinite(), bits.view(torch.float32), "
                               "x)", "bits.view(torch.float32)")],
        "in place": [("bits = (x.view(torch.int32) + noise)", "bits = x.view(torch.int32).add_(noise)")],
        "fp32 is returned": [(", x).bfloat16()", ", x)")],
    },
    "5.6": {
        "the article's: a scaler for bf16 too": [("if dtype == torch.float16:", "if True:")],
        "the article's: torch.cuda.amp": [
            ("torch.amp.autocast(device, dtype=dtype)", "torch.cuda.amp.autocast(dtype=dtype)")
        ],
        "autocast's own dtype": [("torch.amp.autocast(device, dtype=dtype)", "torch.amp.autocast(device)")],
        "backward under autocast": [
            ("        loss.backward()\n", "        with torch.amp.autocast(device, dtype=dtype):\n    "
                                          "        loss.backward()\n")
        ],
        "clipped before unscaling": [
            (
                "        scaler.unscale_(optimizer)\n        "
                "torch.nn.utils.clip_grad_norm_(parameters, max_norm)\n",
                "        torch.nn.utils.clip_grad_norm_(parameters, max_norm)\n        "
                "scaler.unscale_(optimizer)\n",
            )
        ],
        "the optimizer steps by itself": [("scaler.step(optimizer)", "optimizer.step()")],
        "no update": [("        scaler.update()\n", "")],
        "the old gradients stay": [("    optimizer.zero_grad()\n", "")],
        "zeroed at the end": [
            ("    optimizer.zero_grad()\n", ""),
            ("    return loss.detach()", "    optimizer.zero_grad()\n    return loss.detach()"),
        ],
        "by bytes alone": [("(item[1][1], -item[1][0])", "-item[1][0]")],
        "all of it leaves": [("        if freed >= need:\n            break\n", "")],
    },
}  # fmt: skip
