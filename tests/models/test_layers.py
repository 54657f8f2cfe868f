"""The small layers against transformers."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from neuron_moe.models.layers import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(32, 1e-5, dtype), GptOssRMSNorm(32, 1e-5)
    ours.weight.data.normal_()
    theirs.weight.data.copy_(ours.weight.data)
    hidden = (torch.randn(3, 5, 32) * 10).to(dtype)
    assert torch.allclose(ours(hidden), theirs(hidden), rtol=1e-6)
