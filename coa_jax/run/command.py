"""Runs the entry points: parses flags, reports errors and ends the process.

An entry point defines its flags in a function and passes this function and `main` to `run_main`:

    def define_flags() -> None:
        config_flag("configs/sft/factbook.py")
        workdir_flag("where the run is written")

    def main(argv: list[str]) -> None:
        train(flags.FLAGS.config, flags.FLAGS.workdir)

    if __name__ == "__main__":
        run_main(main, define_flags)

Importing an entry point defines no flags, so one process can import two entry points. An error that
the user can correct ends the command with one line on stderr and exit code 2; Ctrl-C ends the
command with exit code 130, and SIGTERM with 143 (a training run first saves its state, see
`train.stop`). Every other exception is a bug of coa_jax and keeps its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import importlib.util
import inspect
import itertools
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from coa_jax.config.extensions import importable
from coa_jax.config.help import outermost, page, search, settings_of
from coa_jax.config.installed import ROOT, config_files
from coa_jax.config.overrides import (
    join_new_values,
    lock,
    readable_overrides,
    suggest,
    switches,
    wrong_value,
)
from coa_jax.errors import Outage, UserError, UserErrors, causes_of
from coa_jax.parallel.compilation_cache import enable_compilation_cache
from coa_jax.run.settings import errors_of
from coa_jax.storage import closing_caches, with_urls
from coa_jax.storage.flags import check_places

# With this call, --help lists the flags that the functions below define under the calling module.
flags.disclaim_key_flags()

_HELP = re.compile(r"--?(help|helpshort|helpfull|helpxml|\?)")
_CONFIG_SWITCH = re.compile(r"--?config(=|$)")
_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
_DISK_FULL = "disk full: "
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS} | {
    *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    errno.ENXIO,  # a pipe without a reader
}


@dataclasses.dataclass(frozen=True)
class ConfigFlag:
    """The arguments of a call of `config_flag`."""

    default: str = ""
    settings: type[Any] | None = None
    first: Sequence[str] = ()
    with_defaults: Callable[[ml_collections.ConfigDict], ml_collections.ConfigDict] | None = None


defined_config = ConfigFlag()
"""The config flag of the command; `config_flag` sets it."""
_needed: list[tuple[tuple[str, ...], str]] = []
"""What `need` was called with."""
# The command line that ml_collections searches for overrides: it does not read them from FLAGS.
_config_argv: list[str] = []


# --- the wrapper ---------------------------------------------------------------------------


def run_main(
    main: Callable[[list[str]], int | None],
    define_flags: Callable[[], None] | None = None,
    *,
    positional: bool = False,
    opens_places: bool = True,
) -> NoReturn:
    """Parses the command line, runs `main` and exits the process.

    Args:
        main: function that runs the command. It is called with `[program, *positional arguments]`,
            and its return value is the exit code (None for 0).
        define_flags: function that defines the flags of the command, including `config_flag`; None
            for a command without flags.
        positional: whether the command takes positional arguments.
        opens_places: whether the command opens the files and buckets that its flags name. If True,
            the function first checks with a request whether each bucket exists.
    """

    def parse(argv: list[str]) -> list[str]:
        importable(Path())
        enable_compilation_cache()
        rest = _parse_flags(argv, positional, opens_places)
        _quieten_libraries()
        _join_processes()
        return rest

    try:
        if define_flags is not None:
            define_flags()
        try:
            app.run(closing_caches()(main), flags_parser=parse)
        finally:
            sys.stdout.flush()
    except SystemExit as done:
        sys.exit(done.code)
    except KeyboardInterrupt:
        # A second Ctrl-C ends the process immediately and does not interrupt exit handlers, which
        # would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("interrupted; run the same command again to continue", file=sys.stderr)
        _leave_processes(KeyboardInterrupt(), "interrupted", 130)
        if main.__module__ == "__main__":  # a notebook or a test that calls run_main goes on
            atexit.register(_exit_without_destructors, 130)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has closed it (`... | head`); no message can be printed.
        _silence_stdout()
        _leave_processes(BrokenPipeError(), "the reader of its output is gone", 141)
        sys.exit(141)
    except Exception as error:
        line = explain(error)
        if line is None:
            if _is_one_of_several():
                traceback.print_exc()
                _leave_processes(error, repr(error), 1)
            raise
        _exit_with(error, line)
    sys.exit(0)


def _quieten_libraries() -> None:
    """Keeps libraries from printing what is no news to a user."""
    if not flags.FLAGS["verbosity"].present:
        # Libraries log every checkpoint at the level info; --verbosity=0 shows it.
        logging.set_verbosity(logging.WARNING)
    # transformers is used only for its tokenizers, so its warning about a missing PyTorch is
    # irrelevant.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # Where the compiler for GPUs is installed without CUDA, JAX would print a traceback.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def _exit_with(error: Exception, line: str) -> NoReturn:
    """Ends the process after an error that the user can correct, with a line that explains it."""
    _silence_stdout()
    print(f"error: {line}", file=sys.stderr)
    code = int(os.environ.get("COA_JAX_STOP_CODE", "2")) if isinstance(error, Outage) else 2
    _leave_processes(error, line, code)
    if line.startswith(_DISK_FULL):
        # TensorStore's threads print a traceback for each write that the exit interrupts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(code)


def _exit_without_destructors(code: int) -> None:
    """Runs the exit handlers except that of JAX, and ends the process.

    Ctrl-C interrupts the Python code that waits for a compilation, but not the thread of XLA that
    compiles. The exit handler of JAX and the destructors of the interpreter would destroy the
    client that this thread uses, and the process would crash.
    """
    atexit.unregister(_exit_without_destructors)
    of_jax = getattr(sys.modules.get("jax._src.api"), "clean_up", None)  # a private name of JAX
    if of_jax is not None:
        atexit.unregister(of_jax)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def explain(error: BaseException) -> str | None:
    """Returns the one-line message for an error that the user can correct; None for a bug."""
    if isinstance(error, UserError | flags.Error | app.UsageError):
        return _one_line(with_urls(str(error)))
    for cause in causes_of(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _disk_full(cause.filename or _workdir(), _FULL[cause.errno])
        # Checkpoint libraries report a full disk as text in their own exceptions.
        for reason in _FULL.values():
            if reason.lower() in str(cause).lower():
                return _disk_full(_workdir(), reason)
    # This looks at the error itself and not at its causes: a bug that occurs while a user error is
    # handled must be reported as a bug.
    if isinstance(error, OSError) and error.errno in _FORBIDDEN and error.filename:
        reason = error.strerror or type(error).__name__
        return f"cannot use {_name(error.filename)}: {reason}; choose a path you may use"
    return None


def _disk_full(path: str | bytes | int | None, reason: str) -> str:
    advice = "free some space and run the same command again to continue"
    return f"{_DISK_FULL}{_name(path)} ({reason}); {advice}"


def _name(path: str | bytes | int | None) -> str:
    """Names the file of an OSError; the path is None for errors of a stream."""
    if path is None:
        return "standard output or a temporary file"
    return os.fsdecode(path) if isinstance(path, str | bytes) else f"file descriptor {path}"


def _workdir() -> str | None:
    if "workdir" not in flags.FLAGS or not flags.FLAGS.is_parsed():
        return None
    value = flags.FLAGS["workdir"].value
    return None if value is None else str(value)


def _join_processes() -> None:
    """Joins the other processes of the run if environment variables name a coordinator."""
    if os.environ.get("COA_JAX_DISTRIBUTED") == "1" or "COA_JAX_COORDINATOR" in os.environ:
        # JAX is imported only here, so that a wrong command line fails quickly.
        from coa_jax.parallel import processes

        processes.join()


def _is_one_of_several() -> bool:
    processes = sys.modules.get("coa_jax.parallel.processes")
    return processes is not None and processes.count() > 1


def _leave_processes(error: BaseException, reason: str, code: int) -> None:
    """In a run of several processes, ends this one and tells the others the reason."""
    if _is_one_of_several():
        from coa_jax.parallel import processes

        processes.fail(error, reason, code)


def _one_line(text: str) -> str:
    """Returns the text as one printable line; the middle of a long line is left out."""
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= 1500 else f"{line[:700]} ... {line[-700:]}"


def _silence_stdout() -> None:
    """Prevents the interpreter from failing again when it flushes stdout at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- flags ---------------------------------------------------------------------------------


