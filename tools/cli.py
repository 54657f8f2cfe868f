"""neuron-moe: one command, one file per subcommand.

A subcommand is a module of `tools/commands` (or `lab/train`) with `main(argv) -> int`, imported
only when it is called, so that `neuron-moe --help` is instant and a missing optional package hurts
only the command that needs it.
"""

import os
import sys

from neuron_moe.tools.interrupts import ends_at_once

# By name, so that `--help` need not import what raises them.
_NOT_BUGS = (
    "CollectiveError",
    "RankError",
    "ServerError",
    "CalledProcessError",
    "TaskFailedError",
)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit status.

    Whatever goes wrong ends with one sentence on standard error: 2 for an error of the caller, 1
    where other processes failed or for a bug of ours, which leaves a report, 130 for Ctrl-C.
    """
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] == "--version":
        from neuron_moe import __version__

        print(f"neuron-moe {__version__}")
        return 0
    try:
        with ends_at_once():
            from neuron_moe.tools.subcommands import MENU
        return MENU.main(args)
    except KeyboardInterrupt:
        return _end(args, "interrupted; what it printed and wrote so far stays", 130)
    except BrokenPipeError:
        # Nobody reads on, as with `| head`; the interpreter would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except FileNotFoundError as error:
        missing = f"{error.filename}: there is no such file. Correct the path."
        return _end(args, error if error.filename is None else missing, 2)  # or our own sentence
    except (ValueError, OSError, ImportError) as error:
        return _end(args, error, 2)
    except MemoryError as error:
        return _end(args, f"not enough memory: {error}", 2)
    except Exception as error:  # noqa: BLE001  the last resort: a report instead of a traceback
        if type(error).__name__ in _NOT_BUGS:
            return _end(args, error, 1)
        from neuron_moe.tools.report import write_report

        path = write_report(args, error)
        what = f"internal error, {type(error).__name__}: {error}"
        return _end(args, f"{what}. This is a bug of neuron-moe. Report: {path}", 1)


def _end(args: list[str], what: object, status: int) -> int:
    """Say in one line why a subcommand ended; return the exit status."""
    print(
        f"\nneuron-moe {args[0]}: " if status == 130 else f"neuron-moe {args[0]}: ",
        end="",
        file=sys.stderr,
    )
    print(" ".join(str(what).split()) or type(what).__name__, file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
