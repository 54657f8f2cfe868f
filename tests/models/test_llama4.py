"""What Llama 4 alone has: scaling by place."""

from pathlib import Path
from typing import Any

import torch

from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, write_checkpoint


def test_the_scale_of_a_query_goes_by_its_place_and_not_by_padding(tmp_path: Path) -> None:
    config = FAMILIES["llama4-temperature"].config()
    write_checkpoint(config | {"floor_scale": 8192, "attn_scale": 0.1}, tmp_path, seed=0)
    model: Any = load_model(tmp_path, dtype=torch.float32)
    attention = model.attentions[3]
    assert not attention.rotates
    query, key = torch.ones(1, 3, 4, 16), torch.ones(1, 3, 2, 16)
    tokens = model.describe_tokens(torch.tensor([[0, 8191, 5 * 8192 - 1]]), None)
    scaled, same = attention.rotate(query, key, tokens)
    assert torch.equal(same, key)
    expected = 1 + 0.1 * torch.tensor([0.0, 1.0, 5.0]).log1p()
    torch.testing.assert_close(scaled[0, :, 0, 0], expected)
