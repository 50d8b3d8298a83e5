"""`python -m serve [MODEL_URI ...]`: answer over HTTP for models out of the registry."""

import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import uvicorn
from fastapi import FastAPI

from serve.app import create_app
from serve.command_line import read_settings, warn_of_unknown
from serve.errors import ServeError, SettingsError
from serve.models.aside import end_process
from serve.operations.draining import DrainingServer
from serve.operations.guarded_protocol import ConnectionLimits, GuardedProtocol
from serve.operations.log_lines import configure_logging
from serve.operations.memory import give_back_memory
from serve.predictor import Predictor
from serve.settings import Settings
from zoo.errors import BundleError, MissingPluginError, PluginError

_MISTAKE, _FAULT = 2, 3
_SPARE_FILES = 128  # beside connections: libraries, models, logs

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a container has no default one
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name outside the locale must not end us
    try:
        settings = read_settings(argv)
        configure_logging(settings.log_level, settings.log_format)
        warn_of_unknown(os.environ)
        allow_files(settings.max_connections)
        give_back_memory()
        with open_socket(settings.host, settings.port) as listener:
            if settings.plugins:
                _load_plugins(settings.plugins)
            _serve(settings, listener)
    except (ServeError, MissingPluginError, OSError, PluginError) as error:
        return _complain(_MISTAKE, error)
    except BundleError as error:
        return _complain(_FAULT, error)
    except KeyboardInterrupt:
        pass
    return 0


def _load_plugins(names: Sequence[str]) -> None:
    try:
        from zoo.plugins import load_plugins  # what a plugin registers is a torch module

        load_plugins(names)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise SettingsError(
            "--plugins: a plugin takes torch, which is not installed here; a model whose engine is onnx needs none: "
            "leave the flag out, or take the image serve-torch"
        ) from error


def _serve(settings: Settings, listener: socket.socket) -> None:
    """Listen, load meanwhile, answer until told to end; raise what a model could not be loaded for."""
    failures: list[Exception] = []

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    greet = partial(_greet, settings, listener.getsockname()[1])
    server = build_server(settings, create_app(settings, on_ready=greet, on_failure=give_up))
    listener.listen()
    server.run(sockets=[listener])
    if failures:
        raise failures[0]


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


def allow_files(max_connections: int) -> None:
    """Raise this process's limit of open files to what the connections need, or say that it is too low."""
    wanted = max_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            logger.warning("%d open files are allowed (ulimit -n), fewer than --max-connections needs", allowed)


def build_server(settings: Settings, app: FastAPI) -> DrainingServer:
    """Put the server around the application: how connections are bounded, and how it ends."""
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        head_timeout_s=settings.head_timeout_s,
        max_head_bytes=settings.max_head_bytes,
        unread_timeout_s=settings.request_timeout_s,
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(GuardedProtocol, limits=limits, metrics=app.state.metrics, draining=app.state.draining),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # a float does as well
    )
    return DrainingServer(
        config, app.state.draining, grace_s=settings.drain_grace_s, timeout_s=settings.shutdown_timeout_s
    )


def _greet(settings: Settings, port: int, predictors: list[Predictor]) -> None:
    """Say what is served and where: as records where logs are JSON, else for a reader."""
    url = f"http://{_reachable(settings.host)}:{port}"
    for predictor in predictors:
        card, engine = predictor.card, predictor.engine
        if settings.log_format == "json":
            what = {"model": predictor.name, "version": predictor.version, "engine": engine.choice.name, "url": url}
            logger.info("serving", extra={"fields": what})
        else:
            print(
                f"serving {predictor.name} version {predictor.version} on {url} "
                f"({card.backbone}, {card.attention} attention, {len(card.class_names)} classes, "
                f"{engine.choice.name} on {engine.device})",
                flush=True,
            )
    if settings.log_format != "json":
        print(f"try\n  curl -H 'Content-Type: image/png' --data-binary @image.png {url}/invocations", flush=True)


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _complain(status: int, error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    end_process(main())
