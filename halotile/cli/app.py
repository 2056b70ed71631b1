"""The application ``recon-cli``, without its commands: errors of commands become one message and an exit code."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, ParamSpec, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from halotile.cli import exits
from halotile.cli.arguments import Debug
from halotile.cli.screens.screen import complain, echo
from halotile.errors import ConfigError
from halotile.storage.disk.durable import refusing_full

P = ParamSpec("P")
RESUMABLE = ("run", "resume", "simulate", "levels")  # commands that resume what was stopped when they are repeated

# Commands in the order of use.
COMMANDS = {
    "Start": ("info", "try", "plan", "run", "status"),
    "Results": ("view", "report", "preview", "export", "verify", "levels"),
    "Clusters": ("submit", "logs", "cancel", "dashboard", "doctor", "exec"),
    "More": ("convert", "simulate", "resume", "validate", "bench", "schema"),
}


class _InGroups(TyperGroup):
    """Lists commands in groups, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups of commands."""
        for title, names in COMMANDS.items():
            with formatter.section(title):
                rows = [(name, self.commands[name].get_short_help_str(limit=100)) for name in names]
                formatter.write_dl(rows, col_max=12)


app = typer.Typer(
    name="recon-cli",
    cls=_InGroups,
    help="Denoise and reconstruct images bigger than memory: Zarr, OME-Zarr, TIFF and other formats in, Zarr out.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 done but for quarantined blocks (verify: "
    "but for blocks not done), 4 bad input data (verify: damaged), 5 refused for memory or disk, 75 stopped and resumable, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[P, None]], Callable[..., None]]:
    """Register a command; an error of it becomes one message and its exit code. Every command has the option --debug.

    A parameter whose type is a dataclass stands for the options that are the fields of that.
    """

    def register(function: Callable[P, None]) -> Callable[..., None]:
        parameters: dict[str, inspect.Parameter] = {}
        groups: dict[str, type] = {}
        for name_, parameter in inspect.signature(function, eval_str=True).parameters.items():
            is_group = dataclasses.is_dataclass(parameter.annotation)
            groups |= {name_: parameter.annotation} if is_group else {}
            parameters |= _options_of(parameter.annotation) if is_group else {name_: parameter}
        parameters["debug"] = inspect.Parameter(
            "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
        )

        @functools.wraps(function)
        def wrapped(*args: Any, debug: bool = False, **kwargs: Any) -> None:
            try:
                for group, kind in groups.items():
                    kwargs[group] = kind(**{option: kwargs.pop(option) for option in _options_of(kind)})
                with refusing_full("nothing more can be written"):
                    function(*args, **kwargs)
            except typer.Exit:
                raise
            except (Exception, KeyboardInterrupt, exits.StoppedEarly) as error:
                # os.getcwd
                if isinstance(error, FileNotFoundError) and error.errno and not error.filename:
                    error = ConfigError("the working directory was removed. Change into one that is there.")
                _exit_with_message(error, debug=debug, resumable=function.__name__ in RESUMABLE)

        keyword = inspect.Parameter.KEYWORD_ONLY
        vars(wrapped)["__signature__"] = inspect.Signature(
            [parameter.replace(kind=keyword) for parameter in parameters.values()]
        )
        wrapped.__annotations__ = {name_: one.annotation for name_, one in parameters.items()}
        return app.command(name, **settings)(wrapped)

    return register


def _options_of(group: type) -> dict[str, inspect.Parameter]:
    """Return the fields of a dataclass that are declared as options or arguments."""
    hints = get_type_hints(group, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(group).parameters.items()
        if get_origin(hints[name]) is Annotated
    }


def _exit_with_message(error: BaseException, *, debug: bool, resumable: bool) -> NoReturn:
    if debug:
        import traceback

        complain("".join(traceback.format_exception(error)))
    complain(exits.message_of(error, resumable=resumable))
    raise typer.Exit(exits.exit_code(error)) from None


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from halotile import __version__

        echo(f"halotile {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
