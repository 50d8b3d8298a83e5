"""Whether this process has the plugins that a bundle's card wants, and how to give those that it has not."""

import warnings
from pathlib import Path

from zoo.card import ModelCard, PluginSource
from zoo.errors import BundleError, MissingPluginError, PluginWarning, UnknownNameError
from zoo.plugins import find_plugin


def check_plugins(card: ModelCard, where: Path) -> None:
    """Make sure that a card's attention is registered, by the code that it was trained with.

    Other code is warned of and no error: a comment is a change too, and whether the function is still the same is what
    `check_golden` proves, which the endpoint and every publication run.

    Args:
        card: The card.
        where: Its file, for the messages.

    Raises:
        MissingPluginError: If it is not registered; says which plugin does it, and how to give it.
        PluginError: If an installed package offers it and fails.
    """
    try:
        found = find_plugin(card.attention)
    except UnknownNameError as error:
        if not card.plugins:
            raise BundleError(f"{where}: cannot build the model: {error}") from error
        ways = "; ".join(map(_phrase_way, card.plugins))
        raise MissingPluginError(f"{where}: attention {card.attention!r} is not registered here: {ways}") from error
    for wanted in card.plugins:
        got = found.source if found is not None else None
        if got is not None and wanted.sha256 and got.sha256 != wanted.sha256:
            warnings.warn(
                f"{where}: attention {card.attention!r} was trained with {_phrase_code(wanted)}, and is now that of "
                f"{_phrase_code(got)}: zoo.bundle.check_golden tells whether it answers the same",
                PluginWarning,
                stacklevel=4,  # whoever called load_bundle
            )


def _phrase_way(source: PluginSource) -> str:
    if source.distribution is not None:
        pinned = f"{source.distribution}=={source.version}" if source.version else source.distribution
        return f"install the package that offers it ({pinned})"
    a_file = source.name.endswith(".py")
    digest = f" (SHA-256 {source.sha256[:12]}...)" if source.sha256 else ""
    return (
        f"it needs the {'file' if a_file else 'module'} {source.name}{digest}, whose code no bundle holds: give it by "
        f"--plugins {source.name} or SERVE_PLUGINS={source.name}, in Python by zoo.load_plugins({source.name!r})"
    )


def _phrase_code(source: PluginSource) -> str:
    version = f" of {source.distribution} {source.version}" if source.distribution else ""
    return f"{source.name}{version} (SHA-256 {(source.sha256 or 'unknown')[:12]})"
