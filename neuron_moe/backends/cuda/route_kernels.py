"""Triton kernels of the router: logits, then the choice of K experts and their affinities.

Everything is float32; of equal scores the lowest expert is taken first, as in `neuron_moe.router`.

Axes: T tokens, E experts, K choices, S parts of the depth, H hidden.
"""

import triton.language as tl
from triton import jit


@jit
def project_tokens(
    hidden_ptr,
    weight_ptr,
    parts_ptr,
    num_tokens,
    H: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH_PART: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Multiply tokens with the router's weight [E, H]: parts [S, T, E]. WIDENS to float32 first."""
    part = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    is_token, is_expert = token < num_tokens, expert < EXPERTS
    row = token.to(tl.int64)
    sums = tl.zeros((BLOCK_TOKENS, BLOCK_EXPERTS), tl.float32)
    end = tl.minimum(H, (part + 1) * DEPTH_PART)
    for start in range(part * DEPTH_PART, end, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        hidden = tl.load(
            hidden_ptr + row[:, None] * H + depth[None, :],
            mask=is_token[:, None] & (depth < H)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + expert[None, :] * H + depth[:, None],
            mask=is_expert[None, :] & (depth < H)[:, None],
            other=0.0,
        )
        if WIDENS:
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(hidden, weight, sums, input_precision="ieee")
    place = (part * num_tokens + row)[:, None] * EXPERTS + expert[None, :]
    tl.store(parts_ptr + place, sums, mask=is_token[:, None] & is_expert[None, :])


@jit
def choose_experts(
    parts_ptr,
    bias_ptr,
    selection_ptr,
    logits_ptr,
    affinity_ptr,
    index_ptr,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    ACT: tl.constexpr,
    IS_OVER_CHOSEN: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    EPS: tl.constexpr,
    FACTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Add the parts of the logits, choose, weigh: logits [T, E], affinities and index [T, K]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BINS)[None, :]
    is_token = (token < num_tokens)[:, None]
    is_expert = expert < EXPERTS
    row = token.to(tl.int64)[:, None]
    logits = tl.zeros((TOKENS, BINS), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + row) * EXPERTS + expert
        logits += tl.load(parts_ptr + place, mask=is_token & is_expert, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * EXPERTS + expert, logits, mask=is_token & is_expert)
    scores = tl.where(is_expert, logits, float("-inf"))
    ranked = scores
    if not IS_OVER_CHOSEN:
        scores = _activate(scores, ACT)
    if HAS_SELECTION:
        ranked = scores + tl.load(selection_ptr + expert, mask=is_expert, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, float("inf"))  # what is no number comes first
    is_free = is_expert & (token >= 0)[:, None]
    choice = tl.arange(0, CHOICES)[None, :]
    index = tl.zeros((TOKENS, CHOICES), tl.int32)
    chosen = tl.full((TOKENS, CHOICES), float("-inf"), tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_free, ranked, float("-inf")), axis=1)[:, None]
        found = tl.min(tl.where(is_free & (ranked == best), expert, BINS), axis=1)[:, None]
        is_found = expert == found
        value = tl.sum(tl.where(is_found, scores, 0.0), axis=1)[:, None]
        index = tl.where(choice == number, found, index)
        chosen = tl.where(choice == number, value, chosen)
        is_free = is_free & (expert != found)
    if IS_OVER_CHOSEN:
        chosen = _activate(chosen, ACT)
    if RENORMALIZES:
        total = tl.sum(tl.where(choice < TOP_K, chosen, 0.0), axis=1)[:, None]
        chosen = chosen / (total + EPS)
    inside = is_token & (choice < TOP_K)
    tl.store(affinity_ptr + row * TOP_K + choice, chosen * FACTOR, mask=inside)
    tl.store(index_ptr + row * TOP_K + choice, index, mask=inside)


@jit
def _activate(scores, ACT: tl.constexpr):
    """Return softmax over the last axis, or each score activated; 0 where scores are -inf."""
    if ACT == "softmax":
        powers = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        values = powers / tl.sum(powers, axis=1)[:, None]
    elif ACT == "sqrtsoftplus":
        # log(1 + p) = log1p of small p, which is p.
        power = tl.exp(-tl.abs(scores))
        rest = tl.where(power < 1e-4, power - 0.5 * power * power, tl.log(1.0 + power))
        values = tl.sqrt(tl.maximum(scores, 0.0) + rest)
    else:
        values = 1.0 / (1.0 + tl.exp(-scores))
    return values
