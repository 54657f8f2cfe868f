"""How tokens meet the experts and come home: one object a layout, three calls each.

`tokens` settles how many tokens the ranks hold together, `enter` sends those that this rank routes
to the ranks of their experts, `leave` sends results back and adds them up. Between the last two
the experts see rows and k-wide choices, and know nothing of ranks.

| layout | enter | leave | a token travels, each way |
| --- | --- | --- | --- |
| Local | nothing | nothing | not at all |
| Replicate | all-gather of rows and choices | reduce-scatter, all-reduce | to every rank |
| AllToAll | rows to ranks with a chosen expert | all-to-all back | to these ranks, once each |

`Shuffled` stands around one of them. What is added up before a sum over ranks counts once in total:
each routed expert is on one expert-parallel rank (or its tokens take turns between replicas), its
slices on the tensor parallel ranks, its down bias is divided by them, and shared experts are either
sliced over the ranks that are summed or computed for a share of the tokens.
"""

from neuron_moe.dispatch.build import build_dispatches
from neuron_moe.dispatch.shuffle import build_shuffle
from neuron_moe.dispatch.tokens import Beside, Dispatch, Entered, Own, Rows, TokenBatch

__all__ = [
    "Beside",
    "Dispatch",
    "Entered",
    "Own",
    "Rows",
    "TokenBatch",
    "build_dispatches",
    "build_shuffle",
]
