"""A run of vLLM in a process of its own: `python offline.py REQUEST.json` prints the tokens.

The request has `model`, `prompts` (token ids), `max_tokens`, `settings` (of vLLM's LLM), `passes`,
how often the prompts are sent, and perhaps `registrations` (of the plugin, one by one beside
vLLM's own) and `stale_sinks`. TP needs a main guard, for the workers are spawned.
"""

import json
import sys
from pathlib import Path
from typing import Any

from neuron_moe.serving.options import hf_overrides
from neuron_moe.serving.plugin import register


def run(request: dict[str, Any]) -> list[list[list[int]]]:
    """Return the new tokens of each prompt of each pass."""
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 128 << 20,
        "disable_log_stats": True,
        "hf_overrides": hf_overrides(),
        **request["settings"],
    }
    for _ in range(request.get("registrations", 0)):
        register()
    if request.get("stale_sinks"):
        _keep_sinks_of_the_constructor()
    llm = LLM(request["model"], **settings)
    options = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=request["max_tokens"]
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    passes = []
    for _ in range(request["passes"]):
        outputs = llm.generate(prompts, options, use_tqdm=False)
        passes.append([list(output.outputs[0].token_ids) for output in outputs])
    return passes


def _keep_sinks_of_the_constructor() -> None:
    """Let attention go on with what parameters were before weights were loaded: zeros."""
    from neuron_moe.serving import vllm_attention

    settle = vllm_attention.PagedCore.settle

    def stale(self: Any, attention: Any) -> None:
        settle(self, attention)
        self.paged.impl.sinks = self.paged.impl.sinks.clone().zero_()

    vllm_attention.PagedCore.settle = stale  # type: ignore[method-assign]


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(asked)))
