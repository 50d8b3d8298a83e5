import asyncio
import json
from contextlib import aclosing
from pathlib import Path

from serve.client import Backoff, Client
from serve.client.asking import Outcome, ask_all
from serve.protocol.schemas import Prediction
from tests.serve.client.conftest import DROP, Planted, busy


def ask(planted: Planted, files: list[Path], concurrency: int = 2, retries: int = 1) -> list[Outcome]:
    async def run() -> list[Outcome]:
        client = Client(planted.url, concurrency=concurrency, backoff=Backoff(retries, first_s=0.001))
        async with client, aclosing(ask_all(client, files, concurrency)) as outcomes:
            return [outcome async for outcome in outcomes]

    return asyncio.run(run())


def write(folder: Path, count: int) -> list[Path]:
    for i in range(count):
        (folder / f"{i:03}.png").write_text(f"image {i}")
    return sorted(folder.iterdir())


def labels(outcomes: list[Outcome]) -> list[str]:
    return [outcome.prediction.label if outcome.prediction else outcome.failure for outcome in outcomes]


def test_outcomes_come_in_the_files_order_whatever_is_busy(planted, tmp_path):
    planted.script = [busy(503), DROP, busy(429)]
    files = write(tmp_path, 30)
    outcomes = ask(planted, files, retries=4)
    assert [outcome.path for outcome in outcomes] == files
    assert labels(outcomes) == [f"image {i}" for i in range(30)]


def test_one_that_fails_hurts_no_other(planted, tmp_path):
    files = write(tmp_path, 5)
    files[1].unlink()
    planted.script = [busy(422)]
    outcomes = ask(planted, files, concurrency=1)
    assert labels(outcomes) == [
        "answered 422: planted refusal",
        "cannot be read: No such file or directory",
        *(f"image {i}" for i in (2, 3, 4)),
    ]


def test_no_further_file_is_asked_after_a_failure_that_concerns_all(planted, tmp_path):
    planted.script = [busy(401)] * 100
    outcomes = ask(planted, write(tmp_path, 100), concurrency=2)
    assert labels(outcomes)[0] == "answered 401: planted refusal"
    assert labels(outcomes)[-1] == "not asked: answered 401: planted refusal"
    assert len(outcomes) == 100
    assert len(planted.asked) <= 8, "what had begun"


def test_a_file_is_told_of_before_the_last_is_begun(planted, tmp_path):
    async def run() -> int:
        client = Client(planted.url, concurrency=2)
        async with client, aclosing(ask_all(client, write(tmp_path, 50), 2)) as outcomes:
            async for outcome in outcomes:
                assert labels([outcome]) == ["image 0"]
                break
        return len(planted.asked)

    assert asyncio.run(run()) < 20


def test_few_files_are_in_memory_at_a_time(planted, tmp_path, monkeypatch):
    planted.delay_s = 0.01
    reads = []
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        reads.append(len(reads) - len(planted.asked))
        return read_bytes(path)

    files = write(tmp_path, 40)
    monkeypatch.setattr(Path, "read_bytes", read)
    ask(planted, files, concurrency=3)
    assert len(reads) == 40
    assert max(reads) <= 3


PREDICTION = Prediction(label="日\t本\n\\\x85", probability=0.25, top=[])


def test_a_line_holds_three_words_whatever_is_in_them():
    line = Outcome(Path("a\tb\n.png"), PREDICTION).to_tsv()
    assert line == "a\\tb\\n.png\t日\\t本\\n\\\\\\x85\t0.250000"


def test_a_json_line_holds_all():
    line = Outcome(Path("a\nb.png"), PREDICTION).to_json()
    assert "\n" not in line
    assert json.loads(line) == {"image": "a\nb.png", "label": "日\t本\n\\\x85", "probability": 0.25, "top": []}
