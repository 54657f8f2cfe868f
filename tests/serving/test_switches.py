"""Each of vLLM's switches: our model takes it, or it is refused by name before anything starts."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.options import ARCHITECTURE, HYBRID_ARCHITECTURE, hf_overrides
from neuron_moe.serving.plugin import OwnSettings
from neuron_moe.serving.server import ServerSettings
from neuron_moe.serving.switches import SETTLED, SWITCHES, check_settled, check_switches, flag
from tests.serving.servers import OF_EACH_GROUP

READ = Path(__file__).with_name("read_switches.py")
READ_S = 1200  # where others use the machine
THREADS = min(2, len(os.sched_getaffinity(0)))
# What gives each switch a value that our model does not take.
REFUSED = {
    "enable_prompt_embeds": ["--enable-prompt-embeds"],
    "quantization": ["--quantization=fp8"],
    "quantization_config": ['--quantization-config={"ignore": ["lm_head"]}'],
    "hf_config_path": ["--hf-config-path={model}"],
    "config_format": ["--config-format=mistral"],
    "convert": ["--convert=classify"],
    "load_format": ["--load-format=dummy"],
    "safetensors_load_strategy": ["--safetensors-load-strategy=eager"],
    "model_loader_extra_config": ['--model-loader-extra-config={"enable_multithread_load": true}'],
    "pt_load_map_location": ["--pt-load-map-location=cuda"],
    "pipeline_parallel_size": ["-pp=2"],
    "data_parallel_size": ["-dp=2"],
    "prefill_context_parallel_size": ["-pcp=2"],
    "decode_context_parallel_size": ["-dcp=2"],
    "enable_eplb": ["--enable-eplb"],
    "enable_elastic_ep": ["--enable-elastic-ep"],
    "expert_placement_strategy": ["--expert-placement-strategy=round_robin"],
    "enable_dbo": ["--enable-dbo"],
    "ubatch_size": ["--ubatch-size=2"],
    "enable_ep_weight_filter": ["--enable-ep-weight-filter"],
    "all2all_backend": ["--all2all-backend=deepep_low_latency"],
    "kv_sharing_fast_prefill": ["--kv-sharing-fast-prefill"],
    "mamba_cache_dtype": ["--mamba-cache-dtype=float32"],
    "use_replayssm": ["--use-replayssm"],
    "cpu_offload_gb": ["--cpu-offload-gb=1"],
    "offload_group_size": ["--offload-group-size=2"],
    "moe_backend": ["--moe-backend=triton"],
    "linear_backend": ["--linear-backend=torch"],
    "compilation_config": ['--compilation-config={"mode": 1}', "--no-enforce-eager"],
    "enable_lora": ["--enable-lora"],
    "diffusion_config": ['--diffusion-config={"canvas_length": 8}'],
    "engram_config": ["--engram-config={}"],
    "weight_transfer_config": ['--weight-transfer-config={"backend": "nccl"}'],
    "enable_return_routed_experts": ["--enable-return-routed-experts"],
    "speculative_config": [
        '--speculative-config={"method": "draft_model", "model": "{model}",'
        ' "num_speculative_tokens": 2}'
    ],
    "override_generation_config": [
        '--override-generation-config={"attn_temperature_tuning": false}'
    ],
}
# Those that vLLM refuses itself, for any model of this kind or on a CPU, and how it begins.
BY_VLLM = {
    "quantization": "Quantization method specified in the model config",
    "config_format": "Failed to load mistral 'params.json'",
    "enable_eplb": "Expert parallelism load balancing is only supported on CUDA",
    "enable_elastic_ep": "Elastic EP is only supported with",
}
# Ways to draft by the model's states, which vLLM's own classes let read: what requests each.
DRAFTS = {
    method: [
        f'--speculative-config={{"method": "{method}", "model": "{{draft}}",'
        ' "num_speculative_tokens": 2}'
    ]
    for method in ("eagle", "eagle3")
}
# Settings of `serve` beside which a switch gets as far as our model.
BESIDE: dict[str, dict[str, Any]] = {
    "decode_context_parallel_size": {"tp": 2},
}
OF_SERVE = {
    "model": ["--model=elsewhere"],
    "model_tag": ["elsewhere"],
    "served_model_name": ["--served-model-name=another"],
    "host": ["--host=0.0.0.0"],
    "port": ["--port=1"],
    "dtype": ["--dtype=float16"],
    "tensor_parallel_size": ["-tp=2"],
    "enable_expert_parallel": ["--enable-expert-parallel"],
    "max_model_len": ["--max-model-len=17"],
    "kv_cache_memory_bytes": ["--kv-cache-memory-bytes=1"],
    "shutdown_timeout": ["--shutdown-timeout=1"],
    "hf_overrides": ['--hf-overrides={"rope_theta": 1}'],
    "model_class_overrides": ['--model-class-overrides={"a": "b"}'],
    "model_impl": ["--model-impl=transformers"],
    "additional_config": ["--additional-config={}"],
    "uds": ["--uds=socket"],
    "ssl_keyfile": ["--ssl-keyfile=key"],
    "ssl_certfile": ["--ssl-certfile=certificate"],
    "headless": ["--headless"],
    "grpc": ["--grpc"],
    "grpc_port": ["--grpc-port=1"],
    "api_server_count": ["--api-server-count=2"],
    "data_parallel_rank": ["--data-parallel-rank=1"],
    "data_parallel_start_rank": ["--data-parallel-start-rank=1"],
    "data_parallel_size_local": ["--data-parallel-size-local=2"],
    "data_parallel_hybrid_lb": ["--data-parallel-hybrid-lb"],
    "data_parallel_external_lb": ["--data-parallel-external-lb"],
    "data_parallel_multi_port_external_lb": ["--data-parallel-multi-port-external-lb"],
}
# Groups that say nothing to a model, and the switches of the other groups that ours takes as any
# other does: vLLM does what they say, or refuses them on a CPU.
TAKEN_GROUPS = {
    "Frontend",
    "MambaConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "SchedulerConfig",
    "StructuredOutputsConfig",
    "LoggingConfig",
    "LoRAConfig",
}
TAKEN = {
    "options": """help config disable_log_stats aggregate_engine_logging fail_on_environ_validation
        gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_log_requests""",
    "ModelConfig": """runner tokenizer tokenizer_mode trust_remote_code seed
        allowed_local_media_path allowed_media_domains revision code_revision tokenizer_revision
        allow_deprecated_quantization enforce_eager return_sampling_mask max_logprobs logprobs_mode
        use_fp64_gumbel enable_trace_replay disable_cascade_attn disable_sliding_window
        skip_tokenizer_init hf_token
        pooler_config generation_config enable_sleep_mode
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
        enable_nccl_comm_suspend logits_processors io_processor_plugin renderer_num_workers""",
    "LoadConfig": """download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size
        ignore_patterns use_tqdm_on_load""",
    "AttentionConfig": "attention_backend",
    "ParallelConfig": """distributed_executor_backend master_addr master_port nnodes node_rank
        distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes
        numa_bind_cpus device_ids dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size data_parallel_address data_parallel_rpc_port
        data_parallel_backend enable_hc_sp enable_batch_sharded_sampling enable_shm_tensor_arena
        elastic_ep_max_dp_size dbo_decode_token_threshold dp_sync_interval
        dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
        max_parallel_loading_workers ray_workers_use_nsight disable_custom_all_reduce worker_cls
        worker_extension_cls enable_fault_tolerance fault_tolerance_config""",
    "CacheConfig": """block_size gpu_memory_utilization kv_cache_dtype num_gpu_blocks_override
        enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval
        kv_cache_dtype_skip_layers swa_bounded_replay mamba_ssm_cache_dtype
        mamba_block_size prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint
        replayssm_buffer_len kv_offloading_size kv_offloading_backend""",
    "OffloadConfig": """offload_backend cpu_offload_params offload_num_in_group
        offload_prefetch_step offload_params""",
    "CompilationConfig": "cudagraph_capture_sizes max_cudagraph_capture_size",
    "KernelConfig": "ir_op_priority enable_flashinfer_autotune sparse_indexer_topk_backend",
    "VllmConfig": """spec_method spec_model spec_tokens watermark_config
        kv_transfer_config kv_events_config ec_transfer_config ec_manager_config attention_config
        reasoning_config kernel_config structured_outputs_config aux_output_config profiler_config
        optimization_level performance_mode""",
}


def _config(**values: Any) -> Any:
    """Return vLLM's configuration with values that our model takes, or others by their place."""
    places: dict[str, Any] = {switch.place: switch.taken[0] for switch in SWITCHES}
    places |= {
        "model_config.hf_overrides": hf_overrides(),
        "model_config.override_generation_config": {"temperature": 0.5},
        "speculative_config": None,
    }
    config = SimpleNamespace()
    for place, value in (places | values).items():
        *sections, name = place.split(".")
        at = config
        for section in sections:
            at = vars(at).setdefault(section, SimpleNamespace())
        setattr(at, name, value)
    return config


