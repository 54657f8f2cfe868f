"""MoE layers of decode steps as static graphs, all captured at the start, for accelerators.

A step of T tokens is padded to the next power of two, for which a graph was captured at the start.

Letters: T tokens of a step, H hidden.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.models.decoder import DecoderModel
from neuron_moe.moe import MoE

_MOST_GRAPHS = 4096


class StaticDecode:
    """Takes the place of a MoE layer's `forward`; other steps run as before.

    Args:
        moe: filled, for inference.
        most_tokens: of a step that runs as a graph.
        compiler: backend of torch.compile.
    """

    def __init__(self, moe: MoE, most_tokens: int, compiler: str) -> None:
        self._eager = moe.forward
        self._graph = torch.compile(self._eager, backend=compiler, fullgraph=True, dynamic=False)
        self.sizes = [1 << power for power in range((most_tokens - 1).bit_length() + 1)]

    def __call__(self, hidden_states: Tensor, *arguments: Any, **more: Any) -> Any:
        """Return a tuple with the layer's output, [T, 1, H] in decode; arguments as of the MoE.

        Raises:
            RuntimeError: a graph would have to be captured.
        """
        tokens, new_of_each = hidden_states.shape[:2]
        if new_of_each != 1 or tokens > self.sizes[-1]:
            return self._eager(hidden_states, *arguments, **more)
        size = next(size for size in self.sizes if size >= tokens)
        padded = functional.pad(hidden_states, (0, 0, 0, 0, 0, size - tokens))
        with torch.compiler.set_stance("fail_on_recompile"):
            return (self._graph(padded)[0][:tokens],)

    def capture(self, example_TH: Tensor) -> None:
        """Capture all graphs.

        Args:
            example_TH: hidden states of any number of tokens; their dtype and width count.
        """
        for size in self.sizes:
            self._graph(example_TH.new_zeros(size, 1, example_TH.shape[-1]))


def many_graphs() -> contextlib.AbstractContextManager[None]:
    """Let torch.compile capture what all layers, and all models of a process, need of one code."""
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _MOST_GRAPHS)
    patched: contextlib.AbstractContextManager[None]
    patched = torch._dynamo.config.patch(limits)
    return patched


@torch.inference_mode()
def capture_decode(model: DecoderModel, most_tokens: int, compiler: str) -> int:
    """Let the MoE layers of a model run decode steps as static graphs; return how many there are.

    Args:
        model: filled, for inference.
        most_tokens: of a step that runs as a graph; larger ones run as before.
        compiler: backend of torch.compile.
    """
    layers = [moe for layer in model.layers if isinstance(moe := getattr(layer, "moe", None), MoE)]
    graphs = 0
    for moe in layers:
        static: Any = StaticDecode(moe, most_tokens, compiler)
        graphs += len(static.sizes)
        with many_graphs():
            static.capture(model.embed_tokens.weight)
        moe.forward = static  # type: ignore[method-assign]
    return graphs
