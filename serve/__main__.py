"""`python -m serve [MODEL_URI]`: answer over HTTP for a model out of the registry."""

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from pydantic import ValidationError

from serve.app import create_app
from serve.engines.engine import EngineOptions
from serve.errors import LocateError
from serve.models.locate import locate_model
from serve.predictor import Predictor
from serve.settings import Settings
from zoo.errors import BundleError, MissingPluginError, PluginError
from zoo.plugins import load_plugins

_MISTAKE, _FAULT = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a container has no default one
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name outside the locale must not end us
    try:
        settings = read_settings(argv)
        logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("urllib3").setLevel("ERROR")  # it warns at every retry; the last failure says it all
        with open_socket(settings.host, settings.port) as listener, TemporaryDirectory(prefix="serve-") as folder:
            load_plugins(settings.plugins)
            predictors = [load_predictor(uri, Path(folder), settings) for uri in settings.model_uri]
            listener.listen()  # from here on a request waits at worst, it is not refused
            _greet(predictors, settings.host, listener.getsockname()[1])
            _run(settings, predictors, listener)
    except (LocateError, MissingPluginError, OSError, PluginError, ValidationError) as error:
        return _complain(_MISTAKE, error)
    except BundleError as error:
        return _complain(_FAULT, error)
    except KeyboardInterrupt:
        pass
    return 0


def load_predictor(uri: str, folder: Path, settings: Settings) -> Predictor:
    """Find, load and prove the model at `uri`; what is downloaded goes below `folder`."""
    located = locate_model(uri, folder)
    options = EngineOptions(settings.device, settings.threads, settings.max_batch)
    return Predictor.from_bundle(located.bundle, name=located.name, version=located.version, options=options)


def read_settings(argv: Sequence[str] | None = None) -> Settings:
    """Merge defaults, the environment's SERVE_* and the command line, the last winning.

    Raises:
        ValidationError: If a value is out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m serve",
        description="Answer over HTTP for a model out of the MLflow registry (MLFLOW_TRACKING_URI says which).",
        epilog="Every setting is also an environment variable: SERVE_PORT=8080 and so on.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        flag = "model_uri" if name == "model_uri" else f"--{name.replace('_', '-')}"
        text = f"{field.description} Default: {field.default or 'none'}".replace("%", "%%")
        if name == "plugins":
            parser.add_argument(flag, action="append", metavar="FILE", help=text)
        elif name == "model_uri":
            parser.add_argument(flag, nargs="*", metavar="MODEL_URI", default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(flag, metavar="VALUE", help=text)
    return Settings(**vars(parser.parse_args(argv)))


def open_socket(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is told at once.

    Raises:
        OSError: If the address cannot be had; the message names it.
    """
    with ExitStack() as cleanup:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = cleanup.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        cleanup.pop_all()
        return listener


def _run(settings: Settings, predictors: list[Predictor], listener: socket.socket) -> None:
    config = uvicorn.Config(
        create_app(settings, *predictors),
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _greet(predictors: list[Predictor], host: str, port: int) -> None:
    url = f"http://{'localhost' if host in ('0.0.0.0', '::') else host}:{port}"
    for predictor in predictors:
        card = predictor.card
        print(
            f"serving {predictor.name} version {predictor.version} on {url} "
            f"({card.backbone}, {card.attention} attention, {len(card.class_names)} classes, {card.engine.name})",
            flush=True,
        )
    print(f"try\n  curl -H 'Content-Type: image/png' --data-binary @image.png {url}/invocations", flush=True)


def _complain(status: int, error: Exception) -> int:
    if isinstance(error, ValidationError):
        faults = [
            f"{'.'.join(map(str, e['loc']))}: got {e['input']!r:.80}, {e['msg'][:1].lower()}{e['msg'][1:]}"
            for e in error.errors(include_url=False)
        ]
        message = "; ".join(faults)
    else:
        message = " ".join(str(error).split())
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
