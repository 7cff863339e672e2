"""The modules: parameters as the configs list them, one answer from every attention, harmless checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.models import MODELS, ConvConfig, TransformerConfig, model
from memlab.nets import build
from memlab.recipe import Recipe

torch.set_num_threads(1)


def small(name: str) -> TransformerConfig | ConvConfig:
    """A model's architecture at a size that a test can run."""
    config = model(name)
    if isinstance(config, TransformerConfig):
        kv_heads = 2 if config.kv_heads < config.heads else 4
        return replace(
            config, layers=3, hidden=32, heads=4, kv_heads=kv_heads, head_dim=8, ffn=48, vocab=50, context=16
        )
    return replace(
        config,
        image=config.image if config.fixed_image else 64,
        classes=10,
        depths=(1, 2, 1, 1) if config.batch_norm else config.depths,
        fcs=tuple(16 for _ in config.fcs),
    )


TRANSFORMERS = ["gpt2", "bert-base", "llama2-70b"]
FAMILIES = [*TRANSFORMERS, "qwen2.5-1.5b", "lenet5", "alexnet", "vgg19", "resnet50", "densenet264"]


def inputs(config: TransformerConfig | ConvConfig, device: str = "cpu") -> torch.Tensor:
    if isinstance(config, TransformerConfig):
        return torch.randint(config.vocab, (2, 12), device=device)
    return torch.randn(2, config.channels, config.image, config.image, device=device)


def gradients(config: TransformerConfig | ConvConfig, recipe: Recipe) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = build(config, recipe)
    logits = net(inputs(config))
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    net.loss(logits, targets).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_buffers_are_those_of_the_config(name: str) -> None:
    config = MODELS[name]
    net = build(config, device="meta")
    assert [(n, tuple(p.shape)) for n, p in net.named_parameters()] == [
        (p.name, p.shape) for p in config.parameters()
    ]
    assert {n: (tuple(b.shape), b.nbytes) for n, b in net.named_buffers()} == {
        b.name: (b.shape, b.bytes) for b in config.buffers()
    }
    assert sum(p.numel() for p in net.parameters()) == config.parameter_count


@pytest.mark.parametrize(("name", "count"), [("resnet152", 60_192_808), ("llama2-70b", 68_976_648_192)])
def test_published_counts(name: str, count: int) -> None:
    assert sum(p.numel() for p in build(model(name), device="meta").parameters()) == count


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    config = small(name)
    made = gradients(config, Recipe(precision="fp32"))
    assert len(made) == len(config.parameters())
    assert all(torch.isfinite(g).all() for g in made)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_alone_are_enough(name: str, where: str) -> None:
    config = small(name)
    if where == "meta":
        logits = build(config, Recipe(precision="fp32"), "meta")(inputs(config, "meta"))
    else:
        with FakeTensorMode():
            logits = build(config, Recipe(precision="fp32"))(inputs(config))
    assert logits.shape == build(config, Recipe(precision="fp32"))(inputs(config)).shape


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_and_sdpa_attention_agree(name: str, precision: str) -> None:
    torch.manual_seed(0)
    config = small(name)
    tokens = inputs(config)
    nets = [build(config, Recipe(precision=precision, attention=kind)) for kind in ("eager", "sdpa")]
    nets[1].load_state_dict(nets[0].state_dict())
    eager, fused = (net(tokens).float() for net in nets)
    torch.testing.assert_close(eager, fused, atol=1e-5 if precision == "fp32" else 2e-2, rtol=0.0)


@pytest.mark.parametrize("name", ["gpt2", "llama2-70b"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_token_does_not_see_the_future(name: str, attention: str) -> None:
    config = small(name)
    net = build(config, Recipe(precision="fp32", attention=attention))
    tokens = inputs(config)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    before, after = net(tokens), net(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama2-70b", "vgg19", "densenet264"])
@pytest.mark.parametrize("checkpointing", ["full", "every-2", "selective"])
def test_checkpointing_changes_no_gradient(name: str, checkpointing: str) -> None:
    config = small(name)
    if checkpointing == "selective" and isinstance(config, ConvConfig):
        return  # refused: selective is for transformer blocks
    plain = gradients(config, Recipe(precision="fp32"))
    again = gradients(config, Recipe(precision="fp32", checkpointing=checkpointing))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_recomputes_the_same_dropout() -> None:
    config = small("gpt2")
    plain = gradients(config, Recipe(precision="fp32", dropout=0.3))
    again = gradients(config, Recipe(precision="fp32", dropout=0.3, checkpointing="full"))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dropout_of_zero_is_no_operation() -> None:
    config = small("gpt2")
    seen = {}
    for p in (0.0, 0.1):
        net = build(config, Recipe(precision="fp32", dropout=p, attention="eager"))
        with Operators() as operators:
            net(inputs(config))
        seen[p] = [name for name in operators.names if "bernoulli" in name or "dropout" in name]
    assert seen[0.0] == []
    assert len(seen[0.1]) == 1 + 3 * 3  # the embedding; in each block attention weights and both outputs


@pytest.mark.parametrize("name", ["resnet50", "densenet264"])
def test_batch_norm_keeps_fp32_statistics_in_bf16(name: str) -> None:
    net = build(small(name), Recipe(precision="bf16"))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net(inputs(net.config).bfloat16())
    running = [b for n, b in net.named_buffers() if n.endswith("running_mean")]
    assert all(b.dtype == torch.float32 and b.abs().sum() > 0 for b in running)


def test_a_recipe_that_a_model_can_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="has no attention"):
        build(model("resnet50"), Recipe(attention="eager"), device="meta")
