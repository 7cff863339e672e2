"""The modules: parameters as the configs list them, one answer from every attention, checkpoints that change nothing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.models import MODELS, ConvConfig, TransformerConfig, model
from memlab.nets import build
from memlab.recipe import Recipe

torch.set_num_threads(1)


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
