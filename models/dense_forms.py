"""Dense projections of a model, packed for a CPU where that is faster on this machine."""

from collections.abc import Iterator

from torch import Tensor, nn

from neuron_moe.backends.form_choice import packs_linear
from neuron_moe.router import Router
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import MEASURED


class PackedLinear(nn.Module):
    """A linear layer that keeps its weight in oneDNN's layout, for inference.

    The state dict holds the weight as it was.

    Args:
        linear: on the CPU, float32 or bfloat16.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        (self.packed,) = PackedMatrices.of_linears([linear.weight.detach()])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [.., out] of hidden states [.., in]."""
        rows = self.packed.multiply(hidden.reshape(-1, self.in_features), 0, pads=False)
        if self.bias is not None:
            rows = rows + self.bias
        return rows.view(*hidden.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each use."""
        return self.packed[0].t()

    def _save_to_state_dict(
        self, destination: dict[str, object], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def dense_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield parent, name and projection of all that may be multiplied in another form.

    Not those that share a weight with an embedding, nor routers, which compute in float32, nor
    whose weight the parent reads itself, named in its `read_weights`.
    """
    shared = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for parent in model.modules():
        if isinstance(parent, Router):
            continue
        for name, child in parent.named_children():
            is_read = name in getattr(parent, "read_weights", ())
            if type(child) is nn.Linear and id(child.weight) not in shared and not is_read:
                yield parent, name, child


def settle_linears(model: nn.Module, form: str) -> int:
    """Pack the dense projections of a model that is to generate, one after the other.

    A projection that shares its weight with an embedding stays.

    Args:
        model: loaded, without gradients.
        form: 'measured' packs those that this machine multiplies faster so, 'packed' all; any
            other form none.

    Returns:
        How many were packed.
    """
    if form not in (MEASURED, "packed"):
        return 0
    packed = 0
    for parent, name, child in list(dense_linears(model)):
        if form == "packed" or packs_linear(child.weight):
            parent.add_module(name, PackedLinear(child))
            packed += 1
    return packed
