"""`python -m serve.client IMAGE...`: ask an endpoint about images, a line for each."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

try:
    from tqdm import tqdm

    from serve.client.asking import ask_all
    from serve.client.backoff import Backoff
    from serve.client.connection import Client, check_url
    from serve.client.files import expand, read_key
except ModuleNotFoundError as error:
    print(f"error: {error.name} is not installed; pip install 'attention-zoo[client]'", file=sys.stderr)
    sys.exit(2)

_SOME_FAILED, _MISTAKE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Ask; return the exit status: 0 all answered, 1 some failed, 2 the user's mistake."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name outside the locale must not end us
    options = parse_command(argv)
    try:
        key = read_key(options.api_key_file) if options.api_key_file else None
        check_url(options.url)
        files = expand(options.images)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _MISTAKE
    try:
        return asyncio.run(_run(options, files, key))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SOME_FAILED


async def _run(options: argparse.Namespace, files: list[Path], key: str | None) -> int:
    client = Client(
        options.url,
        model=options.model,
        api_key=key,
        top_k=options.top_k,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        backoff=Backoff(options.retries),
    )
    failed = 0
    bar = tqdm(total=len(files), unit=" images", disable=not sys.stderr.isatty(), file=sys.stderr)
    async with client, aclosing(ask_all(client, files, options.concurrency)) as outcomes:
        async for outcome in outcomes:
            if outcome.prediction is None:
                failed += 1
                bar.write(f"error: {outcome.path}: {outcome.failure}", file=sys.stderr)
            else:
                bar.write(outcome.to_json() if options.json else outcome.to_tsv(), file=sys.stdout)
                sys.stdout.flush()
            bar.update()
    bar.close()
    return _SOME_FAILED if failed else 0


def parse_command(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a mistake in it ends the process with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.client",
        description="Ask an endpoint about images: a line for each, in order, of path, label and probability, by tabs.",
        epilog="Exit status: 0 all are answered, 1 some failed, each with a line on stderr, 2 a mistake in the call.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("images", nargs="+", type=Path, metavar="IMAGE", help="image files, and folders with images anywhere below")
    add("--url", default="http://127.0.0.1:8000", help="of the endpoint (%(default)s)")
    add("--model", help="name of the model to ask (the endpoint's first)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the API key on a line, or NAME:KEY")
    add("--concurrency", type=_count, default=8, metavar="N", help="most requests at a time (%(default)s)")
    add("--top-k", type=_count, metavar="K", help="classes to name for each image, in --json (the endpoint's default)")
    add("--timeout", type=_seconds, default=30, metavar="S", help="seconds that a try may take (%(default)s)")
    add("--retries", type=_whole, default=5, metavar="N", help="further tries where one is busy or gone (%(default)s)")
    add("--json", action="store_true", help="a JSON object on each line, with all classes that are named")
    return parser.parse_args(argv)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number")
    return int(text)


def _count(text: str) -> int:
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted seconds from 0.001 to 86400")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
