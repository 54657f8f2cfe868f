"""A small runner in the manner of vllm-neuron's: buckets, pages, static graphs, greedy tokens.

Prefill takes one sequence a step, padded to a bucket, and cut to segments if requested; decode
takes all of them, padded to a bucket. After the warm-up a graph that would be captured anew is an
error. Padding has slot 0 in prefill, as since vLLM 0.24, and -1 in decode, as before.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from neuron_moe.models.loader import read_config
from neuron_moe.serving.neuron_model import (
    NeuronMoeNativeForCausalLM,
    NeuronMoeNativeHybridForCausalLM,
)

BLOCK = 16
BLOCKS_PER_SEQUENCE = 8
PREFILL_BUCKETS = (32, 64)
DECODE_BUCKETS = (2, 4)


Sampled = tuple[Tensor | None, Tensor]


class RecompiledError(AssertionError):
    pass


def _token(found: Sampled) -> int:
    """Return the best token, which must be the one that was sampled."""
    token, logits = found
    best = int(logits.argmax())
    assert token is None or int(token) == best
    return best


def native_class(folder: Any) -> type[NeuronMoeNativeForCausalLM]:
    """Return the class that --hf-overrides must name for a checkpoint."""
    config = read_config(folder)
    is_hybrid = "linear_num_key_heads" in config.get("text_config", config)
    return NeuronMoeNativeHybridForCausalLM if is_hybrid else NeuronMoeNativeForCausalLM


class Runner:
    """Holds a model as the plugin's runner does.

    Args:
        folder: of the checkpoint.
        dtype: of parameters and pages.
        options: of our model.
        captures: compile static graphs, which run as they are; else all runs eagerly.
        trims: cut the tables of sliding layers to their window in decode.
        segment: tokens of a segment of prefill; None prefills at once.
        samples: let tokens be sampled on the device.

    Attributes:
        graphs: that were captured.
        codes: of each graph.
        operators: what a compiler of graphs was given, all graphs together.
    """

    def __init__(
        self,
        folder: Any,
        dtype: torch.dtype,
        *,
        options: dict[str, Any] | None = None,
        captures: bool = False,
        trims: bool = False,
        segment: int | None = None,
        samples: bool = False,
    ) -> None:
        hf_config = SimpleNamespace(name_or_path=str(folder), dtype=dtype)
        if options is not None:
            hf_config.neuron_moe = options
        with torch.device("meta"):
            self.model = native_class(folder).from_configs(
                hf_config,
                SimpleNamespace(
                    on_device_sampling_config=object() if samples else None, max_logprobs=5
                ),
            )
        self.model.load_weights(str(folder), torch.device("cpu"), None)
        spec = self.model.get_kv_spec()
        self.specs, self.states = spec.layers, spec.recurrent_layers or []
        self.trims, self.segment = trims, segment
        self.graphs, self.is_warm, self.codes = 0, False, list[str]()
        self.operators = set[str]()
        self._allocate(max(DECODE_BUCKETS))
        self.forward: Callable[..., Any] = self.model
        if captures:
            torch._dynamo.reset()
            self._compiler = aot_autograd(fw_compiler=self._note)
            self.forward = torch.compile(
                self.model, backend=self.compile_graph, fullgraph=True, dynamic=False
            )

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        """Compile one bucket; raise after the warm-up."""
        if self.is_warm:
            raise RecompiledError("a graph was captured after the warm-up")
        self.graphs += 1
        self.codes.append(graph.code)
        return self._compiler(graph, inputs)

    def _note(self, graph: Any, inputs: Any) -> Any:
        calls = (node.target for node in graph.graph.nodes if node.op == "call_function")
        self.operators |= set(map(str, calls))
        return graph.forward

    def _allocate(self, num_sequences: int) -> None:
        """Allocate pages, filled with numbers that would be seen; block 0 stays for padding."""
        count = 1 + num_sequences * BLOCKS_PER_SEQUENCE
        if self.states:  # pages of all layers, and one of zeros, and one for what nobody reads
            shapes = {
                each.name: (2, each.num_kv_heads, BLOCK, each.head_size) for each in self.specs
            }
            for each in self.states:
                shapes[each.name] = (sum(map(math.prod, each.shapes)) + 3,)
            dtypes = {each.name: each.dtype for each in self.specs}
            caches = {
                name: [torch.full((count + 2, *shape), math.nan, dtype=dtypes.get(name))]
                for name, shape in shapes.items()
            }
            for (pages,) in caches.values():
                pages[-2] = 0.0
        else:
            caches = {
                each.name: [
                    torch.full(
                        (count, each.num_kv_heads, BLOCK, each.head_size), 50.0, dtype=each.dtype
                    )
                    for _ in range(2)
                ]
                for each in self.specs
            }
        self.model.bind_kv_cache(caches)
        # Shuffled, so that a sequence's pages do not follow one another.
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.view(num_sequences, -1).to(torch.int32)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every bucket once."""
        for size in PREFILL_BUCKETS:
            self._prefill(0, [1] * min(size, 3), size, 0)
        for size in DECODE_BUCKETS:
            self._decode([(0, 3, 1)], size)
        self.is_warm = True

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return `count` greedy tokens of each prompt."""
        answers = []
        for row, prompt in enumerate(prompts):
            step = self.segment or len(prompt)
            for start in range(0, len(prompt), step):
                found = self._prefill(row, prompt[start : start + step], None, start)
            answers.append([_token(found)])
        for _ in range(count - 1):
            rows = [
                (row, len(prompts[row]) + len(answer) - 1, answer[-1])
                for row, answer in enumerate(answers)
            ]
            for answer, found in zip(answers, self._decode(rows, None), strict=False):
                answer.append(_token(found))
        return answers

    def _call(self, **keys: Any) -> list[Sampled]:
        """Return the token of each sampled position, where the model chose one, and its logits."""
        found = self.forward(rank=torch.tensor([0]), **keys)
        if isinstance(found, Tensor):
            return [(None, logits) for logits in found]
        return [*zip(*found, strict=True)]

    def _prefill(self, row: int, ids: Sequence[int], size: int | None, start: int) -> Sampled:
        size = size or next(bucket for bucket in PREFILL_BUCKETS if bucket >= len(ids))
        missing = size - len(ids)
        places = torch.arange(start, start + len(ids))
        table = self._table(row, start + len(ids))[None]
        slots = self._slots(row, places, missing, 0)
        metadata = self._metadata([row], slots, table, max_query_len=size, cached=start)
        return self._call(
            input_ids=torch.tensor([*ids, *[0] * missing]),
            positions=torch.cat([places, torch.zeros(missing, dtype=torch.long)]),
            attn_metadata=metadata,
            sampling_positions=torch.tensor([len(ids) - 1]),
        )[0]

    def _decode(self, rows: Sequence[tuple[int, int, int]], size: int | None) -> list[Sampled]:
        """Rows are (sequence, place, token)."""
        size = size or next(bucket for bucket in DECODE_BUCKETS if bucket >= len(rows))
        missing = size - len(rows)
        slots = [int(self._slots(row, torch.tensor([place]))) for row, place, _ in rows]
        tables = [self._table(row, place + 1) for row, place, _ in rows]
        tables += [torch.full((BLOCKS_PER_SEQUENCE,), -1, dtype=torch.int32)] * missing
        metadata = self._metadata(
            [row for row, *_ in rows],
            torch.tensor(slots + [-1] * missing),
            torch.stack(tables),
            max_query_len=1,
            cached=0,
        )
        if self.trims:
            self._trim(metadata, [place for _, place, _ in rows] + [0] * missing)
        return self._call(
            input_ids=torch.tensor([token for *_, token in rows] + [0] * missing),
            positions=torch.tensor([place for _, place, _ in rows] + [0] * missing),
            attn_metadata=metadata,
            sampling_positions=torch.arange(size),
        )

    def _table(self, row: int, length: int) -> Tensor:
        """The pages of a sequence, -1 where it has none yet."""
        used = torch.arange(BLOCKS_PER_SEQUENCE) < -(-length // BLOCK)
        return torch.where(used, self.tables[row], -1).to(torch.int32)

    def _slots(self, row: int, places: Tensor, missing: int = 0, filler: int = -1) -> Tensor:
        slots = self.tables[row][places // BLOCK].long() * BLOCK + places % BLOCK
        return torch.cat([slots, torch.full((missing,), filler)])

    def _metadata(
        self,
        rows: Sequence[int],
        slots: Tensor,
        table: Tensor,
        *,
        max_query_len: int,
        cached: int,
    ) -> dict[str, dict[str, Any]]:
        common = {
            "slot_mapping": slots,
            "block_table_tensor": table,
            "max_query_len": max_query_len,
            "decode_token_threshold": 1,
            "block_size": BLOCK,
            "max_blocks_per_seq": BLOCKS_PER_SEQUENCE,
            "cached_seq_len": torch.tensor([[cached]], dtype=torch.int32),
            "kv_segment_size": self.segment or 0,
        }
        found = {spec.name: dict(common) for spec in self.specs}
        if self.states:
            page_U1 = self.tables[:, -1:][list(rows)]
            stale = page_U1[:1].expand(len(table) - len(rows), 1)
            states = {**common, "block_table_tensor": torch.cat([page_U1, stale])}
            found |= {spec.name: dict(states) for spec in self.states}
        return found

    def _trim(self, metadata: dict[str, dict[str, Any]], places: Sequence[int]) -> None:
        """Cut tables of sliding layers to the blocks of their window, as the plugin's runner."""
        for spec in self.specs:
            if spec.sliding_window_size is None:
                continue
            kept = -(-spec.sliding_window_size // BLOCK) + 1
            first = [max(0, place - spec.sliding_window_size + 1) // BLOCK for place in places]
            table = metadata[spec.name]["block_table_tensor"]
            padded = torch.nn.functional.pad(table, (0, kept), value=-1)
            cut = [row[start : start + kept] for row, start in zip(padded, first, strict=True)]
            metadata[spec.name]["block_table_tensor"] = torch.stack(cut)
            metadata[spec.name]["swa_kv_pos_offset"] = (
                torch.tensor(first, dtype=torch.int32) * BLOCK
            )
