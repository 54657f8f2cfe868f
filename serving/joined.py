"""A model as one graph of torch.compile: what lies between attention and experts is joined.

Attention is vLLM's operator already. Experts and packed projections, which the graph calls by name,
choose their form at run time; norms, rotary embedding and residuals around them become few kernels.
One graph serves prefill and one decode, for any number of tokens, and one of each for one token.

Letters: U sequences, S tokens of each, H hidden.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe import MoE
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.dense_forms import PackedLinear

_LIBRARY = torch.library.Library("neuron_moe", "FRAGMENT")
_hidden: dict[int, Callable[[Tensor], Tensor]] = {}
_numbers = itertools.count()


def _call(hidden: Tensor, number: int, size: int) -> Tensor:
    return _hidden[number](hidden)


def _shape_of(hidden: Tensor, number: int, size: int) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], size))


_LIBRARY.define("call(Tensor hidden, int number, int size) -> Tensor")
_LIBRARY.impl("call", _call, "CPU")
_LIBRARY._register_fake("call", _shape_of)


def _hide(module: nn.Module, size: int, call: Callable[[Tensor], Tensor]) -> None:
    """Let a graph call a module without looking into it; its output has `size` columns."""
    number = next(_numbers)
    _hidden[number] = call

    def forward(hidden: Tensor, **_more: Any) -> Any:
        output: Tensor = torch.ops.neuron_moe.call(hidden, number, size)
        return (output,) if isinstance(module, MoE) else output

    module.forward = forward  # type: ignore[method-assign]


def join(model: DecoderModel) -> None:
    """Let `forward_tokens` of a model run as graphs; it is compiled when it is first called.

    Args:
        model: filled, for inference, its attention a server's operator.
    """
    for module in list(model.modules()):
        if isinstance(module, MoE):
            eager = module.forward
            _hide(module, model.config.hidden_size, lambda hidden, run=eager: run(hidden)[0])
        elif isinstance(module, PackedLinear):
            _hide(module, module.out_features, module.forward)
    compiled = torch.compile(model.forward_tokens, fullgraph=True, dynamic=True)
    model.forward_tokens = compiled  # type: ignore[method-assign]
