"""Weight rules that decoder models share.

Letters: E experts, H hidden, I intermediate.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from neuron_moe.checkpoint import (
    Rule,
    Transform,
    WeightMap,
    chain,
    concat_gate_up,
    identity,
    transpose,
)
from neuron_moe.models.decoder import PROJECTIONS, DecoderConfig

_HEAD = "lm_head.weight"
# What transformers' modules call a layer's parts, by ours, the longest first.
_MODULES = {
    "moe.router.linear_router.": "mlp.gate.",
    "moe.router.": "mlp.gate.",
    "moe.expert_mlps.mlp_op.": "mlp.experts.",
    "moe.": "mlp.",
}
MLP = ("gate_proj", "up_proj", "down_proj")


def projection_names(
    *, has_bias: bool, has_norms: bool = False, biased: Sequence[str] = PROJECTIONS
) -> list[str]:
    """Return what follows `layers.N.` in the names of the attention's projections, and norms.

    Args:
        has_bias: those that are `biased` have a bias.
        has_norms: queries and keys have one each.
        biased: projections.
    """
    names = [f"{name}.weight" for name in PROJECTIONS]
    names += [f"{name}.bias" for name in biased if has_bias]
    names += ["q_norm.weight", "k_norm.weight"] if has_norms else []
    return [f"self_attn.{name}" for name in names]


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
        Rule(head, _HEAD),
        *(
            Rule(f"{source}layers.{{layer}}.{name}", f"layers.{{layer}}.{name}")
            for name in (*norms, *layer_names)
        ),
    ]


def decoder_map(
    config: DecoderConfig,
    rules: Sequence[Rule],
    ignored: Sequence[str] = (),
    blocks: Mapping[str, Sequence[str]] | None = None,
    /,
    **sizes: int,
) -> WeightMap:
    """Return the map of a decoder; some checkpoints of tied embeddings hold the head all the same.

    Args:
        config: how many layers there are, and whether the head is the embedding.
        rules: of all its parameters.
        ignored: patterns, as in `WeightMap`, and so the next two.
        blocks: by the key that shows them.
        sizes: of what patterns count beside `layer`.
    """
    sizes = {"layer": config.num_hidden_layers, **sizes}
    if config.tie_word_embeddings:
        ignored = [
            *ignored,
            *(key for rule in rules if rule.target == _HEAD for key in rule.patterns),
        ]
        rules = [rule for rule in rules if rule.target != _HEAD]
    return WeightMap(rules, sizes, ignored, blocks or {})


def moe_rules(
    mlp: str,
    moe: str,
    experts: Sequence[Rule],
    *,
    router: str = "gate.weight",
    bias: str = "",
    shared: str = "",
) -> list[Rule]:
    """Return the rules of a layer with experts.

    Args:
        mlp: what published names begin with.
        moe: the same of ours.
        experts: rules of the experts, and of what else there is.
        router: published name of its weight.
        bias: of the bias that helps to choose; "" for none, and so the next.
        shared: of the shared experts.
    """
    ours = moe + "router.e_score_correction_bias"
    return [
        Rule(mlp + router, moe + "router.linear_router.weight"),
        *([Rule(mlp + bias, ours, is_exact=True)] if bias else ()),
        *(mlp_rules(mlp + shared, moe + "shared_experts") if shared else ()),
        *experts,
    ]


def both_expert_rules(mlp: str, moe: str, names: Sequence[str] = MLP) -> list[Rule]:
    """Return the rules of experts published one by one, or fused as transformers 5 has them."""
    pair = mlp + "experts", moe + "expert_mlps.mlp_op"
    return either(separate=expert_rules(*pair, names), fused=fused_expert_rules(*pair, transpose))


def feed_forward_rules(
    sparse: Sequence[int],
    num_layers: int,
    of_sparse: Callable[[str, str], list[Rule]],
    source: str = "model.layers.{layer}.mlp",
    names: Sequence[str] = MLP,
) -> list[Rule]:
    """Return the rules of all feed-forward parts, dense ones first.

    Args:
        sparse: layers with experts.
        num_layers: of all.
        of_sparse: returns those of one with experts, given what published names and ours begin
            with.
        source: published name of the part.
        names: published names of gate, up and down of dense ones.
    """
    with_experts, dense = split_layers(sparse, num_layers)
    rules = []
    for layer in dense:
        rules += mlp_rules(source.replace("{layer}", layer), f"layers.{layer}.mlp", names)
    for layer in with_experts:
        rules += of_sparse(source.replace("{layer}", layer) + ".", f"layers.{layer}.moe.")
    return rules


def expert_rules(source: str, target: str, names: Sequence[str] = MLP) -> list[Rule]:
    """Return the rules of experts published one by one, [I, H] twice and [H, I], without biases.

    Args:
        source: published name up to the number of the expert.
        target: name of our experts.
        names: published names of gate, up and down.
    """
    gate, up, down = (f"{source}.{{expert}}.{name}.weight" for name in names)
    return [
        Rule((gate, up), target + ".gate_up_proj.weight", chain(concat_gate_up, transpose)),
        Rule(down, target + ".down_proj.weight", transpose),
    ]


def fused_expert_rules(source: str, target: str, transform: Transform) -> list[Rule]:
    """Return the rules of experts in one tensor for all, gate before up, without biases.

    Args:
        source: published name of the experts.
        target: name of ours.
        transform: `transpose` of [E, 2I, H] and [E, H, I], `identity` of [E, H, 2I] and [E, I, H].
    """
    return [
        Rule(f"{source}.{name}", f"{target}.{name}.weight", transform)
        for name in ("gate_up_proj", "down_proj")
    ]


def block_sparse_rules(router: str = "gate") -> list[Rule]:
    """Return the rules of router and experts as Mixtral publishes them: w1 is gate, w3 up, w2 down.

    Or as transformers' modules call them, and save them where it is set not to convert them back.

    Args:
        router: name of transformers' module.
    """
    layer, moe = "model.layers.{layer}.", "layers.{layer}.moe."
    ours, experts = moe + "router.linear_router.weight", moe + "expert_mlps.mlp_op"
    return either(
        separate=[
            Rule(layer + "block_sparse_moe.gate.weight", ours),
            *expert_rules(layer + "block_sparse_moe.experts", experts, ("w1", "w3", "w2")),
        ],
        fused=[
            Rule(f"{layer}mlp.{router}.weight", ours),
            *fused_expert_rules(layer + "mlp.experts", experts, transpose),
        ],
    )


def mlp_rules(source: str, target: str, names: Sequence[str] = MLP) -> list[Rule]:
    """Return the rules of gate_proj, up_proj and down_proj, which may be published by others."""
    pairs = zip(names, MLP, strict=True)
    return [Rule(f"{source}.{old}.weight", f"{target}.{new}.weight") for old, new in pairs]


def either(**variants: Sequence[Rule]) -> list[Rule]:
    """Return rules that fill the same parameters from one of several storage forms, by name."""
    return [replace(rule, variant=name) for name, rules in variants.items() for rule in rules]


def with_modules(
    weight_map: WeightMap, names: Mapping[str, str], source: str = "model."
) -> WeightMap:
    """Return a map that also reads what transformers saves under the names of its modules.

    That is `save_pretrained(save_original_format=False)` of transformers 5, storage form "modules".

    Args:
        weight_map: of the published form, or several.
        names: what transformers' modules call a part of our names, beside experts and routers.
        source: what names begin with, but for the head's.
    """
    forms = weight_map.variants() or ("published",)
    of_form = {
        form: [rule for rule in weight_map.rules if rule.variant in ("", form)] for form in forms
    }
    modules = []
    for rule in of_form[forms[0]]:
        key = rule.target if rule.target == _HEAD else source + rule.target
        for ours, theirs in {**names, **_MODULES}.items():
            key = key.replace(ours, theirs)
        transform = identity if rule.transform.num_sources > 1 else rule.transform
        if ".experts." in key:
            key, transform = key.removesuffix(".weight"), transpose
        modules.append(replace(rule, sources=key, transform=transform))
    return replace(weight_map, rules=either(**of_form, modules=modules))


def below(prefix: str, weight_map: WeightMap) -> WeightMap:
    """Return a map whose tensors have longer names."""

    def longer(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    blocks = weight_map.ignored_blocks.items()
    return replace(
        weight_map,
        rules=[replace(rule, sources=longer(rule.patterns)) for rule in weight_map.rules],
        ignored=longer(weight_map.ignored),
        ignored_blocks={prefix + name: longer(names) for name, names in blocks},
    )


def beside_tower(text: WeightMap, num_layers: int, names: Iterable[str]) -> WeightMap:
    """Return the map of a text model that is published as `language_model` beside a vision tower.

    Args:
        text: of the text model alone.
        num_layers: of the tower.
        names: of its tensors and of what leads from it to the text, with `{vision_layer}`.
    """
    both = with_modules(below("language_model.", text), {}, "model.language_model.")
    sizes = {**both.sizes, "vision_layer": num_layers}
    return replace(both, sizes=sizes, ignored=[*both.ignored, *names])


def exact_in_either(target: str, transform: Transform = identity, **places: str) -> list[Rule]:
    """Return rules of an exact tensor that has another name in each storage form.

    Args:
        target: the parameter.
        transform: from the tensor to it.
        places: the tensor's name, by form.
    """
    return either(
        **{form: [Rule(name, target, transform, is_exact=True)] for form, name in places.items()}
    )


def shared_sparse_rules(mlp: str, moe: str) -> list[Rule]:
    """Return the rules of router, experts and the gated shared expert."""
    pair, gate = (mlp + "experts", moe + "expert_mlps.mlp_op"), "shared_expert_gate.weight"
    return [
        Rule(mlp + "gate.weight", moe + "router.linear_router.weight"),
        *mlp_rules(mlp + "shared_expert", moe + "shared_experts"),
        Rule(mlp + gate, f"{moe}shared_experts.{gate}"),
        *either(fused=fused_expert_rules(*pair, transpose), separate=expert_rules(*pair)),
    ]


def split_layers(sparse: Sequence[int], num_layers: int) -> tuple[list[str], list[str]]:
    """Return what stands in rules for layers with experts, and for the others.

    That is the number of each, or `{layer}` for all where all have experts.
    """
    if len(sparse) == num_layers:
        return ["{layer}"], []
    dense = (layer for layer in range(num_layers) if layer not in sparse)
    return [str(layer) for layer in sparse], [str(layer) for layer in dense]
