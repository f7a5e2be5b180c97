"""The ``mqttbroker`` command.

A wrong call or configuration is one line per problem on stderr and exit status 2; a failure of the command is exit
status 1. Modules are imported by the commands that need them, so that the others start fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from mqttbroker import __version__, build_kind
from mqttbroker.cli.standard_files import open_standard_files
from mqttbroker.config.files import with_user
from mqttbroker.config.load import FLAGS, ConfigError, load_settings
from mqttbroker.config.settings import Settings

_FLAG_HELP = {
    "--host": ("HOST", "address to listen on (first listener)"),
    "--port": ("PORT", "port to listen on (first listener); 0 = any free one"),
    "--http-port": ("PORT", 'port of health, metrics and streams over HTTP; 0 = any free one, "off" = none'),
    "--data-dir": ("DIR", "directory of the database and the streams"),
    "--durability": ("MODE", "commit | interval | off"),
    "--allow-anonymous": ("WHO", "true | false | loopback; true when the flag stands alone"),
    "--workers": ("N", "processes that own the sockets of clients, or auto; 0 = none"),
    "--log-level": ("LEVEL", "debug | info | warning | error"),
}


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest choice of a wrong one, or all if there is none or a few are there."""
        if action.choices is None or value in action.choices:
            return
        import difflib

        names = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), names, 1)
        others = f", did you mean {near[0]}?" if near else f": must be one of {', '.join(names)}" if len(names) < _MANY else ""
        raise argparse.ArgumentError(action, f"there is no {value!r}{others}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


_MANY = 10  # choices that are too many for a line


class _Version(argparse.Action):
    """Prints the version. The formats of the data are imported only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from mqttbroker.admin.data.version import formats_text

        print(f"mqttbroker {__version__} ({build_kind()}, Python {platform.python_version()})")
        print(f"data formats: {formats_text()}")
        parser.exit()


# Commands with a module that few need, which parses the options.
_OWN_PARSERS = {
    "top": "a running broker's rates and clients, live",
    "pub": "publish messages, with the options of mosquitto_pub",
    "sub": "print messages, with the options of mosquitto_sub",
    "bench": "measure a running broker with a small load",
}


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the command without its commands, and what takes these."""
    parser = _Parser(prog="mqttbroker", description="MQTT 3.1.1 and 5.0 broker with durable streams for Spark", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of the program and of its data, and exit")
    return parser, parser.add_subparsers(dest="command", metavar="COMMAND", required=True)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="run the broker", allow_abbrev=False)
    serve.add_argument("--config", metavar="FILE", type=Path, help="TOML file (conf/mqttbroker.toml shows every key)")
    for flag in FLAGS:
        metavar, text = _FLAG_HELP[flag]
        if flag == "--allow-anonymous":
            serve.add_argument(flag, dest=flag, metavar=metavar, help=text, nargs="?", const="true")
        else:
            serve.add_argument(flag, dest=flag, metavar=metavar, help=text)
    serve.add_argument("--print-config", action="store_true", help="print the configuration in force, and start no broker")


def command_parser(own: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})) -> argparse.ArgumentParser:
    """The parser of all commands; ``own`` has those of `_OWN_PARSERS`, for completion."""
    from mqttbroker.cli import (
        api_commands,
        consumers_command,
        doctor,
        export_store_command,
        healthcheck,
        import_command,
        import_store_command,
        support_command,
    )
    from mqttbroker.cli.store_commands import add_parsers

    parser, commands = _parser()
    _add_serve(commands)
    check = commands.add_parser("check-config", help="name the problems of a configuration")
    check.add_argument("file", metavar="FILE", type=Path)
    check.add_argument("--print-config", action="store_true", help="print the configuration in force, as TOML")

    passwd = commands.add_parser("passwd", help="set or delete a user's password", allow_abbrev=False)
    passwd.add_argument("file", metavar="FILE", type=Path, help="password file, made if missing")
    passwd.add_argument("user", metavar="USER")
    passwd.add_argument("-D", dest="delete", action="store_true", help="delete the user")
    passwd.add_argument("--scram", action="store_true", help="for SCRAM-SHA-256 too; else argon2id, for CONNECT only")

    add_parsers(commands)
    consumers_command.add_parser(commands)
    api_commands.add_parsers(commands)
    doctor.add_parser(commands)
    support_command.add_parser(commands)
    healthcheck.add_parser(commands)
    completion = commands.add_parser("completion", help="print a script that completes commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    import_command.add_parser(commands)
    import_store_command.add_parser(commands)
    export_store_command.add_parser(commands)
    for command, text in _OWN_PARSERS.items():
        parents = [each for name, each in own.items() if name == command]
        commands.add_parser(command, help=text, add_help=False, parents=parents)
    commands.add_parser("ingest", help="write streams to tables with Spark", add_help=False)
    commands.add_parser("compact", help="merge the small files of those tables", add_help=False)
    commands.add_parser("java-home", help="print a JAVA_HOME for Spark", add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    open_standard_files()
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        if not sys.stdout.closed:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of stdout has ended, as `head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if words[:1] == ["ingest"]:
        from bridge_spark.ingest import main as ingest

        return ingest(words[1:])
    if words[:1] == ["compact"]:
        from bridge_spark.tables.compact import main as compact

        return compact(words[1:])
    if words[:1] == ["java-home"]:
        from bridge_spark.java import main as java_home

        return java_home(words[1:])
    if words[:1] in (["pub"], ["sub"]):
        from mqttbroker.cli import mqtt_commands

        return (mqtt_commands.pub if words[0] == "pub" else mqtt_commands.sub)(words[1:])
    if words[:1] == ["bench"]:
        from mqttbroker.cli.bench import main as bench

        return bench(words[1:])
    if words[:1] == ["top"]:
        return _top(words[1:])
    try:
        if words[:1] in (["serve"], ["--version"]):
            return _serve(_serve_options(words))
        if words[:1] == ["healthcheck"]:
            from mqttbroker.cli import healthcheck

            parser, commands = _parser()
            healthcheck.add_parser(commands)
            return healthcheck.run(parser.parse_args(words), _serve_options)
        return _run_other(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _serve_options(words: list[str]) -> argparse.Namespace:
    parser, commands = _parser()
    _add_serve(commands)
    return parser.parse_args(words)


def _run_other(words: list[str]) -> int:
    """Run a command whose parser takes longer to load than the broker has time to start."""
    from mqttbroker.cli import (
        api_commands,
        consumers_command,
        doctor,
        export_store_command,
        import_command,
        import_store_command,
        support_command,
    )
    from mqttbroker.cli.store_commands import COMMANDS, run

    options = command_parser().parse_args(api_commands.with_action(words))
    if options.command == "completion":
        return _completion(options.shell)
    if options.command == "passwd":
        return _passwd(options.file, options.user, options.delete, options.scram)
    if options.command == "check-config":
        return _check_config(options.file, options.print_config)
    if options.command in COMMANDS:
        return run(options)
    if options.command == "doctor":
        return doctor.run(options)
    if options.command == support_command.COMMAND:
        return support_command.run(options)
    if options.command == "consumers":
        return consumers_command.run(options)
    if options.command == import_command.COMMAND:
        return import_command.run(options)
    if options.command == import_store_command.COMMAND:
        return import_store_command.run(options)
    if options.command == export_store_command.COMMAND:
        return export_store_command.run(options)
    return api_commands.run(options)


def _check_config(file: Path, print_config: bool) -> int:
    from mqttbroker.server.config_check import check, source_of, warnings

    settings = load_settings(file, os.environ, warn=_print_warning)
    if problems := check(settings):
        raise ConfigError([f"{source_of(problem, settings, file)}: {problem}" for problem in problems])
    for warning in warnings(settings):
        _print_warning(f"{source_of(warning, settings, file)}: {warning}")
    if print_config:
        return _print_config(settings)
    variables = sorted({source for source in settings.sources.values() if source in os.environ})
    print(f"{file}{' with ' if variables else ''}{', '.join(variables)}: fine")
    return 0


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _print_config(settings: Settings) -> int:
    from mqttbroker.config.printed import printed

    print(printed(settings), end="")
    return 0


def _serve(options: argparse.Namespace) -> int:
    flags = {flag: value for flag in FLAGS if (value := getattr(options, flag)) is not None}

    def reread() -> Settings:
        return load_settings(options.config, os.environ, flags)

    if options.print_config:
        return _print_config(load_settings(options.config, os.environ, flags, _print_warning))
    warnings: list[str] = []
    settings = load_settings(options.config, os.environ, flags, warnings.append)
    if settings.cluster.configured:
        return _serve_node(settings, reread, warnings)
    from mqttbroker.server.server import serve

    return serve(settings, reread, warnings)


def _serve_node(settings: Settings, reread: Callable[[], Settings], warnings: list[str]) -> int:
    if importlib.util.find_spec("aiokafka") is None:
        print("mqttbroker: [cluster] needs aiokafka: pip install 'mqttbroker[cluster]'", file=sys.stderr)
        return 1
    from mqttbroker.node.process import serve_node

    return serve_node(settings, reread, warnings)


def _top(words: Sequence[str]) -> int:
    from mqttbroker.cli import top

    try:
        return top.main(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _completion(shell: str) -> int:
    import shtab

    from mqttbroker.cli import bench, mqtt_commands, top

    own = {"top": top.top_parser(), "pub": mqtt_commands.pub_parser(), "sub": mqtt_commands.sub_parser(), "bench": bench.bench_parser()}
    print(shtab.complete(command_parser(own), shell=shell))
    return 0


def _passwd(file: Path, user: str, delete: bool, scram: bool) -> int:
    from mqttbroker.auth.passwords import (
        check_name,
        hash_password,
        scram_password,
        set_password,
    )
    from mqttbroker.cli.new_password import ask_password

    try:
        check_name(user)
        encoded = None if delete else (scram_password if scram else hash_password)(ask_password(user))
        known = set_password(file, user, encoded)
    except ValueError as error:
        print(f"mqttbroker passwd: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(with_user(f"mqttbroker passwd: {file}: {error.strerror or error}"), file=sys.stderr)
        return 1
    if delete and not known:
        print(f"mqttbroker passwd: {file}: no user {user!r}", file=sys.stderr)
        return 1
    return 0
