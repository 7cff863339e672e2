"""Planted wrong answers of chapter 4: exercise -> what is wrong -> edits of the solution, each (old, new)."""

# ruff: noqa: E501

CHAPTER = "04_wide"

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "4.1": {
        "the article's 2Lh^2 + 2Lh": [
            ("h, L = cfg.hidden, cfg.layers", "return 2 * cfg.layers * cfg.hidden**2 + 2 * cfg.layers * cfg.hidden")
        ],
        "heads that make up h": [("cfg.head_dim", "(h // cfg.heads)")],
        "keys and values for every head": [("cfg.kv_heads * cfg.head_dim", "cfg.heads * cfg.head_dim")],
        "an MLP of two matrices in LLaMA": [("3 * h * cfg.ffn", "2 * h * cfg.ffn")],
        "an untied head forgotten": [("(1 if cfg.tied else 2)", "1")],
        "no positions": [("(cfg.vocab + cfg.context) * h", "cfg.vocab * h")],
        "no pooler": [("cfg.type_vocab * h + h * h + h", "cfg.type_vocab * h")],
        "no biases": [("4 * h * h + 4 * h", "4 * h * h"), ("+ cfg.ffn + h", "")],
        "the MLP always 4h": [("cfg.ffn", "(4 * h)")],
        "a float": [("return around + L * block", "return float(around + L * block)")],
    },
    "4.2": {
        "the article's b x h x h": [
            ('"forward": size * b * h_out', '"forward": size * b * h_in * h_out'),
        ],
        "weights as activations": [('"saved": size * b * h_in', '"saved": size * h_in * h_out')],
        "input and output saved": [('"saved": size * b * h_in', '"saved": size * b * (h_in + h_out)')],
        "the output saved": [('"saved": size * b * h_in', '"saved": size * b * h_out')],
        "no bias": [("weight, bias = h_in * h_out, h_out", "weight, bias = h_in * h_out, 0")],
        "always 4 bytes": [("weight, bias", "size = 4\n    weight, bias")],
        "no gradient of x": [("(weight + bias + b * h_in)", "(weight + bias)")],
        "elements": [("weight, bias", "size = 1\n    weight, bias")],
        "MiB": [("size * b * h_out", "size * b * h_out / 2**20")],
    },
    "4.3": {
        "the article's b x s x s x 4": [
            ("return layers * b * heads * s * s * per_score", "return b * s * s * 4"),
        ],
        "the article's 6 GB for each head": [
            ("layers * b * heads * s * s * per_score", "layers * b * heads * heads * s * s * per_score")
        ],
        "one layer": [("layers * b * heads", "b * heads")],
        "linear in s": [("s * s * per_score", "s * per_score")],
        "no mask": [("size + 1 + size", "size + size")],
        "a mask of numbers": [("size + 1 + size", "3 * size")],
        "the mask alone": [("size + 1 + size", "size + 1")],
        "5 bytes always": [("size + 1 + size if dropout else size", "5")],
        "GiB": [("s * s * per_score", "s * s * per_score / 2**30")],
    },
    "4.4": {
        "the softmaxes of blocks added": [
            ("new_top = torch.maximum(top, scores.amax(-1, keepdim=True))", "new_top = top"),
            ("shrink = torch.exp(top - new_top)", "shrink = 1"),
            ("p = torch.exp(scores - new_top)", "p = torch.nan_to_num(torch.softmax(scores, -1))"),
            ("summed / total", "summed"),
        ],
        "never rescaled": [("shrink = torch.exp(top - new_top)", "shrink = 1")],
        "only the sum rescaled": [("summed = summed * shrink", "summed = summed")],
        "no running maximum": [
            ("top = torch.full_like(queries[..., :1], float(\"-inf\"))", "top = torch.zeros_like(queries[..., :1])"),
            ("new_top = torch.maximum(top, scores.amax(-1, keepdim=True))", "new_top = top"),
        ],
        "no scale": [(" / d**0.5", "")],
        "the mask forgotten": [("causal else s", "False else s"), ("if causal:", "if False:")],
        "the last block dropped": [("for j in range(0, i + block if causal else s, block)", "for j in range(0, max(block, (i + block if causal else s) // block * block), block)")],
        "the whole matrix": [
            (
                "out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])",
                "full = q @ k.mT / d**0.5\n"
                "    if causal:\n"
                "        full = full.masked_fill(torch.ones(s, s).triu(1).bool(), float('-inf'))\n"
                "    return full.softmax(-1) @ v, full.logsumexp(-1)\n"
                "    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])",
            )
        ],
        "tiles kept in a list": [
            ("out, lse = torch", "kept = []\n    out, lse = torch"),
            ("top = new_top", "top = new_top\n            kept.append(p)"),
        ],
        "torch's fused kernel": [
            (
                "out, lse = torch",
                "return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), q[..., 0]\n"
                "    out, lse = torch",
            )
        ],
    },
    "4.5": {
        "the bias on every rank": [
            ("F.linear(slice_of_hidden, self.down_weight)", "F.linear(slice_of_hidden, self.down_weight, self.down_bias)"),
            (" + self.down_bias", ""),
        ],
        "no sum": [("self.comm.sum(part)", "part")],
        "the sum without autograd": [("self.comm.sum(part)", "self.comm.all_reduce(part)")],
        "no copy": [("x = self.comm.copy(x)", "")],
        "columns only, joined": [
            ("slice_of_hidden = F.gelu(", "slice_of_hidden = self.comm.copy(self.comm.join(F.gelu("),
            ("self.up_weight, self.up_bias))", "self.up_weight, self.up_bias))))"),
            ("chunk(n, 1)", "chunk(n, 0)"),
            ("nn.Parameter(down.bias.detach().clone())", "nn.Parameter(down.bias.detach().chunk(n, 0)[r].clone())"),
            ("F.linear(slice_of_hidden, self.down_weight)", "F.linear(slice_of_hidden, self.down_weight, self.down_bias)"),
            ("self.comm.sum(part) + self.down_bias", "self.comm.join(part)"),
        ],
        "views of the whole weight": [
            ("chunk(n, 0)[r].clone()", "chunk(n, 0)[r]"),
            ("chunk(n, 1)[r].clone()", "chunk(n, 1)[r]"),
        ],
        "the mean": [("self.comm.sum(part)", "self.comm.sum(part) / self.comm.world_size")],
        "the whole layers in a list": [("n, r = comm", "self.layers = [up, down]\n        n, r = comm")],
        "summed twice": [("self.comm.sum(part)", "self.comm.sum(self.comm.sum(part)) / self.comm.world_size")],
        "one rank alone": [
            ("return self.comm.sum(part)", "return (self.comm.sum(part) if self.comm.rank else part)")
        ],
    },
    "4.6": {
        "the article's 4, 8 and N": [
            (
                "whole = [parameters * size for size in each]",
                "whole = [parameters * size for size in each]\n"
                "    factor = {0: 1, 1: 4, 2: 8, 3: world_size}[stage]\n"
                "    return {name: w // factor for name, w in zip(('parameters', 'gradients', 'optimizer_states'), whole)}",
            )
        ],
        "stage 1 shards gradients": [("stage >= 2", "stage >= 1")],
        "stage 2 shards parameters": [("stage >= 3", "stage >= 2")],
        "floats": [("//", "/")],
        "the sum for the mean": [(" / self.comm.world_size", "")],
        "its own gradient alone": [
            ("self.comm.reduce_scatter(gradient) / self.comm.world_size", "gradient.chunk(self.comm.world_size)[self.comm.rank]")
        ],
        "whole gradients on every rank": [
            (
                "self.comm.reduce_scatter(gradient)",
                "self.comm.all_reduce(gradient).chunk(self.comm.world_size)[self.comm.rank]",
            )
        ],
        "whole states on every rank": [
            ("flat.chunk(comm.world_size)[comm.rank].clone()", "flat.clone()"),
            ("self.comm.reduce_scatter(gradient)", "self.comm.all_reduce(gradient)"),
            ("self.comm.all_gather(self.piece)", "self.piece"),
        ],
        "not gathered": [
            ("self.comm.all_gather(self.piece)[", "self.flat([p.detach() for p in self.parameters]).index_copy(0, torch.arange(len(self.piece)) + self.comm.rank * len(self.piece), self.piece)["),
        ],
        "nothing copied back": [("p.copy_(values.view_as(p))", "pass")],
    },
}  # fmt: skip
