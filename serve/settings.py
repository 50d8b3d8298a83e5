"""The endpoint's settings: the environment's variables SERVE_*, each also a flag of `python -m serve`."""

import os
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from zoo.preprocess import DEFAULT_LIMITS


class Settings(BaseSettings):
    """One field for each setting; the field's docstring is its help."""

    model_config = SettingsConfigDict(env_prefix="SERVE_", frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_uri: Annotated[str, Field(min_length=1)] = "models:/digits@champion"
    """What to serve: models:/NAME@ALIAS, models:/NAME/VERSION, or a bundle's directory."""
    plugins: Annotated[tuple[str, ...], NoDecode] = ()
    """Python files (my_attention.py) or modules that register the model's attention; several are separated by commas
    or by the system's path separator (a colon here, a semicolon on Windows)."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    """Largest body of a request, in bytes."""
    max_pixels: Annotated[int, Field(ge=1)] = DEFAULT_LIMITS.max_pixels
    """Largest image, in pixels (width times height)."""
    max_images: Annotated[int, Field(ge=1)] = 64
    """Most images in one request."""
    shutdown_timeout_s: Annotated[int, Field(ge=0)] = 10
    """Seconds that open requests may take to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severity of what is logged."""

    @field_validator("plugins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
            return value
        return tuple(name for text in given for name in re.split(f"[,{re.escape(os.pathsep)}]", text) if name.strip())
