"""Mutants that no test can notice, and why: they are not sampled.

Each stands for one line as it is, without its indentation, and as it would be. `test_mutants.py`
sees that such a mutant still exists, so that an entry goes when its line does.
"""

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change of one line of a file that changes nothing.

    Attributes:
        path: of the file.
        old, new: the line before and after.
        why: what is the same.
    """

    path: str
    old: str
    new: str
    why: str


EQUIVALENT = (
    Equivalent(
        "neuron_moe/plan.py",
        'self.__dict__["num_changes"] = self.__dict__.get("num_changes", 0) + 1',
        'self.__dict__["num_changes"] = self.__dict__.get("num_changes", 0) - 1',
        "the counter still changes",
    ),
    Equivalent(
        "nki_sim/isa/tensor_engine.py",
        "if length < 128 and start != at:",
        "if length <= 128 and start != at:",
        "128 rows or columns begin at 0 of the array, and on partition 0",
    ),
    Equivalent(
        "nki_sim/isa/_arithmetic.py",
        "if least > _FIRST_GENERATION and least > core.target.version.value:",
        "if least >= _FIRST_GENERATION and least > core.target.version.value:",
        "no target is older than the first generation",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "longer = first if len(first) > len(core.flow) else core.flow",
        "longer = first if len(first) >= len(core.flow) else core.flow",
        "the lengths differ there",
    ),
    Equivalent(
        "nki_sim/isa/_dma_operand.py",
        "return self.tensor._derive((1, 1), (1, 1), 0, static=True)",
        "return self.tensor._derive((1, 1), (2, 1), 0, static=True)",
        "an axis of one element has no step",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "highest = torch.where(has_value, exponents, -256).amax(axes)",
        "highest = torch.where(has_value, exponents, -257).amax(axes)",
        "both are below every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "lowest = torch.where(has_value, exponents, 256).amin(axes)",
        "lowest = torch.where(has_value, exponents, 257).amin(axes)",
        "both are above every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "relative = relative.clamp(0, E8M0_NAN - 1).to(torch.uint8)",
        "relative = relative.clamp(1, E8M0_NAN - 1).to(torch.uint8)",
        "only groups of zeros are outside the window, whatever the exponent they are given",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "relative = relative.clamp(0, E8M0_NAN - 1).to(torch.uint8)",
        "relative = relative.clamp(0, E8M0_NAN - 2).to(torch.uint8)",
        "only groups of zeros are outside the window, whatever the exponent they are given",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "highest.append(torch.where(is_zero, -256, field).amax(0, keepdim=True))",
        "highest.append(torch.where(is_zero, -257, field).amax(0, keepdim=True))",
        "both are below every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "lowest.append(torch.where(is_zero, 256, field).amin(0, keepdim=True))",
        "lowest.append(torch.where(is_zero, 257, field).amin(0, keepdim=True))",
        "both are above every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/mxfp4.py",
        "codes += ((scaled.clamp(4, 6) - 4) / 2).round_()",
        "codes += ((scaled.clamp(5, 6) - 4) / 2).round_()",
        "up to 5, half a step rounds to the even code, which is that of 4",
    ),
    Equivalent(
        "nki_kernels/common/router_reference.py",
        "if formula.n_group > 1:",
        "if formula.n_group >= 1:",
        "one group of all experts is always among the chosen ones",
    ),
    Equivalent(
        "nki_kernels/prefill/stages.py",
        "buffer = (s * config.loop.out_parts + part) % config.loop.weight_buffers",
        "buffer = (s * config.loop.out_parts - part) % config.loop.weight_buffers",
        "there are one or two buffers of weights, where sum and difference leave the same rest",
    ),
    Equivalent(
        "nki_kernels/decode/options.py",
        "chunks=1,",
        "chunks=2,",
        "the draft's number of chunks is replaced by the fit",
    ),
    Equivalent(
        "neuron_moe/experts.py",
        "self.num_changes += 1",
        "self.num_changes += 2",
        "the counter still changes",
    ),
    Equivalent(
        "neuron_moe/backends/chosen_experts.py",
        "if min(experts) >= 0:",
        "if min(experts) > 0:",
        "the way for any number of tokens gives the same; this one is faster",
    ),
    Equivalent(
        "nki_kernels/decode/ends.py",
        "dst=spread_sb[full : full + 1, 0:tokens, 0:rest],",
        "dst=spread_sb[full : full + 2, 0:tokens, 0:rest],",
        "there is no row after it",
    ),
    Equivalent(
        "neuron_moe/parallel/placement.py",
        "if peak < load[busy] - 1e-9 * load[busy] and (best is None or peak < best[0]):",
        "if peak <= load[busy] - 1e-9 * load[busy] and (best is None or peak < best[0]):",
        "a swap that gains just a billionth",
    ),
    Equivalent(
        "nki_kernels/index/work_tiles.py",
        "_FAR = float(1 << 22)  # a step that does not exist; twice it is still exact",
        "_FAR = float(2 << 22)  # a step that does not exist; twice it is still exact",
        "any step beyond the last one is none",
    ),
    Equivalent(
        "nki_kernels/index/work_tiles.py",
        "_FAR = float(1 << 22)  # a step that does not exist; twice it is still exact",
        "_FAR = float(1 << 23)  # a step that does not exist; twice it is still exact",
        "any step beyond the last one is none",
    ),
    Equivalent(
        "nki_sim/isa/functions.py",
        "_ERF_LIMIT: Final = 6  # erf(6) rounds to 1 in float64",
        "_ERF_LIMIT: Final = 7  # erf(6) rounds to 1 in float64",
        "beyond 6 the function is 1 in float32 either way",
    ),
    Equivalent(
        "neuron_moe/weights/linear.py",
        'def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertLinear":',
        'def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = False) -> "ExpertLinear":',  # noqa: E501
        "the module has no modules in it",
    ),
    Equivalent(
        "nki_kernels/combine/kernel.py",
        "_NO_ROW = -(1 << 30)  # stays negative whatever the number of the part adds",
        "_NO_ROW = -(1 << 31)  # stays negative whatever the number of the part adds",
        "stays negative whatever the number of the part adds, too",
    ),
    Equivalent(
        "nki_sim/machine/tensor.py",
        "if len(key) < len(shape) or any(item is Ellipsis for item in key):",
        "if len(key) <= len(shape) or any(item is Ellipsis for item in key):",
        "filling up an index that is complete adds nothing",
    ),
    Equivalent(
        "nki_sim/machine/scheduler.py",
        "number = self._counts[index].get(key, 0)",
        "number = self._counts[index].get(key, 1)",
        "counts from another number, for other random orders",
    ),
    Equivalent(
        "nki_sim/machine/iterations.py",
        "_born(bodies, alloc.birth) if alloc.birth >= 0 else _shared(alloc),",
        "_born(bodies, alloc.birth) if alloc.birth > 0 else _shared(alloc),",
        "a loop makes its register first, so tensor 0 was made before it and has either name alone",
    ),
    Equivalent(
        "nki_sim/machine/iterations.py",
        "late = (1 << 30, 0)",
        "late = (1 << 30, 1)",
        "either is behind every line of a file",
    ),
    Equivalent(
        "nki_sim/isa/operators.py",
        '"divide": 2,',
        '"divide": 3,',
        "the number cuts the list of the names x and y, and no engine divides",
    ),
    Equivalent(
        "neuron_moe/weights/experts.py",
        "if first is not None and down is not None:",
        "if first is not None or down is not None:",
        "either both are packed or neither",
    ),
    Equivalent(
        "nki_sim/isa/tensor_engine.py",
        "_TYPES.add(types)",
        "pass",
        "the types are then checked each time",
    ),
    Equivalent(
        "nki_kernels/index/config.py",
        "NO_WORK_TILES = WorkTileDims(0, 1, 0, 1, False, 0)",
        "NO_WORK_TILES = WorkTileDims(0, 1, 0, 1, False, 1)",
        "without lanes no work tile is made, so nothing is loaded once or twice",
    ),
    Equivalent(
        "neuron_moe/moe.py",
        "for count in range(len(_OPTIONAL) + 1)",
        "for count in range(len(_OPTIONAL) + 2)",
        "there is no way to choose more outputs than there are",
    ),
    Equivalent(
        "nki_kernels/common/work_tiles.py",
        "mixed += (len(large) - mixed) % 2",
        "mixed += (len(large) + mixed) % 2",
        "sum and difference leave the same rest",
    ),
    Equivalent(
        "nki_kernels/prefill/options.py",
        "row_buffers=1,",
        "row_buffers=2,",
        "the draft's number of buffers is replaced by the fit",
    ),
    Equivalent(
        "nki_sim/machine/liveness.py",
        "source = np.minimum(first[:-1], max(len(operand_ids) - 1, 0))",
        "source = np.minimum(first[:-1], max(len(operand_ids) - 1, 1))",
        "a trace with one operand in all has nothing to wait for",
    ),
    Equivalent(
        "nki_sim/machine/liveness.py",
        "loads = (columns[:, tr.ENGINE] == tr.DMA) & (columns[:, tr.NUM_READS] > 0)",
        "loads = (columns[:, tr.ENGINE] == tr.DMA) & (columns[:, tr.NUM_READS] >= 0)",
        "every DMA on chip reads something",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1",
        "return r0 < inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1",
        "a box not seen to be in another is looked up in the mask, or kept beside it",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1",
        "return r0 <= inner[0] and inner[1] < r1 and b0 <= inner[2] and inner[3] <= b1",
        "a box not seen to be in another is looked up in the mask, or kept beside it",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 < inner[2] and inner[3] <= b1",
        "a box not seen to be in another is looked up in the mask, or kept beside it",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1",
        "return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] < b1",
        "a box not seen to be in another is looked up in the mask, or kept beside it",
    ),
    Equivalent(
        "nki_kernels/decode/schedule.py",
        "step = max(1, entry_stride(config) * size)",
        "step = max(2, entry_stride(config) * size)",
        "a loop of one entry makes one iteration at most, and others have two entries or more",
    ),
    Equivalent(
        "nki_sim/machine/liveness.py",
        "source = np.minimum(first[:-1], max(len(operand_ids) - 1, 0))",
        "source = np.minimum(first[:-1], max(len(operand_ids) - 2, 0))",
        "only a DMA that writes nothing is that late, and what is read counts in any case",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "if not log.writers or len({access.core for access in log.accesses}) < 2:",
        "if not log.writers and len({access.core for access in log.accesses}) < 2:",
        "such accesses are compared in vain",
    ),
    Equivalent(
        "nki_sim/isa/_dma_operand.py",
        "return np.zeros((0, int(np.prod(self.inner_shape))), self.tensor.dtype.numpy)",
        "return np.zeros((1, int(np.prod(self.inner_shape))), self.tensor.dtype.numpy)",
        "no row is written from it",
    ),
    Equivalent(
        "nki_sim/machine/iterations.py",
        "if isinstance(node, ast.FunctionDef) and node.lineno < line:",
        "if isinstance(node, ast.FunctionDef) and node.lineno <= line:",
        "no function is the body of a loop in its own first line",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "unit = 0",
        "unit = 1",
        "smaller units give the same, in longer arrays",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "unit = math.gcd(unit, run, walk.offset, rows or 0, *(stride for stride, _ in dims))",
        "unit = math.gcd(unit, run, walk.offset, rows or 1, *(stride for stride, _ in dims))",
        "smaller units give the same, in longer arrays",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "entries = -(-log.alloc.size_bytes // unit)",
        "entries = -(-log.alloc.size_bytes * unit)",
        "longer arrays hold the same",
    ),
    Equivalent(
        "nki_sim/machine/program.py",
        "self._stuck = (0, 0)",
        "self._stuck = (0, 1)",
        "the count begins anew with the first value, which is never 0",
    ),
    Equivalent(
        "nki_sim/isa/_dma_transfer.py",
        "rows, valid = _common_rows(dst, srcs) if by_rows else (0, None)",
        "rows, valid = _common_rows(dst, srcs) if by_rows else (1, None)",
        "a mask as one row is given back its shape",
    ),
    Equivalent(
        "neuron_moe/backends/chosen_experts.py",
        "parts, first, rows = [], 0, 0",
        "parts, first, rows = [], 0, 1",
        "one row more or less at a time gives the same",
    ),
    Equivalent(
        "nki_sim/machine/liveness.py",
        "change = np.zeros(length + 1, dtype=np.int64)",
        "change = np.zeros(length + 2, dtype=np.int64)",
        "behind the last instruction nothing changes",
    ),
    Equivalent(
        "nki_kernels/prefill/mx_stages.py",
        "copy_alternating(outer_sb, rows_ps, turn + 1)",
        "copy_alternating(outer_sb, rows_ps, turn - 1)",
        "two engines take turns, and sum and difference leave the same rest",
    ),
    Equivalent(
        "nki_sim/isa/_instruction.py",
        "core.dynamic_operands = 1",
        "core.dynamic_operands = 2",
        "only whether there are any is requested",
    ),
    Equivalent(
        "neuron_moe/backends/chosen_experts.py",
        "padded = functional.pad(rows_nk.unsqueeze(1), (0, 0, 0, FEWEST_ROWS - 1)).unbind()",
        "padded = functional.pad(rows_nk.unsqueeze(1), (0, 0, 0, FEWEST_ROWS + 1)).unbind()",
        "more rows of padding are computed and left out",
    ),
    Equivalent(
        "nki_sim/isa/functions.py",
        "bits = x.dtype.itemsize * 8",
        "bits = x.dtype.itemsize * 9",
        "NumPy shifts unsigned numbers by their width or more to 0, too",
    ),
    Equivalent(
        "nki_sim/isa/registers.py",
        'if tensor.dtype.itemsize > 4 or tensor.dtype.kind == "x":',
        'if tensor.dtype.itemsize > 5 or tensor.dtype.kind == "x":',
        "no type has five bytes",
    ),
    Equivalent(
        "neuron_moe/quantize/fp8.py",
        "elif scale_rows > 1:",
        "elif scale_rows > 2:",
        "two rows are one slab, whose scales are all of them",
    ),
    Equivalent(
        "nki_kernels/common/work_tiles.py",
        "return 2 * num_tiles",
        "return 3 * num_tiles",
        "any number beyond the tiles stands for none",
    ),
    Equivalent(
        "nki_sim/machine/undefined.py",
        "alloc.defined.add_where(walk, hole)",
        "pass",
        "what is not marked as written is filled again with the same bytes",
    ),
    Equivalent(
        "neuron_moe/quantize/fp8.py",
        "one = torch.ones(1, device=codes.device)",
        "one = torch.ones(2, device=codes.device)",
        "nobody reads the scale",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "grain //= 2",
        "grain //= 3",
        "a mask of finer pieces says the same",
    ),
    Equivalent(
        "nki_sim/isa/mx.py",
        "if rows not in (32, 64, 128) or row % rows or row + rows > 128 or k > rows:",
        "if rows not in (32, 64, 128) or row % rows or row + rows > 129 or k > rows:",
        "sums are multiples of 32",
    ),
    Equivalent(
        "neuron_moe/weights/linear.py",
        "like = fn(torch.empty(0, dtype=self.weight.dtype, device=self.device))",
        "like = fn(torch.empty(1, dtype=self.weight.dtype, device=self.device))",
        "only its type and device are requested",
    ),
    Equivalent(
        "nki_sim/machine/memory.py",
        "self._materialise()",
        "pass",
        "few boxes are compared sooner; a mask says the same",
    ),
    Equivalent(
        "nki_sim/machine/iterations.py",
        "_born(bodies, alloc.birth) if alloc.birth >= 0 else _shared(alloc),",
        "_born(bodies, alloc.birth) if alloc.birth >= 1 else _shared(alloc),",
        "a loop makes its register first, so tensor 0 has either name alone",
    ),
    Equivalent(
        "nki_sim/machine/system.py",
        "self._codes.append(code)  # keeps the id from being reused",
        "pass  # keeps the id from being reused",
        "nothing computes with it",
    ),
)
