"""The nki backend: a MoE layer through the kernels of `nki_kernels`.

Where the vendor's `nki` is missing, the kernels run on the simulator: the same instructions on
CPU tensors, exact to the rounding of each instruction, and slow. With the vendor's package they are
launched through `nki.jit`; that way has not been tried, for want of a device.

| file | plan of | kernels |
| --- | --- | --- |
| prefill.py | prefill, and decode of more than 256 tokens | prefill_layer, or three kernels |
| prefill_layer.py | the same with norm, router and shared experts in one launch | prefill_layer |
| decode.py | decode, speculation | decode_moe |
| layer.py | the same with norm, router and shared experts in one launch | decode_layer |
| routed_plan.py, router.py | norm and router in front of prefill.py and decode.py | router_topk |

There is no gradient: training uses the torch backend. A token that is not finite becomes NaN alone.
In prefill a finite one whose expert overflows bfloat16 makes the up to 127 others NaN that combine
adds up with it; clamps exclude that, and `MoE.explain` says where nothing does.
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from neuron_moe.backends.nki.backend import NkiBackend

__all__ = ["NkiBackend"]
