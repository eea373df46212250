"""A run in a pool: who is lost is placed again, and what ends it. The pool is a list of what happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from sao import __version__, config
from sao.errors import ConfigError
from sao.runtime import pool
from sao.runtime.pool import HEAD, Needs, News, Spot


def spot(node: str, version: str = __version__) -> Spot:
    return Spot(node, "127.0.0.1", (5555, 5556), version)


class Played:
    """A `Pool` that gives news from a list, and keeps what it was told."""

    def __init__(self, *news: News) -> None:
        self.coming = deque(news)
        self.told: list[tuple[Any, ...]] = []
        self.files: dict[str, dict[str, str]] = {}

    def place(self, name: str, needs: Needs) -> None:
        self.told.append(("place", name))

    def start(self, name: str, arguments: Sequence[str], files: dict[str, str]) -> None:
        self.told.append(("start", name))
        self.files[name] = files

    def news(self, timeout_s: float) -> list[News]:
        assert self.coming, self.told
        return [self.coming.popleft()]

    def ask_to_end(self, name: str) -> None:
        self.told.append(("end", name))

    def close(self) -> None:
        self.told.append(("close",))


def run(*news: News) -> tuple[int, Played, list[str]]:
    lines: list[str] = []
    played = Played(*news)
    code = pool.run(
        config.parse({"model": {"path": "m"}, "env": {"name": "lookup"}, "generator": {"count": 1}}),
        played,
        lines.append,
    )
    assert played.told[-1] == ("close",)
    return code, played, lines


BEGUN = (News(HEAD, spot("a")), News("g0", spot("b")))
DONE = (News(HEAD, code=0), News("g0", code=0))


def test_a_lost_generator_is_placed_again_and_one_that_failed_is_started_again() -> None:
    lost = [News("g0", lost="ActorDiedError"), News("g0", lost="ActorDiedError"), News("g0", spot("c"))]
    code, played, lines = run(*BEGUN, *lost, News("g0", lines=["hello"], code=1), *DONE)
    assert code == 0 and "g0 | hello" in lines
    assert played.told.count(("place", "g0")) == 3 and played.told.count(("start", "g0")) == 3


def test_nobody_gets_secrets_of_others() -> None:
    _, played, _ = run(*BEGUN, *DONE)
    assert set(played.files["g0"]) == {"keys/broker.key", "keys/learner.key", "keys/g0.key_secret"}
    assert "keys/g0.key" in played.files[HEAD] and "keys/g0.key_secret" not in played.files[HEAD]


@pytest.mark.parametrize(
    ("news", "code", "text"),
    [
        ((*BEGUN, News("g0", code=2), News(HEAD, code=130)), 2, "g0 cannot run where it is placed"),
        ((*BEGUN, *[News("g0", code=1)] * 4, News(HEAD, code=130)), 1, "g0 ended unexpectedly 4 times"),
        ((*BEGUN, News(HEAD, lost="ActorDiedError")), 1, "the head is lost"),
        ((News(HEAD, spot("a", "0.0.1")),), 2, "has sao 0.0.1"),
        ((*BEGUN, News(HEAD, code=1), News("g0", code=1)), 1, ""),
    ],
)
def test_what_ends_a_run_and_its_exit_code(news: tuple[News, ...], code: int, text: str) -> None:
    found, _, lines = run(*news)
    assert found == code and text in "\n".join(lines), lines


def test_no_generators_need_an_address_that_others_reach() -> None:
    with pytest.raises(ConfigError, match=r"generator\.count: 0 needs generators from elsewhere"):
        config.parse({"model": {"path": "m"}, "env": {"name": "lookup"}, "generator": {"count": 0}})