def config_flag(
    default: str,
    settings: type[Any] | None = None,
    first: Sequence[str] = (),
    with_defaults: Callable[[ml_collections.ConfigDict], ml_collections.ConfigDict] | None = None,
) -> None:
    """Defines `--config=FILE.py[:ARGUMENT]` and its overrides `--config.KEY=VALUE`.

    `flags.FLAGS.config` is the locked ConfigDict after `run_main` has parsed the command line.
    Overrides may come before or after `--config`.

    Args:
        default: config file to use if the user does not give `--config`; the path is resolved as in
            `load_config`. "" uses the defaults of all settings.
        settings: dataclass that is built from the config, whose fields `--help` explains. None if
            the class depends on other flags.
        first: keys of the fields that `--help` lists if the user asks for no word; () for the
            outermost fields, see `config.help.outermost`.
        with_defaults: function that adds the settings that a config file lacks; None if a file must
            have all settings.
    """
    global defined_config
    defined_config = ConfigFlag(default, settings, first, with_defaults)
    about = "config file, as FILE.py or FILE.py:ARGUMENT"
    about += f" (default {default})" if default else "; it holds what differs from the defaults"
    config_flags.DEFINE_config_file("config", None, about, sys_argv=_config_argv)


def workdir_flag(what: str, default: str | None = None, *, required: bool = True) -> None:
    """Defines `--workdir=DIR`.

    Args:
        what: description of the directory for `--help`.
        default: default directory; None if there is no default.
        required: whether the user must give the flag if there is no default.
    """
    flags.DEFINE_string("workdir", default, what)
    flags.register_validator("workdir", _is_directory_name)
    if required and default is None:
        need("--workdir", example="runs/mine")