def test_a_configuration_that_our_model_takes_is_taken() -> None:
    for switch in SWITCHES:
        for value in switch.taken:
            OwnSettings.verify_and_update_config(_config(**{switch.place: value}))


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_another_value_is_refused_by_name(switch: Any) -> None:
    with pytest.raises(ValueError, match=f"^{flag(switch.name)}: .*Leave it out"):
        OwnSettings.verify_and_update_config(_config(**{switch.place: "another"}))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            "speculative_config",
            SimpleNamespace(method="eagle3"),
            "method: 'eagle3', must be 'ngram'",
        ),
        (
            "model_config.hf_overrides",
            {"rope_theta": 1},
            "--hf-overrides: rope_theta must stay out",
        ),
        (
            "model_config.override_generation_config",
            {"attn_temperature_tuning": True},
            "--override-generation-config: attn_temperature_tuning must stay out",
        ),
    ],
)
def test_what_would_change_vllms_idea_of_the_model_is_refused(
    place: str, value: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_switches(_config(**{place: value}))


def test_ngrams_and_a_function_as_overrides_are_taken() -> None:
    check_switches(_config(speculative_config=SimpleNamespace(method="ngram")))
    check_switches(_config(**{"model_config.hf_overrides": lambda config: config}))


def test_drafts_are_refused_where_a_state_cannot_go_back() -> None:
    speculation = SimpleNamespace(method="ngram")
    places = {"model_config.architecture": HYBRID_ARCHITECTURE, "speculative_config": speculation}
    with pytest.raises(ValueError, match=r"'ngram', must be None .* cannot go back behind"):
        check_switches(_config(**places))


@pytest.mark.parametrize("name", SETTLED)
def test_what_serve_settles_is_refused_behind_the_dashes(name: str) -> None:
    own = argparse.Namespace(**dict.fromkeys(SETTLED, 1))
    check_settled(own, own)
    given = argparse.Namespace(**(vars(own) | {name: 2}))
    with pytest.raises(ValueError, match=f"{flag(name)} behind --: 2, must be 1"):
        check_settled(given, own)


def test_latent_attention_is_planned_as_the_keys_and_values_that_our_model_keeps() -> None:
    facts = SimpleNamespace(is_deepseek_mla=True, head_size=576)
    text = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64)
    OwnSettings.verify_and_update_model_config(
        SimpleNamespace(model_arch_config=facts, hf_text_config=text)
    )
    assert (facts.is_deepseek_mla, facts.head_size) == (False, 192)
    grouped = SimpleNamespace(is_deepseek_mla=False, head_size=64)
    OwnSettings.verify_and_update_model_config(
        SimpleNamespace(model_arch_config=grouped, hf_text_config=SimpleNamespace())
    )
    assert grouped.head_size == 64


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what vLLM made of the shipped model with each switch, and which switches it has."""
    folder = tmp_path_factory.mktemp("readings")
    tiny = checkpoint_folder(TINY_NAME)
    cases = {"none": [], **OF_SERVE, **REFUSED, **DRAFTS}
    own_of = {
        name: ServerSettings(folder=tiny, name=TINY_NAME, **BESIDE.get(name, {})).arguments()
        for name in ("none", *BESIDE)
    }
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(llama))  # vLLM drafts by EAGLE with such a one
    calls = []
    for name, words in cases.items():
        own = own_of.get(name, own_of["none"])
        given = [
            word.replace("{model}", str(tiny)).replace("{draft}", str(folder)) for word in words
        ]
        calls.append([*own, "--", *given])
    (folder / "calls.json").write_text(json.dumps(calls))
    command = [sys.executable, str(READ), str(folder / "calls.json"), str(folder / "answers.json")]
    done = subprocess.run(
        command,
        env=os.environ | server_environment(1, THREADS),
        capture_output=True,
        text=True,
        check=False,
        timeout=READ_S,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    answers["outcomes"] = dict(zip(cases, answers["outcomes"], strict=True))
    return answers


@pytest.mark.vllm
def test_each_switch_of_vllms_is_taken_or_refused(readings: dict[str, Any]) -> None:
    judged = {*OF_SERVE, *REFUSED}
    unjudged, gone = {}, {}
    for group, names in readings["groups"].items():
        taken = {*names} if group in TAKEN_GROUPS else {*TAKEN.get(group, "").split()}
        unjudged[group] = sorted({*names} - judged - taken)
        gone[group] = sorted(taken - {*names})
    assert not any(unjudged.values()), unjudged
    assert not any(gone.values()), gone
    assert {*readings["groups"]} - {"positional arguments"} == {*OF_EACH_GROUP}
    assert not judged - {name for names in readings["groups"].values() for name in names}


@pytest.mark.vllm
def test_without_switches_the_model_is_taken(readings: dict[str, Any]) -> None:
    assert readings["outcomes"]["none"] is None


@pytest.mark.vllm
@pytest.mark.parametrize("name", OF_SERVE)
def test_vllm_reads_what_serve_settles_and_it_is_refused(
    name: str, readings: dict[str, Any]
) -> None:
    assert readings["outcomes"][name].startswith(f"{flag(name)} behind --: ")


@pytest.mark.vllm
@pytest.mark.parametrize("name", REFUSED)
def test_vllm_reads_what_our_model_does_not_take_and_it_is_refused(
    name: str, readings: dict[str, Any]
) -> None:
    assert readings["outcomes"][name].startswith(BY_VLLM.get(name, flag(name)))


@pytest.mark.vllm
@pytest.mark.parametrize("method", DRAFTS)
def test_drafts_that_read_the_states_of_the_model_are_refused(
    method: str, readings: dict[str, Any]
) -> None:
    words = (
        f"--speculative-config, method: '{method}', must be 'ngram' for .*: drafts cannot read the"
        " states of our model. Leave it out."
    )
    assert re.fullmatch(words, readings["outcomes"][method], flags=re.DOTALL)


@pytest.mark.vllm
@pytest.mark.parametrize("name", [ARCHITECTURE, HYBRID_ARCHITECTURE])
def test_vllm_finds_none_of_the_interfaces_in_our_class(name: str) -> None:
    from vllm.model_executor.models import interfaces

    from neuron_moe.serving import vllm_model

    ours = getattr(vllm_model, name)
    offered = {
        "LoRA": interfaces.supports_lora(ours),
        "EAGLE": interfaces.supports_eagle(ours),
        "EAGLE-3": interfaces.supports_eagle3(ours),
        "EPLB": interfaces.is_mixture_of_experts(ours),
        "pipeline parallel": interfaces.supports_pp(ours),
    }
    assert not any(offered.values()), offered


@pytest.mark.vllm
def test_a_rank_has_the_threads_asked_for(readings: dict[str, Any]) -> None:
    assert readings["threads"] == str(THREADS)


def test_there_is_a_call_for_each_refusal() -> None:
    assert {*SETTLED} == {*OF_SERVE}
    others = {"speculative_config", "override_generation_config", *BY_VLLM}
    assert {switch.name for switch in SWITCHES} | others == {*REFUSED}
