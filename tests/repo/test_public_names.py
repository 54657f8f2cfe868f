"""The public names, and NxD's constructor arguments under them."""

import inspect

import neuron_moe

# NxD's constructor arguments in NxD's order; ours may add keyword-only ones behind them.
SIGNATURES = {
    "RouterTopK": "num_experts top_k hidden_size sequence_parallel_enabled sequence_dimension dtype"
    " device bias tensor_model_parallel_group act_fn apply_act_fn_over_topk jitter_eps"
    " store_transposed_weights",
    "GroupLimitedRouter": "num_experts top_k hidden_size n_group topk_group"
    " sequence_parallel_enabled sequence_dimension dtype device tensor_model_parallel_group"
    " jitter_eps",
    "ExpertMLPsV2": "routed_experts_mlp_config blockwise_matmul_config return_bias dtype"
    " sequence_parallel_enabled device tensor_model_parallel_group expert_model_parallel_group"
    " tkg_tensor_model_parallel_group tkg_expert_model_parallel_group"
    " cte_tensor_model_parallel_group cte_expert_model_parallel_group is_prefill"
    " enabled_hybrid_sharding",
    "SharedExperts": "hidden_size intermediate_size num_shared_experts hidden_act dtype"
    " tensor_model_parallel_group reduce_dtype fused_gate_up_projection sequence_parallel_enabled"
    " transpose_weights",
    "MoE": "router expert_mlps shared_experts rmsnorm sequence_parallel_enabled sequence_dimension"
    " return_router_logits return_expert_index token_shuffle_group_size token_shuffle_seed"
    " tensor_model_parallel_group init_tkg_module tkg_config",
    "BlockwiseMatmulConfig": "block_size use_block_parallel block_sharding_strategy skip_dma_token"
    " skip_dma_weight logical_nc_config blockwise_nki_autograd_cls use_torch_block_wise"
    " parallelize_token_to_block_mapping optimized_block_to_token_mapping"
    " always_augment_inputs_for_blockwise_matmul use_shard_on_intermediate_dynamic_while"
    " use_shard_on_block_dynamic_while num_static_blocks pad_num_blocks_to_even",
    "RoutedExpertsMLPOpsConfig": "num_experts hidden_size intermediate_size top_k hidden_act"
    " glu_mlp bias glu_type hidden_act_scaling_factor hidden_act_bias hidden_size_actual"
    " intermediate_size_actual is_hidden_dim_shuffled is_intermediate_dim_shuffled"
    " use_index_calc_kernel gate_clamp_upper_limit gate_clamp_lower_limit up_clamp_upper_limit"
    " up_clamp_lower_limit normalize_top_k_affinities early_expert_affinity_modulation"
    " input_layer_init_method output_layer_init_method capacity_factor enable_spmd_rank"
    " is_prefill expert_distribution",
}


def test_constructors_take_nxds_arguments_in_nxds_order() -> None:
    for name, arguments in SIGNATURES.items():
        parameters = inspect.signature(getattr(neuron_moe, name).__init__).parameters
        ours = [parameter for parameter in parameters if parameter != "self"]
        theirs = arguments.split()
        assert ours[: len(theirs)] == theirs, name
        for extra in ours[len(theirs) :]:
            assert parameters[extra].kind is inspect.Parameter.KEYWORD_ONLY, (name, extra)


def test_public_names_exist_and_have_docstrings() -> None:
    for name in neuron_moe.__all__:
        value = getattr(neuron_moe, name)
        assert value.__doc__, name


def test_modules_are_reachable_as_in_the_guide() -> None:
    assert neuron_moe.routing.RouterTopK is neuron_moe.RouterTopK
    assert neuron_moe.routing.GroupLimitedRouter is neuron_moe.GroupLimitedRouter
