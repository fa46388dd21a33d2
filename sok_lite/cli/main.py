"""The command line: arguments, one-line errors, and the exit status."""

import argparse
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from sok_lite._version import __version__
from sok_lite.cli.errors import BROKEN_PIPE, FAILED, INTERRUPTED, TERMINATED, WRONG_USE, WrongUse
from sok_lite.engine.files.manifest import newest_at
from sok_lite.engine.files.store import Store, is_in_store

COMMANDS = (
    "inspect",
    "get",
    "report",
    "verify",
    "diff",
    "convert",
    "reshard",
    "merge",
    "export",
    "compile",
    "doctor",
    "plan",
)
# Arguments of any command that name its inputs.
_READ = ("path", "paths", "first", "second")
_STATUS = """exit status:
  0  success
  1  verify, diff or doctor found something; get: a key is missing; plan: no room
  2  usage error
  3  a file cannot be read or written"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default this process's; returns its exit status, or raises
    SystemExit.
    """
    args = _parser().parse_args(arguments)
    try:
        with ExitStack() as reading:
            _read_newest(args, reading)
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _fail(args, INTERRUPTED, "interrupted")
    except BrokenPipeError:
        # The reader closed the output; Python would report it again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except WrongUse as error:
        return _fail(args, WRONG_USE, str(error))
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(args, FAILED, f"{where}{error.strerror}" if error.strerror else str(error))
    except (ValueError, ImportError) as error:
        return _fail(args, FAILED, str(error))
    except MemoryError as error:
        return _fail(args, FAILED, f"no memory ({error or 'it is not said for what'})")
    except Exception as error:
        return _fail(args, FAILED, f"{type(error).__name__}: {error} (--debug shows where)")


def _read_newest(args: argparse.Namespace, reading: ExitStack) -> None:
    """Replaces input paths: the folder of a `Checkpoint` by its newest save, an address by a local
    copy, which stays until `reading` ends. `args.stores` maps copies to stores.
    """

    def newest(path: str) -> str:
        if not is_in_store(path):
            return newest_at(path)
        store = Store(path)
        folder, _ = reading.enter_context(store.download())
        args.stores[folder] = store
        return folder

    args.stores = {}
    for name in _READ:
        given = getattr(args, name, None)
        if isinstance(given, str):
            setattr(args, name, newest(given))
        elif given is not None:
            setattr(args, name, list(map(newest, given)))


def entry() -> int:
    """`main` for a process of its own; removes temporary files when terminated too."""
    signal.signal(signal.SIGTERM, _end)
    # For closed streams: print and flush need one, and no file may take its number.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # table names may have any letter
    return main()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


def _fail(args: argparse.Namespace, status: int, reason: str) -> int:
    if args.debug:
        traceback.print_exc()
    print(f"sok-lite {args.command}: {' '.join(reason.splitlines())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as everything else here."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"{self.prog}: {message} (--help says more)\n")


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="sok-lite",
        description="Inspect, convert and plan checkpoints of embedding tables.",
        epilog=f"sok-lite COMMAND --help shows all arguments, and an example.\n\n{_STATUS}",
        formatter_class=form,
    )
    parser.add_argument("--version", action="version", version=f"sok-lite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"sok_lite.cli.commands.{name}")
        examples = "".join(f"  {line}\n" for line in module.EXAMPLES.splitlines())
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example:\n{examples}\n{_STATUS}",
            formatter_class=form,
        )
        module.add_arguments(command)
        command.add_argument(
            "--no-progress", dest="progress", action="store_false", help="show no progress bar"
        )
        command.add_argument("--debug", action="store_true", help="print the traceback of an error")
        command.set_defaults(run=module.run)
    return parser
