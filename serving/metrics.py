"""Expert load and paths as Prometheus counters, beside vLLM's own.

The model runs in a process of vLLM's engine, the server's `/metrics` in another: counters travel
through the folder that PROMETHEUS_MULTIPROC_DIR names.

    neuron_moe_expert_tokens_total{layer, expert}   tokens that each expert got
    neuron_moe_steps_total{phase, path, kernel}     steps, and which path computed their experts
"""

import threading
import time
from functools import cache
from typing import cast

from prometheus_client import Counter

from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.moe import MoE
from neuron_moe.plan import Step

PERIOD_S = 1.0


@cache
def _counters() -> tuple[Counter, Counter]:
    """Return tokens of experts and steps, which all models of a process share."""
    tokens = "neuron_moe_expert_tokens", "Tokens that each expert got.", ("layer", "expert")
    steps = "neuron_moe_steps", "Steps by path of the experts.", ("phase", "path", "kernel")
    return Counter(*tokens), Counter(*steps)


class ServingCounters:
    """Count steps as they come and the load of experts once a second.

    Args:
        model: whose MoE layers are counted; all of one size, so that the first one's path is that
            of all.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._layers: dict[int, MoE] = {
            number: cast(MoE, layer.moe)
            for number, layer in enumerate(model.layers)
            if isinstance(getattr(layer, "moe", None), MoE)
        }
        for layer in moe_layers(model):
            layer.enable_load_counters()
        self._first = next(iter(self._layers.values()))
        self._reported = {
            number: [0] * moe.router.spec.num_experts for number, moe in self._layers.items()
        }
        self._tokens, self._steps = _counters()
        threading.Thread(target=self._tell_forever, daemon=True).start()

    def count_step(self, phase: str, tokens: int) -> None:
        """Count a step of T tokens, and the path that its experts took."""
        plan = self._first.plan(Step(phase, tokens))
        self._steps.labels(phase, plan.path, plan.decision.kernel).inc()

    def _tell_forever(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self.tell_load()

    def tell_load(self) -> None:
        """Publish what was counted since the last call."""
        for number, moe in self._layers.items():
            load = moe.expert_load
            if load is None:
                continue
            for expert, count in enumerate(load.tolist()):
                new = count - self._reported[number][expert]
                if new:
                    self._tokens.labels(number, expert).inc(new)
                    self._reported[number][expert] = count
