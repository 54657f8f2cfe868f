"""The subcommands of neuron-moe: module (see `menu.load`), and a line of explanation."""

from neuron_moe.tools.commands import bench, check, chip
from neuron_moe.tools.menu import Menu

SUBCOMMANDS = {
    "demo": (
        "commands.demo",
        "a small checkpoint: generate, compare with transformers",
    ),
    "generate": ("commands.generate", "generate text from a checkpoint"),
    "chat": ("commands.chat", "talk with a checkpoint, turn by turn"),
    "serve": ("commands.serve", "an OpenAI-compatible server for a checkpoint, through vLLM"),
    "inspect": ("commands.inspect", "architecture, sizes and memory per rank of a checkpoint"),
    "convert": ("commands.convert", "another number format or layout, files of ranks, or merged"),
    "compare": ("commands.compare", "where a model parts from a reference, layer by layer"),
    "bench": ("commands.bench", f"benchmarks: {', '.join(bench.MENU.entries)}"),
    "explain": ("commands.explain", "how a MoE layer computes a step, and how to change that"),
    "tune": ("commands.tune", "the fastest block sizes and plans of a layer, as a file"),
    "profile": ("commands.profile", "where the time of a kernel or layer goes, by source line"),
    "place": ("commands.place", "place experts on ranks by recorded load (EPLB)"),
    "plan": ("commands.plan", "the fastest layout of the experts on a Trn2 machine, and why"),
    "compile": (
        "commands.compile",
        "the whole plan for a chip, and the program where there is one",
    ),
    "evaluate": (
        "commands.evaluate",
        "held-out loss by weight format, ours and transformers",
    ),
    "routing": ("commands.routing", "which experts a text chooses; what follows for blocks, EPLB"),
    "prepare_corpus": (
        "lab.train.prepare_corpus",
        "fetch and tokenise the corpus of the small model",
    ),
    "train": ("lab.train.train", "go on training a checkpoint, experts over ranks; resumes"),
    "train_tiny": ("lab.train.train_tiny", "train the small GPT-OSS model"),
    "export_tiny": (
        "lab.train.export_tiny",
        "export a training run as the shipped MXFP4 checkpoint",
    ),
    "check": (
        "commands.check",
        f"kernels against references: {', '.join(check.MENU.entries)}",
    ),
    "completion": ("commands.completion", "a script: bash or zsh completes options and values"),
    "chip": ("commands.chip", f"settle it on a Trainium 2: {', '.join(chip.MENU.entries)}"),
}
MENU = Menu("neuron-moe", "command", SUBCOMMANDS)
