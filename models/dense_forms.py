"""Dense projections of a model in the form in which this machine's CPU multiplies them fastest."""

from collections.abc import Iterator

from torch import Tensor, nn

from neuron_moe.backends import compiled_products
from neuron_moe.backends.form_choice import form_of_linear
from neuron_moe.backends.form_times import linear_forms
from neuron_moe.router import Router
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import COMPILED, MEASURED


class OwnLinear(nn.Module):
    """A linear layer that torch does not multiply, for inference.

    Args:
        linear: on the CPU, float32 or bfloat16.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [.., out] of hidden states [.., in]."""
        rows = self.multiply(hidden.reshape(-1, self.in_features))
        return rows.view(*hidden.shape[:-1], self.out_features)

    def multiply(self, rows_nk: Tensor) -> Tensor:
        """Return [n, out] of rows [n, in]."""
        raise NotImplementedError


class PackedLinear(OwnLinear):
    """One that keeps its weight in oneDNN's layout; the state dict holds the weight as it was."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        (self.packed,) = PackedMatrices.of_linears([linear.weight.detach()])

    def multiply(self, rows_nk: Tensor) -> Tensor:
        """Return [n, out] of rows [n, in]."""
        output_nm = self.packed.multiply(rows_nk, 0, pads=False)
        return output_nm if self.bias is None else output_nm + self.bias

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each use."""
        return self.packed[0].t()

    def _save_to_state_dict(
        self, destination: dict[str, object], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class CompiledLinear(OwnLinear):
    """One that `compiled_products` multiplies; its weight stays as it is.

    Where a processor has no instructions for bfloat16, torch's own product is several times slower.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight = nn.Parameter(linear.weight.detach().contiguous(), requires_grad=False)

    def multiply(self, rows_nk: Tensor) -> Tensor:
        """Return [n, out] of rows [n, in]."""
        return compiled_products.linear(rows_nk, self.weight, self.bias)


_FORMS = {"packed": PackedLinear, COMPILED: CompiledLinear}


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
    """Choose how a CPU multiplies with the dense projections of a model that is to generate.

    A projection that shares its weight with an embedding stays.

    Args:
        model: loaded, without gradients.
        form: 'packed' or 'compiled' for all that this machine can multiply so, 'measured' for what
            is fastest on it; any other form leaves them plain.

    Returns:
        How many are no longer plain.
    """
    if form not in (MEASURED, *_FORMS):
        return 0
    settled = 0
    for parent, name, child in list(dense_linears(model)):
        chosen = form_of_linear(child.weight) if form == MEASURED else form
        if chosen in _FORMS and chosen in linear_forms(child.weight):
            parent.add_module(name, _FORMS[chosen](child))
            settled += 1
    return settled
