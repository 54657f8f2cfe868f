"""Runs of vLLM in a process of its own: `python offline.py REQUESTS.json ANSWERS.json`.

Each request has `model`, `architecture`, `prompts` (token ids), `max_tokens`, `settings` (of vLLM's
LLM), `passes`, how often the prompts are sent, and perhaps `registrations` (of the plugin, beside
vLLM's own one), `stale_sinks` and `counts`. Each answer has the `tokens` of each pass, and how many
tokens of prompts were `cached` where that `counts`, or the `error`.
Workers of several ranks are spawned, which needs the main guard.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuron_moe.serving.options import hf_overrides
from neuron_moe.serving.plugin import register


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what became of a request."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for _ in range(request.get("registrations", 0)):
        register()
    sinks = _sinks_of_the_constructor() if request.get("stale_sinks") else contextlib.nullcontext()
    try:
        with sinks:
            tokens, cached = _generate(request)
            return {"tokens": tokens} | ({"cached": cached} if request.get("counts") else {})
    except Exception as error:  # noqa: BLE001  the test judges
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def _generate(request: dict[str, Any]) -> tuple[list[list[list[int]]], int]:
    """Return the new tokens of each prompt of each pass, and how many of prompts were cached."""
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 128 << 20,
        "disable_log_stats": True,
        "hf_overrides": hf_overrides(request["architecture"]),
        **request["settings"],
    }
    llm = LLM(request["model"], **settings)
    options = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=request["max_tokens"]
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    passes, cached = [], 0
    for _ in range(request["passes"]):
        outputs = llm.generate(prompts, options, use_tqdm=False)
        cached += sum(output.num_cached_tokens or 0 for output in outputs)
        passes.append([list(output.outputs[0].token_ids) for output in outputs])
    llm.llm_engine.engine_core.shutdown()
    return passes, cached


@contextlib.contextmanager
def _sinks_of_the_constructor() -> Iterator[None]:
    """Let attention go on with what parameters were before weights were loaded: zeros."""
    from neuron_moe.serving.vllm_attention import PagedCore

    settle = PagedCore.settle

    def stale(self: Any, attention: Any) -> None:
        settle(self, attention)
        self.paged.impl.sinks = self.paged.impl.sinks.clone().zero_()

    PagedCore.settle = stale  # type: ignore[method-assign]
    try:
        yield
    finally:
        PagedCore.settle = settle  # type: ignore[method-assign]


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(request) for request in asked]))
