"""Weight rules that decoder models share.

Letters: E experts, H hidden, I intermediate.
"""

from collections.abc import Iterable, Sequence

from neuron_moe.checkpoint import Rule, chain, concat_gate_up, transpose

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def projection_names(*, has_bias: bool) -> list[str]:
    """Return what follows `layers.N.` in the names of the attention's projections."""
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return [f"self_attn.{name}.{kind}" for name in PROJECTIONS for kind in kinds]


def decoder_rules(
    layer_names: Iterable[str], *, source: str = "model.", head: str = "lm_head.weight"
) -> list[Rule]:
    """Return the rules of embedding, norms, head, and of layer tensors that keep their names.

    Args:
        layer_names: what follows `layers.N.`, such as "self_attn.q_proj.weight", beside the norms.
        source: what published names begin with.
        head: published name of the vocabulary projection.
    """
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return [
        *(Rule(source + name, name) for name in ("embed_tokens.weight", "norm.weight")),
        Rule(head, "lm_head.weight"),
        *(
            Rule(f"{source}layers.{{layer}}.{name}", f"layers.{{layer}}.{name}")
            for name in (*norms, *layer_names)
        ),
    ]


def expert_rules(
    source: str, target: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Rule]:
    """Return the rules of experts without biases, in every layout in circulation.

    `separate` is the published one, [I, H] twice and [H, I] for each expert; `fused` is that of
    transformers 5 in memory, [E, 2I, H] with gate first, and [E, H, I].

    Args:
        source: published name up to the number of the expert.
        target: name of our experts.
        names: published names of gate, up and down.
    """
    gate, up, down = (f"{source}.{{expert}}.{name}.weight" for name in names)
    our_gate_up, our_down = f"{target}.gate_up_proj.weight", f"{target}.down_proj.weight"
    return [
        Rule((gate, up), our_gate_up, chain(concat_gate_up, transpose), variant="separate"),
        Rule(f"{source}.gate_up_proj", our_gate_up, transpose, variant="fused"),
        Rule(down, our_down, transpose, variant="separate"),
        Rule(f"{source}.down_proj", our_down, transpose, variant="fused"),
    ]


def layer_indices(layers: Sequence[int], num_layers: int) -> list[str]:
    """Return what stands for some layers in a rule: `{layer}` for all, else each number."""
    return ["{layer}"] if len(layers) == num_layers else [str(layer) for layer in layers]
