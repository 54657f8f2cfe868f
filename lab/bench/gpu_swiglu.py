"""SwiGLU for the hook of triton_kernels, which takes the activation from its user."""

import triton
import triton.language as tl


@triton.jit
def swiglu(pairs):  # type: ignore[no-untyped-def]
    """Return silu(gate) * up of gates and ups in turn."""
    gate, up = tl.split(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 2, 2)))
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate * tl.sigmoid(gate) * up
