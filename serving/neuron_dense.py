"""Dense layers of one of several ranks: each holds its part and gives what one rank would.

Which part that is says `models.dense_parts`. Projections into heads and into a dense MLP need no
word between ranks; what comes out of them is summed once. Nothing in a graph depends on the rank.

Letters: n ranks, H hidden, V vocabulary, D head size.
"""

from dataclasses import replace
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuron_moe.experts import RoutedExperts
from neuron_moe.models.decoder import DecoderModel, GroupedAttention, Norm
from neuron_moe.models.delta_net import GatedDeltaNet
from neuron_moe.models.dense_parts import OUTPUTS, DenseSplit, Part
from neuron_moe.parallel.collectives import Collectives
from neuron_moe.router import Router
from neuron_moe.serving.heads import gather_columns
from neuron_moe.shared_experts import SharedExperts

_ELSEWHERE = RoutedExperts, SharedExperts, Router  # know their own parts


class SummedLinear(nn.Module):
    """A projection whose inputs are cut; the bias is added once, to the sum over ranks.

    Args:
        linear: this rank's part.
        group: the ranks.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, group: Collectives) -> None:
        super().__init__()
        self.group, self.weight = group, linear.weight
        self.register_parameter("bias", linear.bias)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, own: Tensor) -> Tensor:
        """Return [.., out] of this rank's inputs [.., in / n], the same on every rank."""
        summed = self.group.all_reduce(functional.linear(own, self.weight))
        return summed if self.bias is None else summed + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding of some rows; those of other ranks give zeros, and the sum is whole.

    Args:
        embedding: this rank's part, as large as that of the others.
        group: the ranks.

    Attributes:
        first_row: of this rank; a tensor, so that the graphs of all ranks are one.
    """

    first_row: Tensor

    def __init__(self, embedding: nn.Embedding, group: Collectives) -> None:
        super().__init__()
        self.group, self.weight = group, embedding.weight
        first_row = torch.tensor(group.rank * self.weight.shape[0], device="cpu")
        self.register_buffer("first_row", first_row, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return [.., H] of token ids [..]."""
        rows, count = input_ids.long() - self.first_row, self.weight.shape[0]
        found = functional.embedding(rows.clamp(0, count - 1), self.weight)
        is_elsewhere = (rows < 0) | (rows >= count)
        return self.group.all_reduce(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


class VocabularyHead(nn.Module):
    """A vocabulary projection of some rows, whose logits are gathered.

    Args:
        linear: this rank's part, as large as that of the others.
        group: the ranks.
        vocab_size: V.

    Attributes:
        gathers: else it returns the logits of this rank's rows.
    """

    def __init__(self, linear: nn.Linear, group: Collectives, vocab_size: int) -> None:
        super().__init__()
        self.gathers = True
        self.group, self.vocab_size = group, vocab_size
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [.., V] of hidden states [.., H]."""
        own = functional.linear(hidden, self.weight, self.bias)
        if not self.gathers:
            return own
        return gather_columns(self.group, own)[..., : self.vocab_size]


class JointNorm(nn.Module):
    """The norm of all heads together, for those of one rank.

    Args:
        norm: this rank's part.
        group: the ranks.
        count: numbers of all ranks; a head that several hold counts as often.
    """

    def __init__(self, norm: Norm, group: Collectives, count: int) -> None:
        super().__init__()
        self.group, self.weight, self.eps, self.count = group, norm.weight, norm.eps, count

    def forward(self, heads: Tensor) -> Tensor:
        """Return the normalised heads of this rank, [.., heads * D]."""
        wide = heads.float()
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True))
        unit = wide * torch.rsqrt(squares / self.count + self.eps)
        return (self.weight.float() * unit).to(heads.dtype)


def cut_dense(model: DecoderModel, group: Collectives) -> dict[str, Part]:
    """Leave a rank its part of everything but the routed experts, of a model without weights.

    Args:
        model: just built, with grouped attention or a recurrence in every layer.
        group: all ranks of the model.

    Returns:
        What the rank holds of each parameter that was cut here; shared experts know it themselves.

    Raises:
        ValueError: key/value heads, or key heads, do not divide over the ranks.
    """
    if group.size == 1:
        return {}
    config = model.config
    split = DenseSplit(
        size=group.size,
        rank=group.rank,
        heads=config.num_attention_heads,
        kv_heads=min(config.kv_head_counts),
        is_even=len(config.kv_head_counts) == 1,
        recurrent=getattr(config, "linear_attention", None),
    )
    split.check()
    parts = _cut_parameters(model, split)
    for module in list(model.modules()):
        if isinstance(module, SharedExperts):
            module.split_over(group)
        if isinstance(module, GroupedAttention):
            _settle_attention(module, split, group)
        if isinstance(module, GatedDeltaNet):
            module.sizes = module.sizes.shared_by(group.size)
        if not isinstance(module, _ELSEWHERE):
            for name, child in list(module.named_children()):
                if name in OUTPUTS and isinstance(child, nn.Linear):
                    module.add_module(name, SummedLinear(child, group))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    model.add_module("embed_tokens", VocabularyEmbedding(model.embed_tokens, group))
    model.add_module("lm_head", VocabularyHead(model.lm_head, group, config.vocab_size))
    return parts


def _cut_parameters(model: DecoderModel, split: DenseSplit) -> dict[str, Part]:
    """Put parameters of the rank's shapes in place of the whole ones; return what they hold."""
    inside = {
        id(each)
        for owner in model.modules()
        if isinstance(owner, _ELSEWHERE)
        for each in owner.modules()
    }
    # A norm of all heads together goes as the projection before it.
    alike = {
        f"{path}.{which}_norm.weight": f"{path}.{which}_proj.weight"
        for path, module in model.named_modules()
        if isinstance(module, GroupedAttention) and module.norms == "jointly"
        for which in "qk"
    }
    # Layers may have query heads of their own number.
    splits = {
        path: replace(split, heads=module.core_sizes(1).query_heads)
        for path, module in model.named_modules()
        if isinstance(module, GroupedAttention)
    }
    parts = {}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        own = splits.get(path) or splits.get(path.rpartition(".")[0], split)
        for leaf, whole in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}"
            part = own.part(alike.get(name, name), whole.shape)
            if part is not None:
                parts[name] = part
                shape = [len(indices) for indices in part.selection(whole.shape)]
                setattr(module, leaf, nn.Parameter(whole.new_empty(shape)))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    return parts


def _settle_attention(attention: GroupedAttention, split: DenseSplit, group: Collectives) -> None:
    """Let an attention know that it has some of the heads."""
    own = ceil(attention.cache_shape[0][0] / split.size)
    attention.cache_shape = tuple((own, size) for _, size in attention.cache_shape)
    if attention.norms == "jointly":
        for name, heads in (("q_norm", split.heads), ("k_norm", own * split.size)):
            norm = JointNorm(getattr(attention, name), group, heads * attention.head_dim)
            attention.add_module(name, norm)
