"""Attention over pages that the runner of vllm-neuron allocates and the model writes.

Shapes are static and nothing depends on data, so that one graph serves a bucket. Padding tokens
have slot 0 or -1 and write to block 0, which vLLM keeps free for such; absent blocks are 0 or -1.

Prefill goes through the plugin's functions where it has them: they are kernels. Its function for
decode computes the projections, too, and is not used.

Of a model with recurrent layers all layers share pages ("page major"): keys and values of a block
are in one page, the state of a sequence in another. A page may hold what another layer left, so
what was not written is never multiplied. The runner adds two pages: zeros, for who reads no page,
and one that takes what is written for none.

Letters: T tokens of the step, U sequences, S = T / U tokens of each, M blocks of a sequence, B
tokens of a block, C = M * B, Q query heads, J key/value heads, D head size, P pages, F numbers of a
state, W width of the convolution.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe.models.attention import AttentionFacts, Reach, attend
from neuron_moe.models.delta_net import GatedDeltaNet, Inputs

MOST_OF_A_HEAD = 128  # numbers of a head, of the plugin's functions


class PagesView(NamedTuple):
    """Where a layer finds the keys and values, or states, of a step, and where it writes.

    Attributes:
        pages: keys and values, [P, J, B, D] each; page major one tensor: [P, 2, J, B, D] of both,
            or float32 [P, F] of states.
        slots_T: [T] page * B + place in it; none above 0 for padding.
        table_UM: [U, M] pages of each sequence in order; none above 0 for absent ones.
        first_U: [U] place of the first token of the table, where it was cut to a window; or None.
        places_T: [T] place of each token in its sequence.
        segment: tokens of a segment of prefill; 0: it is in one; None: this is decode.
        prior_11: [1, 1] tokens before this segment; or None.
        functions: of the plugin, or None.
    """

    pages: tuple[Tensor, ...]
    slots_T: Tensor
    table_UM: Tensor
    first_U: Tensor | None
    places_T: Tensor
    segment: int | None = None
    prior_11: Tensor | None = None
    functions: Any = None

    @property
    def is_page_major(self) -> bool:
        """Whether layers share pages."""
        return len(self.pages) == 1

    def read_pages(self) -> Tensor:
        """Return the table with a page of zeros, or of some rows, where there is none."""
        table_UM = self.table_UM.long()
        if not self.is_page_major:
            return table_UM.clamp_min(0)
        zeros = self.pages[0].shape[0] - 2
        is_live_U = self.slots_T.view(table_UM.shape[0], -1)[:, :1] > 0
        is_there = is_live_U & (table_UM > 0) & (table_UM < zeros)
        return torch.where(is_there, table_UM, zeros)


def view_of(
    pages: tuple[Tensor, ...],
    metadata: Mapping[str, Any],
    places_T: Tensor,
    *,
    is_decode: bool,
    functions: Any,
) -> PagesView:
    """Return the view of one layer, from its entry in the runner's metadata."""
    return PagesView(
        pages,
        metadata["slot_mapping"].flatten(),
        metadata["block_table_tensor"],
        metadata.get("swa_kv_pos_offset"),
        places_T,
        None if is_decode else metadata.get("kv_segment_size") or 0,
        metadata.get("cached_seq_len"),
        functions,
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
    _write(view, key_TJD, value_TJD)
    if (
        view.functions is not None
        and view.segment is not None
        and query.shape[-1] <= MOST_OF_A_HEAD
        and attention.reach.chunk is None
        and not view.is_page_major
    ):
        out_QDT = _prefill(attention, query_TQD, key_TJD, value_TJD, view)
        return out_QDT.permute(2, 0, 1).reshape(*leading, -1)
    num_sequences = view.table_UM.shape[0]
    mask_USC = _mask(view, attention.reach)
    key_UJCD, value_UJCD = _read(view)
    if view.is_page_major:
        is_seen_U1C1 = mask_USC.any(dim=1)[:, None, :, None]
        key_UJCD, value_UJCD = (
            torch.where(is_seen_U1C1, each, 0.0) for each in (key_UJCD, value_UJCD)
        )
    out_USX = attend(
        query_TQD.view(num_sequences, -1, *query_TQD.shape[1:]),
        key_UJCD,
        value_UJCD,
        mask_USC,
        attention.sinks,
        attention.scale,
    )
    return out_USX.reshape(*leading, -1)


def find_functions() -> Any:
    """Return the plugin's functions, None where it has none."""
    try:
        return importlib.import_module("vllm_neuron.functional")
    except ImportError:
        return None


def _prefill(
    attention: AttentionFacts,
    query_TQD: Tensor,
    key_TJD: Tensor,
    value_TJD: Tensor,
    view: PagesView,
) -> Tensor:
    """Return what a sequence's new tokens get, [Q, D, T], from the plugin's functions."""
    keys: dict[str, Any] = {"scale": attention.scale, "tp_out": True}
    if attention.reach.window is not None:
        keys["sliding_window"] = attention.reach.window
    if attention.sinks is not None:
        keys["sink"] = attention.sinks.unsqueeze(1)
    if view.segment:
        segment_QDT: Tensor = view.functions.segmented_attention(
            query_TQD.transpose(0, 1),
            k_cache=view.pages[0],
            v_cache=view.pages[1],
            block_tables=view.table_UM,
            prior_tokens=view.prior_11,
            block_size=view.pages[0].shape[2],
            kv_segment_size=view.segment,
            tp_q=True,
            **keys,
        )
        return segment_QDT
    group = query_TQD.shape[1] // key_TJD.shape[1]
    key_TQD, value_TQD = (each.repeat_interleave(group, dim=1) for each in (key_TJD, value_TJD))
    out_QDT: Tensor = view.functions.flash_attention(
        query_TQD.permute(1, 2, 0),
        key_TQD.permute(1, 2, 0),
        value_TQD.transpose(0, 1),
        tp_q=False,
        **keys,
    )
    return out_QDT


def recur_pages(layer: GatedDeltaNet, inputs: Inputs, view: PagesView) -> Tensor:
    """Go on from the state in each sequence's page, and keep the new one there.

    Returns:
        [U, S, N, V]; arguments as `models.delta_net.Recurrence`. The sequence of a prefill step is
        padded behind its tokens.
    """
    (pages_PF,), (window, memory) = view.pages, (each.sizes for each in layer.state_shapes)
    page_U = view.read_pages()[:, 0]
    rows_UF = pages_PF.index_select(0, page_U)
    is_new_U1 = view.places_T.view(page_U.shape[0], -1)[:, :1] == 0
    rows_UF = torch.where(is_new_U1, 0.0, rows_UF)
    ends = window[0] * window[1], memory[0] * memory[1] * memory[2]
    last, kept = rows_UF[:, : ends[0]], rows_UF[:, ends[0] : sum(ends)]
    last_UwC = last.reshape(-1, *window).to(inputs.mixed_USC.dtype)
    state = last_UwC, kept.reshape(-1, *memory)
    real_US = inputs.real_US
    if real_US is not None:  # padding comes last: it changes nothing if it is zero
        inputs = Inputs(*(part * real_US[..., None].to(part.dtype) for part in inputs[:3]))
    out_USNV, (new_UwC, memory_UNDV) = layer.recur(inputs, state)
    if real_US is not None:
        all_UXC = torch.cat((last_UwC, inputs.mixed_USC), dim=1)
        new_UwC = _rows_before(all_UXC, real_US.sum(1), window[0])
    parts = [new_UwC.flatten(1).float(), memory_UNDV.flatten(1)]
    filler = pages_PF.shape[1] - sum(ends)
    parts.append(pages_PF.new_zeros(page_U.shape[0], filler))
    nowhere = pages_PF.shape[0] - 1
    target_U = torch.where(page_U < nowhere - 1, page_U, nowhere)
    pages_PF.index_copy_(0, target_U, torch.cat(parts, dim=1))
    return out_USNV


def _rows_before(rows_UXC: Tensor, first_U: Tensor, count: int) -> Tensor:
    """Return `count` rows from `first_U` on, [U, count, C], as a product: no index is data."""
    places_X = torch.arange(rows_UXC.shape[1], device=rows_UXC.device)
    wanted_Uw = first_U[:, None] + torch.arange(count, device=rows_UXC.device)
    is_wanted_UwX = (places_X == wanted_Uw[..., None]).to(rows_UXC.dtype)
    return is_wanted_UwX @ rows_UXC


def _write(view: PagesView, key_TJD: Tensor, value_TJD: Tensor) -> None:
    """Put the rows of each token into its slot; those of padding where nobody reads them."""
    pages, slots_T = view.pages, view.slots_T.long()
    heads_J = torch.arange(key_TJD.shape[1], device=key_TJD.device)
    block_size = pages[0].shape[-2]
    page_T = torch.div(slots_T.clamp_min(0), block_size, rounding_mode="floor")
    place_T = slots_T.clamp_min(0) - page_T * block_size
    if view.is_page_major:
        page_T = torch.where(slots_T > 0, page_T, pages[0].shape[0] - 1)
        both_2 = torch.arange(2, device=key_TJD.device)
        index = (
            page_T[:, None, None],
            both_2[None, :, None],
            heads_J[None, None, :],
            place_T[:, None, None],
        )
        rows_T2JD = torch.stack((key_TJD, value_TJD), dim=1)
        pages[0].index_put_(index, rows_T2JD.to(pages[0].dtype))
        return
    for kept, rows_TJD in zip(pages, (key_TJD, value_TJD), strict=True):
        where = page_T[:, None], heads_J[None, :], place_T[:, None]
        kept.index_put_(where, rows_TJD.to(kept.dtype))


def _read(view: PagesView) -> tuple[Tensor, Tensor]:
    """Return keys and values of each sequence in order, [U, J, C, D]; of absent blocks some row."""
    table_UM = view.read_pages()
    if view.is_page_major:
        key_UMJBD, value_UMJBD = view.pages[0][table_UM].unbind(2)
    else:
        key_UMJBD, value_UMJBD = (each[table_UM] for each in view.pages)
    return key_UMJBD.transpose(1, 2).flatten(2, 3), value_UMJBD.transpose(1, 2).flatten(2, 3)


def _mask(view: PagesView, reach: Reach) -> Tensor:
    """Say which tokens of the table each new token sees, [U, S, C] bool."""
    table_UM, block_size = view.table_UM, view.pages[0].shape[-2]
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
