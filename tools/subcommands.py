"""The subcommands of neuron-moe: module (see `menu.load`), and a line of explanation."""

from neuron_moe.tools.commands import chip
from neuron_moe.tools.menu import Menu

SUBCOMMANDS = {
    "demo": ("commands.demo", "a small checkpoint: generate, compare with transformers"),
    "generate": ("commands.generate", "generate text from a checkpoint"),
    "chat": ("commands.chat", "talk with a checkpoint, turn by turn"),
    "serve": ("commands.serve", "an OpenAI-compatible server for a checkpoint, through vLLM"),
    "inspect": ("commands.inspect", "a checkpoint's sizes and memory; --explain: how a step runs"),
    "convert": ("commands.convert", "another number format or layout, files of ranks, or merged"),
    "compare": ("commands.compare", "where a model parts from a reference, layer by layer"),
    "plan": ("commands.plan", "the fastest layout on a Trn2 machine; --place: experts by load"),
    "compile": (
        "commands.compile",
        "the whole plan for a chip, and the program where there is one",
    ),
    "tune": ("tune", "the fastest block sizes and plans of a layer, as a file"),
    "profile": ("profile", "where the time of a kernel or layer goes, by source line"),
    "chip": ("commands.chip", f"settle it on a Trainium 2: {', '.join(chip.MENU.entries)}"),
}
OTHERS = {
    "completion": ("completion", "a script: bash or zsh completes options and values"),
    "explain": ("commands.explain", "how a MoE layer computes a step: inspect --explain"),
    "place": ("commands.place", "place experts on ranks by recorded load: plan --place"),
    "bench": ("lab.bench.menu", "benchmarks"),
    "check": ("lab.check.menu", "kernels against references"),
    "evaluate": ("lab.evaluate", "held-out loss by weight format, ours and transformers"),
    "routing": ("lab.routing", "which experts a text chooses; what follows for blocks, EPLB"),
    "train": ("lab.train.train", "go on training a checkpoint, experts over ranks; resumes"),
    "train_tiny": ("lab.train.train_tiny", "train the small GPT-OSS model"),
    "export_tiny": ("lab.train.export_tiny", "export a training run as the shipped checkpoint"),
    "prepare_corpus": ("lab.train.prepare_corpus", "fetch the corpus of the small model"),
}
MENU = Menu("neuron-moe", "command", SUBCOMMANDS, OTHERS)
