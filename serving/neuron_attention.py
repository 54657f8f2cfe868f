"""Attention over pages that the runner of vllm-neuron allocates and the model writes.

Shapes are static and nothing depends on data, so that one graph serves a bucket. Padding tokens
have slot -1 and write to block 0, which vLLM keeps free for such; absent blocks are -1.

Letters: T tokens of the step, U sequences, S = T / U tokens of each, M blocks of a sequence, B
tokens of a block, C = M * B, Q query heads, J key/value heads, D head size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe.models.attention import AttentionFacts, Reach, attend


class PagesView(NamedTuple):
    """Where a layer finds the keys and values of a step, and where it writes.

    Attributes:
        key_PJBD: pages of keys.
        value_PJBD: pages of values.
        slots_T: [T] page * B + place in it; negative for padding.
        table_UM: [U, M] pages of each sequence in order; negative for none.
        first_U: [U] place of the first token of the table, where it was cut to a window; or None.
        places_T: [T] place of each token in its sequence.
    """

    key_PJBD: Tensor
    value_PJBD: Tensor
    slots_T: Tensor
    table_UM: Tensor
    first_U: Tensor | None
    places_T: Tensor


def view_of(
    caches: tuple[Tensor, Tensor], metadata: Mapping[str, Any], places_T: Tensor
) -> PagesView:
    """Return the view of one layer, from its entry in the runner's metadata."""
    return PagesView(
        *caches,
        metadata["slot_mapping"].flatten(),
        metadata["block_table_tensor"],
        metadata.get("swa_kv_pos_offset"),
        places_T,
    )


def attend_pages(
    attention: AttentionFacts, query: Tensor, key: Tensor, value: Tensor, view: PagesView
) -> Tensor:
    """Write keys and values into pages, then attend to the pages of each sequence.

    Returns:
        [.., Q * D]; arguments as `models.attention.Core`, heads those of this rank.
    """
    leading = query.shape[:2]
    query_TQD, key_TJD, value_TJD = (part.flatten(0, 1) for part in (query, key, value))
    _write(view.key_PJBD, view.slots_T, key_TJD)
    _write(view.value_PJBD, view.slots_T, value_TJD)
    num_sequences = view.table_UM.shape[0]
    out_USX = attend(
        query_TQD.view(num_sequences, -1, *query_TQD.shape[1:]),
        _read(view.key_PJBD, view.table_UM),
        _read(view.value_PJBD, view.table_UM),
        _mask(view, attention.reach),
        attention.sinks,
        attention.scale,
    )
    return out_USX.reshape(*leading, -1)


def _write(pages_PJBD: Tensor, slots_T: Tensor, rows_TJD: Tensor) -> None:
    """Put the rows of each token into its slot; those of padding into block 0."""
    slots_T = slots_T.long().clamp_min(0)
    block_size = pages_PJBD.shape[2]
    page_T = torch.div(slots_T, block_size, rounding_mode="floor")
    place_T = slots_T - page_T * block_size
    heads_J = torch.arange(pages_PJBD.shape[1], device=pages_PJBD.device)
    index = page_T[:, None], heads_J[None, :], place_T[:, None]
    pages_PJBD.index_put_(index, rows_TJD.to(pages_PJBD.dtype))


def _read(pages_PJBD: Tensor, table_UM: Tensor) -> Tensor:
    """Return the rows of each sequence in order, [U, J, C, D]; of absent blocks some row."""
    rows_UMJBD = pages_PJBD[table_UM.long().clamp_min(0)]
    return rows_UMJBD.transpose(1, 2).flatten(2, 3)


def _mask(view: PagesView, reach: Reach) -> Tensor:
    """Say which tokens of the table each new token sees, [U, S, C] bool."""
    table_UM, block_size = view.table_UM, view.key_PJBD.shape[2]
    keys_C = torch.arange(table_UM.shape[1] * block_size, device=table_UM.device)
    keys_UC = keys_C[None].expand(table_UM.shape[0], -1)
    if view.first_U is not None:
        keys_UC = keys_UC + view.first_U.long()[:, None]
    places_US1 = view.places_T.long().view(table_UM.shape[0], -1, 1)
    keys_U1C = keys_UC[:, None]
    mask_USC: Tensor = keys_U1C <= places_US1
    mask_USC = mask_USC & (table_UM >= 0).repeat_interleave(block_size, dim=1)[:, None]
    if reach.window is not None:
        mask_USC = mask_USC & (keys_U1C > places_US1 - reach.window)
    if reach.chunk is not None:
        mask_USC = mask_USC & (keys_U1C // reach.chunk == places_US1 // reach.chunk)
    return mask_USC
