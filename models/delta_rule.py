"""The gated delta rule: a memory of all tokens before, one matrix a head.

Each token lets the memory of a head fade, reads from it what it holds under the token's key, and
writes the difference to the token's value under that key:

    M = exp(d) M + k b (v - exp(d) k M),    out = q M

with d <= 0 the logarithm of the decay and b the rate, both of the token; in Kimi's variant each
number of a key has a decay of its own. A prompt goes through in chunks, within which the
differences solve a triangular system; a decode step computes the formula as it stands.
Source: S. Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464,
section 3; the chunked form is that of arXiv 2406.06484, section 3; Kimi Linear, arXiv 2510.26692.

Letters: U sequences, N heads, S tokens, c tokens of a chunk, D key size, V value size.
"""

import torch
from torch import Tensor

CHUNK = 64
CHANNEL_CHUNK = 16  # where pairs of tokens have a decay for each number of a key


def update(
    query_UN1D: Tensor,
    key_UN1D: Tensor,
    value_UN1V: Tensor,
    log_decay_UN1: Tensor,
    rate_UN1: Tensor,
    memory_UNDV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the formula for one token; return [U, N, 1, V] and the memory, float32.

    The decay may be [U, N, 1, D].
    """
    faded_UNDV = memory_UNDV * _of_keys(log_decay_UN1).exp().transpose(2, 3)
    change_UN1V = rate_UN1[..., None] * (value_UN1V - key_UN1D @ faded_UNDV)
    memory_UNDV = faded_UNDV + key_UN1D.transpose(2, 3) * change_UN1V
    return query_UN1D @ memory_UNDV, memory_UNDV


def update_in_chunks(
    query_UNSD: Tensor,
    key_UNSD: Tensor,
    value_UNSV: Tensor,
    log_decay_UNS: Tensor,
    rate_UNS: Tensor,
    memory_UNDV: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute the formula for many tokens; return [U, N, S, V] and the memory, float32.

    Within a chunk, write f(i, j) for the decay from token j to i, and f(i) from its beginning. The
    changes u solve u_i + sum_{j < i} b_i f(i, j) (k_i k_j) u_j = b_i (v_i - f(i) k_i M).
    """
    sides = (query_UNSD, key_UNSD, value_UNSV)
    chunks = zip(
        *(torch.split(part, chunk, dim=2) for part in (*sides, log_decay_UNS, rate_UNS)),
        strict=True,
    )
    outputs = []
    for query, key, value, log_decay, rate in chunks:
        total_UNc = log_decay.cumsum(-1)
        from_start_UNc1 = total_UNc.exp()[..., None]
        pairs_UNcc = (total_UNc[..., :, None] - total_UNc[..., None, :]).tril().exp().tril()
        system = (rate[..., None] * pairs_UNcc * (key @ key.transpose(2, 3))).tril(-1)
        wanted = rate[..., None] * (value - from_start_UNc1 * (key @ memory_UNDV))
        change_UNcV = _inverse(system) @ wanted
        seen = pairs_UNcc * (query @ key.transpose(2, 3))
        outputs.append(from_start_UNc1 * (query @ memory_UNDV) + seen @ change_UNcV)
        to_end_UNc1 = (total_UNc[..., -1:] - total_UNc).exp()[..., None]
        memory_UNDV = from_start_UNc1[..., -1:, :] * memory_UNDV + (
            (key * to_end_UNc1).transpose(2, 3) @ change_UNcV
        )
    return torch.cat(outputs, dim=2), memory_UNDV


def update_by_channel(
    query_UNSD: Tensor,
    key_UNSD: Tensor,
    value_UNSV: Tensor,
    log_decay_UNSD: Tensor,
    rate_UNS: Tensor,
    memory_UNDV: Tensor,
    chunk: int = CHANNEL_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Do what `update_in_chunks` does with a decay for each number of a key.

    No decay is split into two factors, one of which could be too large for float32.
    """
    sides = (query_UNSD, key_UNSD, value_UNSV, log_decay_UNSD, rate_UNS)
    outputs = []
    for parts in zip(*(torch.split(side, chunk, dim=2) for side in sides), strict=True):
        query, key, value, log_decay, rate = parts
        total_UNcD = log_decay.cumsum(2)
        size = total_UNcD.shape[2]
        is_later_cc1 = torch.ones(size, size, device=key.device).triu(1).bool()[..., None]
        apart_UNccD = total_UNcD[..., :, None, :] - total_UNcD[..., None, :, :]
        faded_UNccD = apart_UNccD.masked_fill(is_later_cc1, -torch.inf).exp() * key[..., None, :, :]
        system = (rate[..., None] * (faded_UNccD @ key[..., None]).squeeze(-1)).tril(-1)
        from_start_UNcD = total_UNcD.exp()
        wanted = rate[..., None] * (value - (key * from_start_UNcD) @ memory_UNDV)
        change_UNcV = _inverse(system) @ wanted
        seen = (faded_UNccD @ query[..., None]).squeeze(-1)
        outputs.append((query * from_start_UNcD) @ memory_UNDV + seen @ change_UNcV)
        last_UN1D = total_UNcD[..., -1:, :]
        to_end_UNcD = (last_UN1D - total_UNcD).exp()
        memory_UNDV = last_UN1D.exp().transpose(2, 3) * memory_UNDV + (
            (key * to_end_UNcD).transpose(2, 3) @ change_UNcV
        )
    return torch.cat(outputs, dim=2), memory_UNDV


def _of_keys(log_decay: Tensor) -> Tensor:
    """Return [U, N, S, 1] or [U, N, S, D], which multiply keys."""
    return log_decay[..., None] if log_decay.ndim == 3 else log_decay


def _inverse(system: Tensor) -> Tensor:
    """Return the inverse of 1 + `system`, [.., c, c], of which only what is below is not zero.

    Exact inverses of blocks on the diagonal are joined two by two, which takes log2 c rounds of
    products: compilers for an accelerator have those, and no triangular solve.
    """
    size = system.shape[-1]
    place_c = torch.arange(size, device=system.device)
    row_c1, column_1c = place_c[:, None], place_c[None, :]
    inverse = (row_c1 == column_1c).to(system.dtype).expand_as(system)
    width = 1
    while width < size:
        is_pair = row_c1 // (2 * width) == column_1c // (2 * width)
        joins = is_pair & (row_c1 // width > column_1c // width)
        inverse = inverse - joins * (inverse @ system @ inverse)
        width *= 2
    return inverse
