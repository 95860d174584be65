"""The command line: ``specduel serve``, ``doctor``, ``pairs``, ``bench``.

Errors that specduel raises on purpose end in one line on standard error and exit code 1; a wrong option ends
in argparse's message and exit code 2.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app import __version__
from app.errors import SpecduelError, StartError
from app.settings import Settings

if TYPE_CHECKING:
    from app.engines.lane import Fleet
    from app.pairs.speculation import ScriptedSpeculation, Speculation

DEFAULTS = Settings()
SHUTDOWN_S = 5
"""How long open connections may go on after Ctrl-C; event streams end at once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        return int(options.run(options))
    except SpecduelError as error:
        sys.stderr.write(f"specduel: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specduel", description="A live, side-by-side demo of speculative decoding on vLLM."
    )
    parser.add_argument("--version", action="version", version=f"specduel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start both engines and the page")
    add_pair_options(serve)
    serve.add_argument("--host", default=DEFAULTS.host, help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=port_number, default=DEFAULTS.port, help="port (default: %(default)s)")
    serve.add_argument("--prompts-dir", type=Path, help="a prompt library of your own, instead of the built-in one")
    serve.add_argument(
        "--max-tokens", type=positive_int, default=DEFAULTS.max_tokens, help="largest max_tokens of a run (%(default)s)"
    )
    serve.add_argument(
        "--abandon-after",
        type=float,
        default=DEFAULTS.abandon_after_s,
        metavar="SECONDS",
        help="cancel a run when its last viewer left this long ago; 0: never (default: %(default)s)",
    )
    serve.add_argument(
        "--price-per-hour", type=float, help="what the device costs an hour, for the cost of a million tokens"
    )
    serve.add_argument(
        "--scripted",
        default=DEFAULTS.scripted,
        metavar="OPTIONS",
        help='with --pair scripted: "step_ms=20,speculative.acceptance=0.9"',
    )
    serve.add_argument("--engine-logs", action="store_true", help="show vLLM's own log")
    serve.set_defaults(run=serve_command)

    pairs = commands.add_parser("pairs", help="list the model pairs, or build a model that specduel makes itself")
    pairs.add_argument("--cache-dir", type=Path, help="where built models are kept (default: the user's cache folder)")
    actions = pairs.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the pairs that ship with specduel").set_defaults(run=list_pairs)
    build = actions.add_parser("build", help="build a model, or build it again where it is damaged")
    build.add_argument("name", help="the model's name")
    build.add_argument("--source", type=Path, help="a file to build from, instead of fetching it")
    build.set_defaults(run=build_model)

    bench = commands.add_parser("bench", help="compare the throughput through the app with the bare engine's")
    add_pair_options(bench)
    bench.add_argument("--rounds", type=positive_int, default=5, help="app and bare by turns, so often (%(default)s)")
    bench.add_argument("--tokens", type=positive_int, default=64, help="output tokens of each (default: %(default)s)")
    bench.add_argument("--scripted", default=DEFAULTS.scripted, metavar="OPTIONS", help="as for serve")
    bench.set_defaults(run=bench_command)

    doctor = commands.add_parser("doctor", help="check whether the demo would start here, and say what to do if not")
    add_pair_options(doctor)
    doctor.add_argument("--port", type=port_number, default=DEFAULTS.port, help="port to check (default: %(default)s)")
    doctor.set_defaults(run=doctor_command)
    return parser


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose models and method."""
    parser.add_argument("--pair", help="a pair's name, a TOML file, or 'scripted' (default: by the machine)")
    parser.add_argument("--method", help="override the pair's method: ngram, draft_model or eagle3")
    parser.add_argument(
        "-k", "--num-speculative-tokens", type=positive_int, metavar="K", help="override how many tokens are drafted"
    )
    parser.add_argument("--cache-dir", type=Path, help="where built models are kept (default: the user's cache folder)")


def settings_from(options: argparse.Namespace) -> Settings:
    """The settings that parsed options stand for; options a command doesn't have keep their defaults."""
    given = vars(options)
    names = {"abandon_after": "abandon_after_s"}
    known = Settings.__dataclass_fields__
    values = {names.get(key, key): value for key, value in given.items() if names.get(key, key) in known}
    return Settings(**values)


def serve_command(options: argparse.Namespace) -> int:
    """Start the server and stay until it is told to stop."""
    import uvicorn

    from app.web.factory import create_app

    settings = settings_from(options)
    listener = bind(settings.host, settings.port)
    try:
        fleet, speculation = build_fleet(settings)
        app = create_app(settings, fleet, speculation)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        shown = "localhost" if settings.host in ("0.0.0.0", "::") else host  # noqa: S104  (compared, not bound)
        sys.stderr.write(
            f"\n  specduel: http://{shown}:{settings.port}\n  {speculation.as_dict()['title']}. Ctrl-C ends it.\n\n"
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
    return 0


def bench_command(options: argparse.Namespace) -> int:
    from app import bench

    settings = settings_from(options)
    fleet, speculation = build_fleet(settings)
    return bench.run(settings, fleet, speculation, rounds=options.rounds, max_tokens=options.tokens)


def doctor_command(options: argparse.Namespace) -> int:
    from app import doctor

    return doctor.run(settings_from(options))


def list_pairs(options: argparse.Namespace) -> int:
    """Print the shipped pairs, one a line."""
    from app.pairs import catalogue

    for name in catalogue.names():
        pair = catalogue.load(name)
        print(f"{name:24} {pair.title}  [{', '.join(catalogue.methods(pair))}; {' or '.join(pair.devices)}]")
    return 0


def build_model(options: argparse.Namespace) -> int:
    """Build one of specduel's own models."""
    from app.pairs import builders, cache

    folder = builders.builder(options.name).build(
        options.cache_dir or cache.cache_dir(), report=print, source=options.source
    )
    print(folder)
    return 0


def build_fleet(settings: Settings) -> tuple[Fleet, Speculation | ScriptedSpeculation]:
    """The lanes that settings ask for, not started, and what they speculate with.

    Raises:
        StartError: the pair, its models or the machine don't allow it.
    """
    from app.pairs.speculation import ScriptedSpeculation, Speculation

    if settings.pair == "scripted":
        from app.engines.scripted import ScriptedFleet, parse_options

        scripted = parse_options(settings.scripted)
        return ScriptedFleet(scripted), ScriptedSpeculation(scripted.speculative.k)
    if settings.scripted:
        raise StartError("--scripted needs --pair scripted.")
    from app.engines.fleet import VllmFleet
    from app.engines.machine import detect
    from app.pairs import cache, catalogue

    machine = detect()
    pair = catalogue.load(settings.pair or catalogue.default_name(machine.kind))
    speculation = Speculation(pair, cache_dir=settings.cache_dir or cache.cache_dir(), device=machine.kind)
    speculation = speculation.with_method(settings.method, settings.num_speculative_tokens)
    return VllmFleet(speculation.resolve(), machine=machine, engine_logs=settings.engine_logs), speculation


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything is loaded.

    Raises:
        StartError: it is in use, not allowed, or the address isn't this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"Can't listen on {host} port {port}: {error.strerror or error}. "
            "Choose another with --port, or end the program that has it."
        ) from error
    return listener


def port_number(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; it must be a number from 0 to 65535")
    return port


def positive_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