def need(*names: str, example: str) -> None:
    """Declares that at least one of these flags and settings must have a value.

    Without such a value, `run_main` ends the command with an error message.

    Args:
        names: flags and settings, such as ``--config.model``. The error message shows the first.
        example: a value of the first flag or setting, for the error message.
    """
    _needed.append((names, example))


def _check_given() -> None:
    """Checks what `need` declared.

    Raises:
        UserError: something is missing; the message names all that is.
    """
    missing = [given for given in _needed if not any(map(_value_of, given[0]))]
    if missing:
        names = [names[0] for names, _ in missing]
        start, end = ", ".join(names[:-1]), names[-1]
        subject = f"{start} and {end} are missing" if start else f"{end} is missing"
        example = " ".join(f"{names[0]}={value}" for names, value in missing)
        raise UserError(f"{subject}; give for example {example}")


def _value_of(name: str) -> Any:
    """Returns the value of a flag or of a setting; None if the config lacks the setting."""
    flag, *keys = name.removeprefix("--").split(".")
    value = flags.FLAGS[flag].value
    for key in keys:
        value = value.get(key) if isinstance(value, ml_collections.ConfigDict) else None
    return value


def _is_directory_name(value: str | None) -> bool:
    if value is not None and not value.strip():
        raise flags.ValidationError("it is empty; name a directory (is a variable not set?)")
    if value is not None and value.startswith("~"):
        raise flags.ValidationError("shells do not expand ~ after a flag; write $HOME instead")
    return True


