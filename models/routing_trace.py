"""Recorded routing: which experts every token of some text chose, layer by layer.

A trace is what tools that place experts or size blocks want instead of a uniform draw. It is stored
as one .npz file of small integers, without pickle:

    expert_index_LTK  uint8 [L, T, K]  the choice, highest score first
    sequence_starts   int32 [U]        the first token of each sequence; tokens follow in order
    num_experts       int64 []         E
    margin_LT         float16 [L, T]   how clear each choice was (`selection_margin`); optional

Letters: U sequences, L MoE layers, T tokens of all sequences, E experts, K experts per token.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.shipped import shipped_checkpoint
from neuron_moe.router import Router, Routing, selection_margin, selection_scores

_MAKE = "Make it with neuron-moe routing."
_MOST_EXPERTS = 256  # of a uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The choices of some sequences.

    Attributes:
        expert_index_LTK: [L, T, K] uint8.
        sequence_starts: [U] int32, ascending from 0.
        num_experts: E.
        margin_LT: [L, T] float16, the last chosen score above the first that was not; None in a
            trace that was recorded without.
    """

    expert_index_LTK: NDArray[np.uint8]
    sequence_starts: NDArray[np.int32]
    num_experts: int
    margin_LT: NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        index, starts = self.expert_index_LTK, self.sequence_starts
        if index.ndim != 3 or index.dtype != np.uint8:
            raise ValueError(
                f"expert_index_LTK {index.dtype} {list(index.shape)}: must be uint8 [L, T, K]."
                " Use record_routing() to make a trace."
            )
        if not index.size or index.max() >= self.num_experts:
            raise ValueError(
                f"expert_index_LTK {list(index.shape)}: must hold experts below num_experts="
                f"{self.num_experts}, at least one. Check which model the trace is of."
            )
        ascends = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
        if not ascends or starts[-1] >= index.shape[1]:
            raise ValueError(
                f"sequence_starts={starts.tolist()}: must ascend from 0 and stay below the"
                f" {index.shape[1]} tokens of the trace. Use record_routing() to make a trace."
            )
        if self.margin_LT is not None and self.margin_LT.shape != index.shape[:2]:
            raise ValueError(
                f"margin_LT {list(self.margin_LT.shape)}: must be {list(index.shape[:2])}, as the"
                " choices. Use record_routing() to make a trace."
            )

    @classmethod
    def joined(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Return the tokens of several traces of one model, one behind the other.

        Raises:
            ValueError: traces of different models.
        """
        sizes = {(t.num_experts, *t.expert_index_LTK.shape[::2]) for t in traces}
        if len(sizes) != 1:
            raise ValueError(
                f"traces: are of {len(sizes)} different models (experts, layers, choices:"
                f" {', '.join(map(str, sorted(sizes)))}). Join those of one."
            )
        margins = [trace.margin_LT for trace in traces]
        known = [each for each in margins if each is not None]
        before = np.cumsum([0, *(trace.num_tokens for trace in traces[:-1])])
        starts = [
            first + trace.sequence_starts for first, trace in zip(before, traces, strict=True)
        ]
        return cls(
            expert_index_LTK=np.concatenate([t.expert_index_LTK for t in traces], axis=1),
            sequence_starts=np.concatenate(starts).astype(np.int32),
            num_experts=traces[0].num_experts,
            margin_LT=np.concatenate(known, axis=1) if len(known) == len(margins) else None,
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.expert_index_LTK.shape[1])

    def load_LE(self, first: int = 0, last: int | None = None) -> NDArray[np.int64]:
        """Return how many of the tokens `first` to before `last` chose each expert, [L, E]."""
        index_LTK = self.expert_index_LTK[:, first:last]
        rows = [np.bincount(layer.ravel(), minlength=self.num_experts) for layer in index_LTK]
        return np.stack(rows).astype(np.int64)

    def save(self, path: Path | str) -> None:
        """Write the trace as a compressed .npz file."""
        margins: dict[str, Any] = {} if self.margin_LT is None else {"margin_LT": self.margin_LT}
        np.savez_compressed(
            path,
            expert_index_LTK=self.expert_index_LTK,
            sequence_starts=self.sequence_starts,
            num_experts=np.int64(self.num_experts),
            **margins,
        )

    @classmethod
    def load(cls, path: Path | str) -> RoutingTrace:
        """Read a trace.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a trace.
        """
        with Path(path).open("rb") as file:
            try:
                arrays = np.load(file, allow_pickle=False)
            except (ValueError, EOFError, BadZipFile) as error:
                raise ValueError(f"{path}: must be a trace, but {error}. {_MAKE}") from error
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError(f"{path}: must be a trace, but is one array. {_MAKE}")
            try:
                return cls._from_arrays(path, arrays)
            except (EOFError, BadZipFile, zlib.error) as error:
                raise ValueError(f"{path}: is damaged: {error}. {_MAKE}") from error

    @classmethod
    def _from_arrays(cls, path: Path | str, arrays: Mapping[str, Any]) -> RoutingTrace:
        names = {"expert_index_LTK", "sequence_starts", "num_experts"}
        if set(arrays) - {"margin_LT"} != names:
            raise ValueError(
                f"{path}: must hold {', '.join(sorted(names))}, but has"
                f" {', '.join(sorted(arrays))}. {_MAKE}"
            )
        return cls(
            expert_index_LTK=arrays["expert_index_LTK"],
            sequence_starts=arrays["sequence_starts"],
            num_experts=int(arrays["num_experts"]),
            margin_LT=arrays.get("margin_LT"),
        )


@torch.inference_mode()
def record_routing(model: nn.Module, sequences: Sequence[Sequence[int]]) -> RoutingTrace:
    """Run sequences through a model, one prefill each, and keep what its routers choose.

    Args:
        model: a model of this package; called as model(input_ids [1, S]).
        sequences: token ids, each sequence with at least one.

    Returns:
        The trace.

    Raises:
        ValueError: no sequence, an empty one, no MoE layer, or more than 256 experts.
    """
    if not sequences or not all(sequences):
        raise ValueError("sequences: must be at least one, each with a token. Give some text.")
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            f"model={type(model).__name__}: has no MoE layer. Record a model that has one."
        )
    num_experts = layers[0].router.num_experts
    if num_experts > _MOST_EXPERTS:
        raise ValueError(
            f"num_experts={num_experts}: a trace holds at most {_MOST_EXPERTS} experts in a byte."
            " Record fewer, or widen the format."
        )
    chosen: list[list[Tensor]] = [[] for _ in layers]
    margins: list[list[Tensor]] = [[] for _ in layers]

    def keep(layer: int, router: Router, routing: Routing) -> None:
        formula, bias = router.spec.formula, router.e_score_correction_bias
        scores_TE = selection_scores(routing.router_logits_TE, formula, bias)
        margins[layer].append(selection_margin(scores_TE, formula.top_k).half().cpu())
        chosen[layer].append(routing.expert_index_TK.to(torch.uint8).cpu())

    hooks = [
        moe.router.register_forward_hook(
            lambda router, _, routing, layer=layer: keep(layer, router, routing)
        )
        for layer, moe in enumerate(layers)
    ]
    try:
        for tokens in sequences:
            model(torch.tensor([list(tokens)]))
    finally:
        for hook in hooks:
            hook.remove()
    starts = np.cumsum([0, *(len(tokens) for tokens in sequences[:-1])], dtype=np.int32)
    index_LTK = torch.stack([torch.cat(parts) for parts in chosen]).numpy()
    return RoutingTrace(
        expert_index_LTK=index_LTK,
        sequence_starts=starts,
        num_experts=num_experts,
        margin_LT=torch.stack([torch.cat(parts) for parts in margins]).numpy(),
    )


def recorded_load(path: Path | None) -> tuple[Tensor | None, str]:
    """Return the expert load of a recorded layer, and which one it is.

    Args:
        path: a trace, or None for those shipped with the small model.

    Returns:
        [E] load of the layer with the largest skew in the trace, or None without any trace.
    """
    if path is None:
        folder = shipped_checkpoint()
        paths = sorted((folder / "traces").glob("*.npz")) if folder is not None else []
    else:
        paths = [path]
    loads = {}
    for found in paths:
        load_LE = torch.from_numpy(RoutingTrace.load(found).load_LE())
        for layer, load_E in enumerate(load_LE):
            loads[f"{found.name}, layer {layer}"] = load_E
    if not loads:
        return None, "none: no trace is shipped and --trace is not given"
    name = max(loads, key=lambda key: float(loads[key].max() / loads[key].double().mean()))
    return loads[name], name
