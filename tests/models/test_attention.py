"""The core of attention: cache, masks, softmax with sinks."""

import pytest
import torch

from neuron_moe.models import attention
from neuron_moe.models.attention import (
    EVERYTHING,
    KVCache,
    Reach,
    attend,
    attend_cached,
    attention_mask,
    count_places,
)


def plain_attention(
    query_USQD: torch.Tensor,
    key_UJCD: torch.Tensor,
    value_UJCD: torch.Tensor,
    mask_USC: torch.Tensor,
    sinks_Q: torch.Tensor | None,
) -> torch.Tensor:
    """One head at a time, the sink as an extra column of the softmax, in float64."""
    group = query_USQD.shape[2] // key_UJCD.shape[1]
    out = torch.zeros_like(query_USQD, dtype=torch.float64)
    for u in range(query_USQD.shape[0]):
        for q in range(query_USQD.shape[2]):
            key, value = key_UJCD[u, q // group].double(), value_UJCD[u, q // group].double()
            logits = query_USQD[u, :, q].double() @ key.T / query_USQD.shape[3] ** 0.5
            logits = logits.masked_fill(~mask_USC[u], float("-inf"))
            if sinks_Q is not None:
                column = sinks_Q[q].double().expand(len(logits), 1)
                logits = torch.cat([logits, column], dim=1)
            weights = logits.softmax(dim=1)[:, : len(key)]
            out[u, :, q] = weights @ value
    return out.flatten(2)


@pytest.mark.parametrize("window", [None, 1, 3], ids=["full", "window1", "window3"])
@pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "plain"])
def test_attention_is_the_formula(window: int | None, with_sinks: bool) -> None:
    query, key, value = (torch.randn(shape) for shape in [(2, 5, 4, 8), (2, 2, 7, 8), (2, 2, 7, 8)])
    sinks = torch.randn(4) * 3 if with_sinks else None
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, :2] = False
    mask = attention_mask(real, torch.arange(2, 7), 0, Reach(window))
    out = attend(query, key, value, mask, sinks)
    seen = mask.any(dim=2)  # a padded query sees nothing; its numbers mean nothing
    expected = plain_attention(query, key, value, mask, sinks)
    assert torch.allclose(out[seen].double(), expected[seen], rtol=1e-5, atol=1e-6)
    assert out.isfinite().all()


def test_attention_does_not_depend_on_the_chunk_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(2, 9, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8))
    mask = attention_mask(torch.ones(2, 9, dtype=torch.bool), torch.arange(9), 0, Reach(4))
    whole = attend(query, key, value, mask, torch.randn(4).fill_(0.5))
    monkeypatch.setattr(attention, "MAX_LOGITS", 2 * 4 * 9 * 2)
    chunked = attend(query, key, value, mask, torch.randn(4).fill_(0.5))
    assert torch.allclose(whole, chunked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2], ids=["full", "window"])
@pytest.mark.parametrize("padding", [0, 5], ids=["whole", "padded"])
def test_fused_attention_does_not_depend_on_its_parts(
    window: int | None, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (
        torch.randn(2, 9, 4, 8),
        torch.randn(2, 2, 11, 8),
        torch.randn(2, 2, 11, 8),
    )
    real = torch.ones(2, 11, dtype=torch.bool)
    real[:, :padding] = False
    mask = attention_mask(real, torch.arange(2, 11), 0, Reach(window))
    whole = attend(query, key, value, mask)
    monkeypatch.setattr(attention, "_FUSED_QUERIES", 2)
    keys = [part[1] for part in attention._parts_of(mask)]
    assert keys[-1] == slice(padding if window is None else 9, 11)
    assert keys[0] == (slice(1) if padding else slice(0 if window is None else 1, 4))
    parts = attend(query, key, value, mask)
    seen = mask.any(dim=2)
    assert torch.allclose(whole[seen], parts[seen], rtol=1e-5, atol=1e-6)
    assert parts.isfinite().all()


def test_a_large_sink_silences_a_head() -> None:
    query, key, value = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    out = attend(query, key, value, mask, torch.tensor([1e4, -1e4]))
    assert torch.equal(out[..., :4], torch.zeros(1, 1, 4))
    assert torch.allclose(out, attend(query, key, value, mask) * (out != 0), atol=1e-6)


def test_mask_sees_the_past_within_the_window_and_no_padding() -> None:
    real = torch.tensor([[False, True, True, True, True]])
    mask = attention_mask(real, torch.tensor([2, 4]), 0, Reach(3))
    assert mask.int().tolist() == [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]]
    shifted = attention_mask(real[:, 2:], torch.tensor([4]), 2, Reach(3))
    assert shifted.int().tolist() == [[[1, 1, 1]]]


def test_a_chunk_begins_at_a_multiple_of_its_size_in_each_sequence() -> None:
    real = torch.tensor([[False, True, True, True, True], [True] * 5])
    places = count_places(real)
    assert places.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    mask = attention_mask(real, torch.tensor([2, 4]), 0, Reach(chunk=2), places)
    assert mask.int().tolist() == [
        [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
        [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]],
    ]
    shifted = attention_mask(real[:, 3:], torch.tensor([4]), 3, Reach(chunk=2), places[:, 3:])
    assert torch.equal(shifted, mask[:, 1:, 3:])


@pytest.mark.parametrize("reach", [EVERYTHING, Reach(3), Reach(chunk=3)], ids=str)
def test_no_position_before_the_first_of_a_reach_is_seen(reach: Reach) -> None:
    real = torch.ones(1, 8, dtype=torch.bool)
    mask = attention_mask(real, torch.arange(5, 8), 0, reach, count_places(real))
    first = reach.first_position(5)
    assert not mask[:, :, :first].any()
    assert first == (0 if reach is EVERYTHING else 3)


def test_the_core_that_keeps_a_cache_asks_for_its_view() -> None:
    with pytest.raises(ValueError, match=r"view=None.*put a core in place"):
        attend_cached(*[None] * 5)  # type: ignore[arg-type]


def new_cache(batch_size: int = 2, capacity: int = 4) -> KVCache:
    return KVCache(
        [((1, 2), (1, 2))], batch_size=batch_size, capacity=capacity, like=torch.zeros(1)
    )


def test_cache_refuses_what_does_not_fit() -> None:
    cache = new_cache()
    assert cache.reserve(torch.ones(2, 3, dtype=torch.bool)) == (0, 3)
    with pytest.raises(
        ValueError, match="capacity=4: 3 positions are in use and 2 more are requested"
    ):
        cache.reserve(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="input_ids has 3 sequences: the cache was made for 2"):
        cache.reserve(torch.ones(3, 1, dtype=torch.bool))
    assert cache.length == 3
    with pytest.raises(ValueError, match="capacity=0"):
        new_cache(capacity=0)
