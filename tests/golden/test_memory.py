"""The bytes of SBUF that kernels are counted with, by which plans are chosen, are what they were.

After a change that is meant to move them: python -m tests.golden.test_memory
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from neuron_moe.blocks import num_blocks
from nki_kernels.common.memory import table_bytes
from nki_kernels.common.token_tiles import split_tokens
from nki_kernels.common.work_tiles import WorkTileDims
from nki_kernels.decode.fit import sbuf_bytes as decode_bytes
from nki_kernels.decode.layer_config import _front_bytes as front_bytes
from nki_kernels.decode.memory import ends_table
from nki_kernels.decode.shared import shared_bytes
from nki_kernels.index import BlockDims
from nki_kernels.index.memory import listing_bytes
from nki_kernels.index.memory import sbuf_bytes as index_bytes
from nki_kernels.index.token_lists import list_width
from nki_kernels.index.work_tiles import work_tile_bytes
from nki_kernels.prefill.memory import sbuf_bytes as prefill_bytes
from nki_kernels.route.memory import router_table
from nki_kernels.route.memory import sbuf_bytes as router_bytes
from tests.nki_kernels.decode import test_kernel as decode
from tests.nki_kernels.decode import test_layer_kernel as decode_layer
from tests.nki_kernels.index import test_kernel as index
from tests.nki_kernels.prefill import test_kernel as prefill
from tests.nki_kernels.route import test_kernel as route

FILE = Path(__file__).with_name("memory.json")
# T, K, E, B: those where counts, lists or the inverse of the slots take most.
LARGE = {"experts": (1, 1, 512, 128), "tokens": (8192, 4, 512, 32), "pairs": (4096, 16, 2, 256)}
WORK_TILES = {
    "one-row": WorkTileDims(1, 1, 1, 32, False, 0),
    "lanes": WorkTileDims(2, 3, 128, 32, False, 2),
    "halves": WorkTileDims(2, 5, 700, 128, True, 0),
}


def counted() -> Iterator[tuple[str, int]]:
    """Give the bytes per partition of each case of the kernels' tests."""
    for name, case in route.CASES.items():
        for in_flight in (1, 2):
            table = router_table(route.config_of(case), case[0], in_flight)
            yield f"route-{name}-{in_flight}", router_bytes(table)
    sizes = {name: case[:4] for name, case in index.CASES.items()} | LARGE
    for name, (T, K, E, B) in sizes.items():
        for cores in (1, 2):
            dims = BlockDims(E, B, num_blocks(T, K, E, B))
            yield f"index-{name}-{cores}", index_bytes(T, K, dims, cores)
            tokens = split_tokens(T, 0, cores)
            width = list_width(tokens, K, dims, 1 / E, min(B, 128))
            work_tiles = WorkTileDims(cores, 4, 40, min(B, 128), False, 0)
            yield f"index-listing-{name}-{cores}", listing_bytes(tokens, K, dims, width, work_tiles)
    for name, listed in WORK_TILES.items():
        yield f"index-work-tiles-{name}", work_tile_bytes(listed, 40)
    for name, problem in prefill.CASES.items():
        yield f"prefill-{name}", prefill_bytes(problem.config())
    for name, decoded in decode.CASES.items():
        config = decoded.config()
        yield f"decode-{name}", decode_bytes(config)
        yield f"decode-ends-{name}", table_bytes(ends_table(config))
    for name, layer in decode_layer.CASES.items():
        of_layer = layer.config()
        yield f"decode-front-{name}", front_bytes(of_layer)
        yield f"decode-shared-{name}", shared_bytes(of_layer.shared)


@cache
def counts() -> dict[str, int]:
    return dict(counted())


WRITTEN = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("kernel", ["route", "index", "prefill", "decode"])
def test_kernels_are_counted_with_the_bytes_they_were(kernel: str) -> None:
    found = {name: count for name, count in counts().items() if name.startswith(kernel)}
    assert found == {name: count for name, count in WRITTEN.items() if name.startswith(kernel)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(dict(counted()), indent=0) + "\n")
