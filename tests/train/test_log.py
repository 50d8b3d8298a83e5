import logging
import sys

import pytest

from train.log import rank_of_environment, set_up_logging

logger = logging.getLogger("train.of_the_test")


@pytest.fixture
def configured(here, monkeypatch):  # noqa: ARG001  (`here` restores the root logger)
    """Set logging up as the rank given."""

    def configure(rank: int | None) -> None:
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", str(rank))
        set_up_logging()

    return configure


@pytest.mark.parametrize("rank", [None, 0])
def test_main_process_speaks(configured, capsys, rank):
    configured(rank)
    logger.info("steps=%d", 3)
    logger.debug("silent")
    assert capsys.readouterr().err.endswith(" I steps=3\n")


def test_other_ranks_are_silent_but_for_warnings_with_their_rank(configured, capsys):
    configured(3)
    assert rank_of_environment() == 3
    logger.info("steps=3")
    assert capsys.readouterr().err == ""
    logger.warning("late")
    assert capsys.readouterr().err.endswith(" rank 3: W late\n")


def test_libraries_information_about_themselves_is_left_out(configured, capsys):
    configured(0)
    logging.getLogger("alembic.runtime.migration").info("Context impl SQLiteImpl")
    logging.getLogger("mlflow.store.db.utils").info("Creating tables")
    assert capsys.readouterr().err == ""


def test_error_of_a_database_is_left_to_who_explains_it(configured, capsys):
    configured(0)
    logging.getLogger("mlflow.store.db.utils").error("SQLAlchemy database error", exc_info=ValueError("full"))
    assert capsys.readouterr().err == ""


def test_closed_terminal_does_not_end_what_is_logged_about(configured, monkeypatch):
    class ClosedTerminal:
        def write(self, _text: str) -> int:
            raise OSError(5, "Input/output error")

        flush = write

    configured(0)
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    logger.warning("steps=3")


def test_lines_go_to_standard_error_and_never_through_a_bar(configured, capsys):
    from tqdm import tqdm

    configured(0)
    with tqdm(total=2) as bar:
        bar.update()
        logger.info("between")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert any(line.endswith(" I between") for line in captured.err.replace("\r", "\n").split("\n"))
