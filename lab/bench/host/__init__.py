"""The benchmark of the host's time: a command, and the processes in which layers are measured."""

from lab.bench.host.command import main

__all__ = ["main"]
