"""The typer application: lazy subcommands, and errors of the operator as one line.

Exit status: 0 done, 1 the command failed, 2 the operator has to change something (arguments, environment,
files), 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import typer
from typer.core import TyperGroup

from ..coord.core.errors import ConfigError, KVDistError

PROGRAM: Final = "kvcached-dist"

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chaos": "Kill, stop and refuse ranks of a world of Ray actors by a plan, and check what comes of it.",
        "replay": "Replay a serving trace on several processes and show what elastic memory saves.",
        "sglang": "Show which places of the installed SGLang are hooked, and whether the hooks are in force.",
        "status": "Show the memory, health and counters of every rank of all engines on this host.",
    }
)
"""Subcommand to its line in the help. The module of that name has a typer-annotated function of that name."""

_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""Base of the errors that say that a command line is wrong (``ClickException``, wherever typer takes it from)."""


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are run, and not for the list in the help."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands that are installed."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"{__package__}.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or ``None``."""
        if cmd_name not in self.list_commands(ctx):
            return None
        single = typer.Typer(add_completion=False)
        if self._listing:
            single.command(name=cmd_name, help=COMMANDS[cmd_name])(_listed)
        else:
            module = importlib.import_module(f"{__package__}.{cmd_name}")
            single.command(name=cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of the program."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _listed() -> None:
    """Stands for a command in the help."""


app = typer.Typer(
    name=PROGRAM,
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Elastic KV cache memory for tensor and pipeline parallel LLM engines.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _program() -> None:
    """Elastic KV cache memory for tensor and pipeline parallel LLM engines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: without the program name; those of the process when not given.

    Returns:
        The exit status.
    """
    try:
        result = app(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name=PROGRAM, standalone_mode=False
        )
    except typer.Exit as leave:
        return leave.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", 130)
    except ConfigError as error:
        return _say(str(error), 2)
    except KVDistError as error:
        return _say(str(error), 1)
    except BrokenPipeError:
        # The reader of our output has left (`| head`); nothing can be said, and the flush at exit must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        return _usage(error)
    return result if isinstance(result, int) else 0


def _usage(error: Exception) -> int:
    message = str(getattr(error, "format_message", lambda: error)()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if not message:
        return 2  # called without a command: typer has printed the help
    path = context.command_path if context is not None else PROGRAM
    return _say(f"{message}; see '{path} --help'", 2)


def _say(message: str, status: int) -> int:
    line = " ".join(message.split())
    print(f"{PROGRAM}: {line}", file=sys.stderr)
    return status


__all__ = ["app", "main"]
