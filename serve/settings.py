"""The endpoint's settings: the environment's variables SERVE_*, each also a flag of `python -m serve`."""

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from zoo.preprocess import DEFAULT_LIMITS

MIB = 1024 * 1024
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _split(value: object, separators: str) -> object:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        return value
    return tuple(name.strip() for text in given for name in re.split(separators, text) if name.strip())


def _match(value: str, pattern: str, wanted: str) -> str:
    if not re.fullmatch(pattern, value):
        raise ValueError(f"wanted {wanted}")
    return value


class Settings(BaseSettings):
    """One field for each setting; the field's docstring is its help."""

    model_config = SettingsConfigDict(
        env_prefix="SERVE_", env_ignore_empty=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    model_uri: Annotated[tuple[str, ...], NoDecode] = ("models:/digits@champion",)
    """What to serve: models:/NAME@ALIAS, models:/NAME/VERSION, or a bundle's directory; several are separated by spaces
    on the line, by commas in the variable. The first is the one that /invocations means."""
    plugins: Annotated[tuple[str, ...], NoDecode] = ()
    """Python files (my_attention.py) or modules that register the model's attention, for engines other than onnx;
    several are separated by commas or by the system's path separator (a colon here, a semicolon on Windows)."""

    pin: bool = False
    """Stay with the version that the alias names at the start; otherwise a moved alias is followed."""
    poll_interval_s: Seconds = 10
    """Seconds between two looks at an alias."""

    engine: Literal["card", "eager", "compile", "onnx"] = "card"
    """What computes: the engine that the model's card names, or another."""
    precision: Literal["card", "fp32", "bf16"] = "card"
    """Numbers to compute in: what the card names, or another."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:1. One process serves one GPU."""
    threads: Count | None = None
    """CPU threads of one forward pass; by default all cores that the process may use, a container's quota heeded."""

    max_batch: Count = 8
    """Most images in one forward pass."""
    batch_wait_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = 2
    """Longest that an image waits for company while the engine is idle, in milliseconds."""
    max_queue: Count = 128
    """Most images that wait, are decoded or computed; beyond that the answer is 503 at once."""
    request_timeout_s: Seconds = 30
    """Seconds from a request's head to its answer, then 504; a client may ask for less by x-request-timeout-ms."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_connections: Count = 1024
    """Most open connections; beyond that the answer is 503; probes are answered on 32 more, and then nobody is."""
    max_head_bytes: Annotated[int, Field(ge=1024, le=MIB)] = 32 * 1024
    """Largest head of a request (target and header fields), in bytes; beyond that the answer is 431."""
    head_timeout_s: Seconds = 10
    """Seconds that a request's head may take to arrive, then 408 and the connection is closed."""
    body_timeout_s: Seconds = 20
    """Seconds that a body may take to arrive, then 408."""
    keep_alive_s: Seconds = 75
    """Seconds that an idle connection stays open."""

    max_body_bytes: Count = 16 * MIB
    """Largest body of a request, in bytes."""
    max_buffered_bytes: Count = 256 * MIB
    """Largest sum of all bodies that are held at a time, in bytes; beyond that the answer is 503."""
    max_pixels: Count = DEFAULT_LIMITS.max_pixels
    """Largest image, in pixels (width times height). One of 50 million takes up to 1 GB while it is decoded; of those
    with more than 4 million, one is decoded at a time."""
    max_images: Count = 64
    """Most images in one request."""
    max_json_depth: Annotated[int, Field(ge=1, le=500)] = 32
    """Deepest nesting of a JSON body."""

    api_keys_file: Path | None = None
    """File with one API key on each line, KEY or NAME:KEY (16 to 512 characters, the name is what is logged); without
    it no key is asked for. It is read again when it changes; one that is empty, broken or gone leaves the keys as they
    were, with a warning: to shut everybody out, leave one new key in it."""
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses or networks (10.0.0.0/8) of proxies whose X-Forwarded-For is believed, separated by commas; none by
    default: the client is who connects."""
    rate_limit: str = ""
    """Most requests of one client (its key, or else its address), such as 100/second; empty for no limit."""

    hung_after_s: Seconds = 120
    """Seconds that one batch may compute; beyond that /health answers 503, so that the process is restarted."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0
    """Seconds after SIGTERM for which /ready answers 503 but requests are still taken, so that balancers and clients
    with open connections notice."""
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10
    """Seconds that open requests may take to finish after that; then they are cut."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity of what is logged."""
    log_format: Literal["text", "json"] = "text"
    """Form of a log line."""
    access_log: bool = True
    """Log a line for each request; one at debug for a probe that succeeds."""

    @field_validator("plugins", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        return _split(value, f"[,{re.escape(os.pathsep)}]")

    @field_validator("model_uri", "trusted_proxies", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return _split(value, ",")

    @field_validator("model_uri")
    @classmethod
    def _check_uris(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("wanted one model or more, such as models:/digits@champion or a bundle's directory")
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        return _match(value, r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:1")

    @field_validator("rate_limit")
    @classmethod
    def _check_rate(cls, value: str) -> str:
        return _match(value, r"|[1-9]\d{0,8}/(second|minute|hour|day)", "a number and a period, such as 100/second")

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            ip_network(text)  # "*" is refused too: it would let every client choose its address
        return value


_TITLES = {
    "model_uri": "what is served",
    "pin": "following the registry",
    "engine": "computing",
    "max_batch": "batches",
    "host": "connections",
    "max_body_bytes": "limits of a request",
    "api_keys_file": "who may ask",
    "hung_after_s": "life and logs",
}
"""The title before a field and those that follow it, for help and documentation."""


def _group() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    title = ""
    for name in Settings.model_fields:
        title = _TITLES.get(name, title)
        groups.setdefault(title, []).append(name)
    return groups


GROUPS = _group()
"""The fields by title, in order."""