def _leaves(config: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _leaves(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", value


def load_config(spec: str, overrides: Mapping[str, Any] | None = None) -> ml_collections.ConfigDict:
    """Loads a config file outside a command line, for example in a notebook.

    Args:
        spec: `FILE.py` or `FILE.py:ARGUMENT`. If the path does not exist in the working directory,
            the file is looked up among the configs of the package, such as `configs/sft/web.py`.
            The config file can import modules from its own folder.
        overrides: maps dotted names of settings to values, e.g. `{"optim.lr": 1e-4}`; None for no
            override.

    Returns:
        The config, in which you can change settings but not add any. Exceptions are groups such as
        ``algorithm``, which list only the settings that differ from their defaults, and groups
        such as ``rewards``, whose names you choose.

    Raises:
        UserError: the file does not exist or does not accept the argument, a setting is unknown, or
            a value has a wrong type.
    """
    path, _, argument = _resolve(spec).partition(":")
    module_spec = importlib.util.spec_from_file_location("coa_jax_config", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"--config={spec}: not a Python file; name a file such as configs/x.py")
    module = importlib.util.module_from_spec(module_spec)
    if not Path(path).is_relative_to(ROOT / "configs"):
        importable(Path(path).parent)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config={spec}: the file defines no get_config()")
    if ":" in spec and not inspect.signature(module.get_config).parameters:
        raise UserError(f"--config={spec}: the file takes no argument; leave out :{argument}")
    # get_config itself rejects a wrong argument, with a UserError that lists the valid arguments.
    config = module.get_config(*([argument] if ":" in spec else []))
    lock(config)
    for key, value in join_new_values(overrides or {}, config).items():
        try:
            config_path.set_value(key, config, value)
        except (TypeError, ValueError) as error:
            raise UserError(f"config.{key}={value!r}: {_one_line(str(error))}") from error
    return config


def _resolve(spec: str) -> str:
    """Finds a config file in the working directory, or else in the package."""
    path, colon, argument = spec.partition(":")
    for root in (Path(), ROOT):
        if path and (root / path).is_file():
            return f"{(root / path).resolve()}{colon}{argument}"
    hint = suggest(path, map(str, config_files()))
    hint = hint or "; `coa-jax configs` lists those that come with the package"
    raise UserError(f"--config={spec}: no such file {path!r}{hint}")


def _parse_flags(argv: list[str], positional: bool, opens_places: bool) -> list[str]:
    """Parses flags with absl, after checks whose messages are clearer than those of absl."""
    errors: list[UserError] = []
    if "config" in flags.FLAGS:
        if not _asks_for_help(argv):
            argv, config = _loaded(argv)
            _config_argv[:] = argv = readable_overrides(argv, config, errors)
            if defined_config.with_defaults is not None:
                delattr(flags.FLAGS, "config")
                config_flags.DEFINE_config_dict("config", config, sys_argv=argv)
        elif defined_config.settings is not None:
            print(_help(argv))
            sys.exit(0)
    rest = _parsed_rest(argv, errors)
    if len(rest) > 1 and not positional:
        message = f"unexpected argument {rest[1]!r}; flags are written --name=value"
        errors.append(UserError(message))
    try:
        _check_given()
    except UserError as error:
        errors.append(error)
    if errors:
        known = defined_config.settings if "config" in flags.FLAGS else None
        raise UserErrors([*errors, *(errors_of(known, flags.FLAGS.config) if known else ())])
    names = [name for name in flags.FLAGS if flags.FLAGS[name].present and name != "config"]
    places = {f"--{name}": flags.FLAGS[name].value for name in names}
    if "config" in flags.FLAGS:
        places |= dict(_leaves(flags.FLAGS.config, "--config"))
    check_places(places, ask=opens_places)
    return rest


def _parsed_rest(argv: list[str], errors: list[UserError]) -> list[str]:
    """Parses flags with absl, without those whose values are wrong; returns the other words.

    Raises:
        UserErrors: the command line cannot be parsed.
    """
    while True:
        try:
            return _parsed(flags.FLAGS, argv)
        except UserError as error:
            errors.append(error)
            right = [argument for argument in argv if not str(error).startswith(f"{argument}: ")]
            if len(right) == len(argv):
                raise UserErrors(errors) from error
            # The config file is loaded, and its flags must not be defined a second time.
            argv = [argument for argument in right if not _CONFIG_SWITCH.match(argument)]


def _parsed(values: flags.FlagValues, argv: list[str]) -> list[str]:
    """Parses flags with absl, and raises a `UserError` for a mistake; returns the other words."""
    try:
        return values(argv)
    except SystemExit as done:
        # absl exits with code 1 after --help, but a request for help is not a failure.
        sys.exit(0 if _asks_for_help(argv) else done.code)
    except flags.UnrecognizedFlagError as error:
        hint = suggest(error.flagname, [name for name in values if len(name) > 1])
        hint = hint if "did you mean" in hint else "; --help lists the flags"
        raise UserError(f"unknown flag --{error.flagname}{hint}") from error
    except flags.IllegalFlagValueError as error:
        raise UserError(wrong_value(" ".join(str(error).split()))) from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        # The config file was loaded above, so this error comes from an override on the command
        # line.
        raise UserError(f"--config: {_one_line(str(error))}") from error


def overridden(
    config: ml_collections.ConfigDict, overrides: list[str]
) -> ml_collections.ConfigDict:
    """Returns a config with overrides ``--config.KEY=VALUE``, for a command without absl's flags.

    Raises:
        UserError: an argument is no override, or its setting or its value is wrong.
    """
    argv = readable_overrides(["", *overrides], config)
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    if rest := _parsed(values, argv)[1:]:
        raise UserError(f"unexpected argument {rest[0]!r}; settings are written --config.KEY=VALUE")
    return values.config


def _asks_for_help(argv: list[str]) -> bool:
    return any(map(_HELP.fullmatch, argv[1:]))


def _help(argv: list[str]) -> str:
    """Returns what ``--help`` prints: purpose, flags and the settings that most users choose.

    With a word after ``--help``, returns the settings that contain the word.
    """
    _, config = _loaded([argument for argument in argv if not _HELP.fullmatch(argument)])
    assert defined_config.settings is not None
    values = config.to_dict()
    if defined_config.with_defaults is not None:  # the user must give what has no default
        values = {key: value for key, value in values.items() if value != ""}
    settings = list(settings_of(defined_config.settings, values))
    width = shutil.get_terminal_size((110, 24)).columns
    after = [*itertools.dropwhile(lambda argument: not _HELP.fullmatch(argument), argv), ""][1]
    if after and not after.startswith("-"):
        return search(settings, after, width)
    first = defined_config.first or outermost(settings)
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "flags:"]
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        default = f" (default {flag.default})" if flag.default else ""
        lines.append(f"  --{flag.name:16} {' '.join((flag.help or '').split())}{default}")
    lines += ["", "settings, written --config.KEY=VALUE, with their present values:"]
    lines += [page(settings, first, width), ""]
    number = sum(not setting.inside for setting in settings)
    lines += [f"--help WORD explains the settings with that word; --help all, all {number}."]
    return "\n".join(lines)


def _loaded(argv: list[str]) -> tuple[list[str], ml_collections.ConfigDict]:
    """Loads the config file of a command line.

    Returns:
        The command line with ``--config`` in front, or without it if the config was completed with
        defaults; and the config.
    """
    argv = _config_first(argv)
    spec = argv[1].partition("=")[2]
    config = load_config(spec) if spec else ml_collections.ConfigDict()
    if defined_config.with_defaults is None:
        return argv, config
    return [argv[0], *argv[2:]], defined_config.with_defaults(config)


def _config_first(argv: list[str]) -> list[str]:
    """Moves `--config=FILE` to the front, where ml_collections needs it; the last such flag counts.

    >>> _config_first(["sft", "--config.lr=1", "--config", "a.py"])  # doctest: +SKIP
    ["sft", "--config=/path/of/a.py", "--config.lr=1"]
    """
    spec, rest = defined_config.default, []
    arguments = iter(switches(argv[1:]))
    for argument in arguments:
        if not _CONFIG_SWITCH.match(argument):
            rest.append(argument)
        elif "=" in argument:
            spec = argument.partition("=")[2]
        else:
            following = next(arguments, None)
            if following is None:
                raise UserError("--config needs a file: --config=FILE.py[:ARGUMENT]")
            spec = following
    tail = argv[1 + len(switches(argv[1:])) :]
    return [argv[0], f"--config={_resolve(spec) if spec else ''}", *rest, *tail]
