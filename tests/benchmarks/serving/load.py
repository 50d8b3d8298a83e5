"""Send images to an endpoint: so many clients that wait for their answers, or a rate, whatever comes back.

    python tests/benchmarks/serving/load.py --clients 32 --seconds 20 [--url URL] [IMAGE]
    python tests/benchmarks/serving/load.py --rate 50 --seconds 60

Without images it sends JPEG photographs of its own. An open loop draws exponential gaps, so that requests come as from
many people who know nothing of one another; or even ones, as load generators mostly do, with --even. It
prints one table, or JSON with --json: answers by status, rate of 200s,
latency of the 200s in milliseconds, and its own CPU time, which is not the server's.

It speaks HTTP/1.1 over plain asyncio streams, since a client that costs as much as the server measures itself.
"""

import argparse
import asyncio
import base64
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from tests.benchmarks.serving.photos import make_photos

Form = Literal["bytes", "mlflow", "field"]
_MOST_OPEN = 2000  # connections of an open loop: beyond that an arrival counts as `no_socket`


@dataclass
class Answers:
    """What came back.

    Attributes:
        statuses: Answers by status; "lost" for a connection that broke, "late" for no answer in time.
        latencies_ms: Milliseconds from the moment of sending to the whole answer, for each 200.
        seconds: Length of the run.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Answers of 200 per second."""
        return self.statuses["200"] / self.seconds

    def percentile(self, q: float) -> float:
        """Return the latency below which `q` percent of the 200s came, in milliseconds."""
        return float(np.percentile(self.latencies_ms, q)) if self.latencies_ms else float("nan")

    def summary(self) -> dict[str, object]:
        """Return what is printed."""
        return {
            "statuses": dict(sorted(self.statuses.items())),
            "rate": round(self.rate, 2),
            "p50_ms": round(self.percentile(50), 1),
            "p95_ms": round(self.percentile(95), 1),
            "p99_ms": round(self.percentile(99), 1),
            "seconds": round(self.seconds, 2),
            "client_cpu_s": round(self.cpu_s, 2),
        }


class Line:
    """One connection that is kept open from request to request."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address, self._timeout_s = (host, port), timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> str:
        """Send one request and read its whole answer; return its status, "lost" or "late"."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(request)
        except TimeoutError:
            self.close()
            return "late"
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            self.close()
            return "lost"

    async def _exchange(self, request: bytes) -> str:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
        if "content-length" in headers:
            await reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                await reader.readexactly(size + 2)
            await reader.readuntil(b"\r\n")
        if headers.get("connection") == "close":
            self.close()
        return head[0].split(" ")[1]

    def close(self) -> None:
        """Let the connection go."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def write_request(url: str, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> bytes:
    """Write a whole POST request."""
    parts = urlsplit(url)
    lines = [f"POST {parts.path or '/'} HTTP/1.1", f"host: {parts.netloc}", f"content-type: {content_type}"]
    lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def closed_loop(
    url: str, requests: Sequence[bytes], *, clients: int, seconds: float, timeout_s: float = 60
) -> Answers:
    """Let `clients` ask one request after another for `seconds`; what is under way then is still waited for."""
    answers, parts = Answers(), urlsplit(url)
    start = time.perf_counter()

    async def client(number: int) -> None:
        line, turn = Line(parts.hostname or "", parts.port or 80, timeout_s), number
        while time.perf_counter() - start < seconds:
            sent = time.perf_counter()
            note(answers, await line.ask(requests[turn % len(requests)]), sent)
            turn += clients
        line.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    answers.seconds = time.perf_counter() - start
    return answers


async def open_loop(
    url: str, requests: Sequence[bytes], *, rate: float, seconds: float, timeout_s: float = 60, is_even: bool = False
) -> Answers:
    """Send `rate` requests a second for `seconds`, at random or even moments, whether answers come or not."""
    answers, parts, stream = Answers(), urlsplit(url), random.Random(0)
    idle: list[Line] = []
    running: set[asyncio.Task[None]] = set()
    start = time.perf_counter()

    async def one(turn: int) -> None:
        line = idle.pop() if idle else Line(parts.hostname or "", parts.port or 80, timeout_s)
        sent = time.perf_counter()
        note(answers, await line.ask(requests[turn % len(requests)]), sent)
        idle.append(line)

    due, turn = start, 0
    while due - start < seconds:
        due += 1 / rate if is_even else stream.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(running) >= _MOST_OPEN:
            answers.statuses["no_socket"] += 1
            continue
        task = asyncio.create_task(one(turn))
        running.add(task)
        task.add_done_callback(running.discard)
        turn += 1
    sending_s = time.perf_counter() - start
    await asyncio.gather(*running)
    for line in idle:
        line.close()
    answers.seconds = sending_s
    return answers


def note(answers: Answers, status: str, sent: float) -> None:
    """Count one answer."""
    answers.statuses[status] += 1
    if status == "200":
        answers.latencies_ms.append(1000 * (time.perf_counter() - sent))


def main() -> None:
    """Run one loop and print what came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", type=Path)
    parser.add_argument("--url", default="http://localhost:8000/invocations")
    parser.add_argument("--clients", type=int, default=8, help="closed loop: clients that wait for their answers")
    parser.add_argument("--rate", type=float, help="open loop: requests a second; takes the place of --clients")
    parser.add_argument("--even", action="store_true", help="open loop: the same gap between any two requests")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--timeout-s", type=float, default=60)
    parser.add_argument("--form", choices=("bytes", "mlflow", "field"), default="bytes", help="how images are sent")
    parser.add_argument("--api-key")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    images = [path.read_bytes() for path in given.images] or make_photos()
    requests = build_requests(given.url, images, given.form, api_key=given.api_key)
    if given.rate:
        times = {"rate": given.rate, "seconds": given.seconds, "timeout_s": given.timeout_s}
        loop = open_loop(given.url, requests, **times, is_even=given.even)
    else:
        loop = closed_loop(given.url, requests, clients=given.clients, seconds=given.seconds, timeout_s=given.timeout_s)
    before = resource.getrusage(resource.RUSAGE_SELF)
    answers = asyncio.run(loop)
    after = resource.getrusage(resource.RUSAGE_SELF)
    answers.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = answers.summary()
    print(json.dumps(summary) if given.json else "\n".join(f"{name:14}{value}" for name, value in summary.items()))


def build_requests(url: str, images: Sequence[bytes], form: Form, *, api_key: str | None = None) -> list[bytes]:
    """Write one request for each image."""
    headers = {"x-api-key": api_key} if api_key else None
    if form == "bytes":
        return [write_request(url, image, "image/jpeg", headers) for image in images]
    texts = [base64.b64encode(image).decode() for image in images]
    if form == "field":
        bodies: list[object] = [{"image": text} for text in texts]
    else:
        bodies = [{"dataframe_split": {"columns": ["image"], "data": [[text]]}} for text in texts]
    return [write_request(url, json.dumps(body).encode(), "application/json", headers) for body in bodies]


if __name__ == "__main__":
    main()
