"""The ledger from Python: a plain model of it agrees on every call, and files outlive the process."""

import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sao import Ledger
from sao.errors import ClosedError, LedgerError

TASKS, LEASES = st.integers(0, 5), st.integers(0, 2)
ATTEMPTS, TOKENS = st.integers(0, 2), st.integers(0, 40)
REASONS = st.sampled_from(["stale", "env:timeout"])


class Refused(Exception):
    """The model says that a step is impossible."""


class Model:
    """The rules again, as plainly as possible: nothing is collapsed, tokens are found by looking at all tasks."""

    def __init__(self):
        self.tasks = {}  # ordinal -> [state, attempt, tokens, lease]
        self.leases = {}
        self.sampled = self.trained_tokens = self.masked_tokens = 0
        self.dropped_tokens = {}
        self.last_step = None

    def need(self, condition):
        if not condition:
            raise Refused

    def late(self, ordinal, attempt):
        self.need(ordinal in self.tasks)
        state, current = self.tasks[ordinal][:2]
        if state in ("trained", "dropped") or attempt < current:
            return True
        self.need(attempt == current and state != "requeued")
        return False

    def issue(self, ordinal):
        task = self.tasks.setdefault(ordinal, ["requeued", 0, 0, None])
        self.need(task[0] == "requeued")
        task[0] = "issued"
        return task[1]

    def generating(self, ordinal, attempt):
        self.need(ordinal in self.tasks and self.tasks[ordinal][:2] == ["issued", attempt])
        self.tasks[ordinal][0] = "generating"

    def ready(self, ordinal, attempt, tokens):
        if self.late(ordinal, attempt) or self.tasks[ordinal][0] in ("ready", "leased"):
            return False
        self.need(self.tasks[ordinal][0] == "generating")
        self.tasks[ordinal] = ["ready", attempt, tokens, None]
        self.sampled += tokens
        return True

    def lease(self, ordinals, lease):
        self.need(lease not in self.leases and ordinals and len(set(ordinals)) == len(ordinals))
        self.need(all(o in self.tasks and self.tasks[o][0] == "ready" for o in ordinals))
        self.leases[lease] = list(ordinals)
        for ordinal in ordinals:
            self.tasks[ordinal][0] = "leased"

    def give_back(self, lease):
        self.need(lease in self.leases)
        for ordinal in self.leases.pop(lease):
            self.tasks[ordinal][0] = "ready"

    def trained(self, lease, step, trained, masked):
        self.need(lease in self.leases)
        held = [self.tasks[o][2] for o in self.leases[lease]]
        if isinstance(trained, list):
            self.need([t + m for t, m in zip(trained, masked, strict=True)] == held)
            trained, masked = sum(trained), sum(masked)
        self.need(trained + masked == sum(held) and (self.last_step is None or step > self.last_step))
        for ordinal in self.leases.pop(lease):
            self.tasks[ordinal] = ["trained", None, 0, None]
        self.trained_tokens += trained
        self.masked_tokens += masked
        self.last_step = step

    def leave(self, ordinal, tokens, reason):
        task = self.tasks[ordinal]
        if task[0] in ("ready", "leased"):
            self.need(tokens is None or tokens == task[2])
            tokens = task[2]
        else:
            tokens = tokens or 0
            self.sampled += tokens
        self.dropped_tokens[reason] = self.dropped_tokens.get(reason, 0) + tokens
        for members in self.leases.values():
            if ordinal in members:
                members.remove(ordinal)

    def drop(self, ordinal, attempt, reason, tokens):
        if self.late(ordinal, attempt):
            return False
        self.leave(ordinal, tokens, reason)
        self.tasks[ordinal] = ["dropped", None, 0, None]
        return True

    def requeue(self, ordinal, reason, tokens):
        self.need(ordinal in self.tasks and self.tasks[ordinal][0] not in ("requeued", "trained", "dropped"))
        self.leave(ordinal, tokens, reason)
        self.tasks[ordinal] = ["requeued", self.tasks[ordinal][1] + 1, 0, None]

    def waste(self, reason, tokens):
        self.sampled += tokens
        self.dropped_tokens[reason] = self.dropped_tokens.get(reason, 0) + tokens

    def facts(self):
        names = ("requeued", "issued", "generating", "ready", "leased", "trained", "dropped")
        states = [task[0] for task in self.tasks.values()]
        open_tasks = sorted(o for o, task in self.tasks.items() if task[0] not in ("trained", "dropped"))
        return {
            "counts": {name: states.count(name) for name in names},
            "tokens": {
                "sampled": self.sampled,
                "trained": self.trained_tokens,
                "masked": self.masked_tokens,
                "dropped": self.dropped_tokens,
                "held": sum(task[2] for task in self.tasks.values()),
            },
            "unfinished": [(o, self.tasks[o][1], self.tasks[o][0]) for o in open_tasks],
            "leases": sorted((lease, members) for lease, members in self.leases.items()),
            "last_step": self.last_step,
            "next_ordinal": max(self.tasks, default=-1) + 1,
        }


def facts(ledger):
    ledger.check()
    return {
        "counts": ledger.counts(),
        "tokens": ledger.tokens(),
        "unfinished": ledger.unfinished(),
        "leases": ledger.leases(),
        "last_step": ledger.last_step,
        "next_ordinal": ledger.next_ordinal,
    }


class LedgerMachine(RuleBasedStateMachine):
    """Legal and illegal calls in any order, with restarts from the file in between."""

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "journal"
        self.ledger, self.model, self.clock = Ledger(self.path), Model(), 0

    def both(self, name, *arguments):
        before = self.model.facts()
        try:
            expected = getattr(self.model, name)(*arguments)
        except Refused:
            with pytest.raises(LedgerError):
                getattr(self.ledger, name)(*arguments)
            assert self.model.facts() == before
        else:
            assert getattr(self.ledger, name)(*arguments) == expected

    @rule(ordinal=TASKS)
    def issue(self, ordinal):
        self.both("issue", ordinal)

    @rule(ordinal=TASKS, attempt=ATTEMPTS)
    def generating(self, ordinal, attempt):
        self.both("generating", ordinal, attempt)

    @rule(ordinal=TASKS, tokens=TOKENS)
    def advance(self, ordinal, tokens):
        """The usual way, so that later states are reached often."""
        task = self.model.tasks.get(ordinal, ["requeued", 0])
        if task[0] == "requeued":
            self.both("issue", ordinal)
        if self.model.tasks[ordinal][0] == "issued":
            self.both("generating", ordinal, task[1])
        self.both("ready", ordinal, task[1] or 0, tokens)

    @rule(ordinal=TASKS, attempt=ATTEMPTS, tokens=TOKENS)
    def ready(self, ordinal, attempt, tokens):
        self.both("ready", ordinal, attempt, tokens)

    @rule(ordinals=st.lists(TASKS, max_size=3), lease=LEASES)
    def lease(self, ordinals, lease):
        self.both("lease", ordinals, lease)

    @rule(lease=LEASES)
    def lease_all(self, lease):
        self.both("lease", [o for o, task in self.model.tasks.items() if task[0] == "ready"], lease)

    @rule(lease=LEASES)
    def give_back(self, lease):
        self.both("give_back", lease)

    @rule(lease=LEASES, off=st.sampled_from([0, 0, 1]), lists=st.booleans(), back=st.sampled_from([0, 0, 0, 3]))
    def trained(self, lease, off, lists, back):
        held = [self.model.tasks[o][2] for o in self.model.leases.get(lease, [])]
        masked = [tokens // 3 for tokens in held]
        trained = [tokens - part for tokens, part in zip(held, masked, strict=True)]
        if lists and trained:
            trained[0] += off
        totals = (trained, masked) if lists else (sum(trained) + off, sum(masked))
        self.clock += 1
        self.both("trained", lease, max(0, self.clock - back), *totals)

    @rule(ordinal=TASKS, attempt=ATTEMPTS, reason=REASONS, tokens=st.none() | TOKENS)
    def drop(self, ordinal, attempt, reason, tokens):
        self.both("drop", ordinal, attempt, reason, tokens)

    @rule(ordinal=TASKS, reason=REASONS, tokens=st.none() | TOKENS)
    def requeue(self, ordinal, reason, tokens):
        self.both("requeue", ordinal, reason, tokens)

    @rule(reason=REASONS, tokens=TOKENS)
    def waste(self, reason, tokens):
        self.both("waste", reason, tokens)

    @rule()
    def restart(self):
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def agree(self):
        if not hasattr(self, "ledger"):
            return
        assert facts(self.ledger) == self.model.facts()
        for ordinal in range(6):
            state = self.model.tasks.get(ordinal, ["unknown"])[0]
            assert self.ledger.state(ordinal) == ("finished" if state in ("trained", "dropped") else state)

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()


TestLedgerAgainstModel = LedgerMachine.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def held(ledger, ordinal, tokens):
    attempt = ledger.issue(ordinal)
    ledger.generating(ordinal, attempt)
    assert ledger.ready(ordinal, attempt, tokens)


def test_refusals_name_task_state_and_wish():
    ledger = Ledger()
    held(ledger, 4, 7)
    with pytest.raises(LedgerError, match=r"^task 4 is ready \(attempt 0\); wanted: issued$"):
        ledger.issue(4)
    with pytest.raises(LedgerError, match=r"^task 9 is unknown; wanted: leased, once, by lease 1$"):
        ledger.lease([4, 9], 1)
    ledger.lease([4], 1)
    with pytest.raises(LedgerError, match="lease 1 holds 1 tasks, but trained_tokens has 1 entries, masked_tokens 2"):
        ledger.trained(1, 0, [7], [0, 0])
    with pytest.raises(LedgerError, match="two totals or two lists"):
        ledger.trained(1, 0, [7], 0)
    for field, shown, call in (
        ("ordinal", "-1", lambda: ledger.issue(-1)),
        ("attempt", "9223372036854775808", lambda: ledger.generating(4, 1 << 63)),
        ("sampled_tokens", "'7'", lambda: ledger.ready(4, 0, "7")),
        ("ordinals[1]", "None", lambda: ledger.lease([4, None], 2)),
        ("lease_id", "-2", lambda: ledger.give_back(-2)),
        ("step", "1.5", lambda: ledger.trained(1, 1.5, 7, 0)),
        ("trained_tokens", "-1", lambda: ledger.trained(1, 0, -1, 8)),
        ("masked_tokens[0]", "-1", lambda: ledger.trained(1, 0, [7], [-1])),
        ("sampled_tokens", "-3", lambda: ledger.drop(4, 0, "why", -3)),
        ("sampled_tokens", "-3", lambda: ledger.requeue(4, "why", -3)),
        ("sampled_tokens", "-3", lambda: ledger.waste("why", -3)),
        ("step", "-1", lambda: ledger.rewind(-1)),
        ("upto_step", "-1", lambda: ledger.roll(-1)),
        ("ordinal", "-1", lambda: ledger.begin_anew(-1)),
        ("attempt", "-1", lambda: ledger.answered(4, -1)),
        ("ordinal", "-1", lambda: ledger.frames(-1)),
        ("ordinal", "-1", lambda: ledger.state(-1)),
    ):
        text = rf"^{re.escape(f'{field}: {shown}')} is not an integer from 0 to 2\^63 - 1"
        with pytest.raises(LedgerError, match=text):
            call()
    assert ledger.counts()["leased"] == 1


def test_a_closed_ledger_says_so(tmp_path):
    with Ledger(tmp_path / "journal") as ledger:
        ledger.issue(0)
    ledger.close()
    with pytest.raises(ClosedError, match="the ledger is closed"):
        ledger.issue(1)


def test_files_that_are_no_ledger_or_damaged_are_refused_with_path_and_offset(tmp_path):
    path = tmp_path / "journal"
    path.write_text("hello, this is some text")
    with pytest.raises(LedgerError, match=r"journal: cannot be opened: File exists"):
        Ledger(path)
    path.unlink()
    with Ledger(path) as ledger:
        for ordinal in range(10):
            ledger.issue(ordinal)
            ledger.flush()
    (segment,) = path.iterdir()
    data = segment.read_bytes()
    places = [at for at in range(len(data)) if data.startswith(b"SAO", at)]
    segment.write_bytes(data[: places[4] + 50] + b"?" + data[places[4] + 51 :])
    bad, good = places[4:6]
    text = rf"{segment.name}: corrupt transaction at byte {bad} of {len(data)}; a whole one follows at byte {good}"
    with pytest.raises(LedgerError, match=text):
        Ledger(path)
    segment.write_bytes(b"hello, this is some text")
    with pytest.raises(LedgerError, match=rf"{segment.name}: no segment of a journal"):
        Ledger(path)


@pytest.mark.parametrize("way", ["sync", "flush"])
def test_what_was_synced_or_flushed_survives_a_kill(tmp_path, way):
    path = tmp_path / "journal"
    code = (
        "import sys, time; from sao import Ledger; ledger = Ledger(sys.argv[1])\n"
        "for ordinal in range(1000): ledger.issue(ordinal); ledger.generating(ordinal, 0)\n"
        f"ledger.{way}(); print('synced', flush=True); ledger.issue(1000); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"synced\n"
        child.send_signal(signal.SIGKILL)
    with Ledger(path) as ledger:
        assert ledger.counts()["generating"] == 1000
        for ordinal, attempt, state in ledger.unfinished():
            assert (attempt, state) == (0, "generating")
            ledger.requeue(ordinal, "restart")
        assert ledger.issue(0) == 1
        assert ledger.next_ordinal == 1000


def test_threads_may_share_a_ledger(tmp_path):
    ledger = Ledger(tmp_path / "journal")
    failures = []

    def work(first):
        try:
            for ordinal in range(first, 2000, 4):
                held(ledger, ordinal, 3)
                if ordinal % 50 == 0:
                    ledger.sync()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    before = facts(ledger)
    assert before["tokens"]["held"] == 6000
    ledger.close()
    assert facts(Ledger(tmp_path / "journal")) == before


def test_memory_follows_the_unfinished_tasks_not_the_run():
    ledger = Ledger()
    ledger.issue(0)
    for step in range(2000):
        ordinals = range(1 + 8 * step, 9 + 8 * step)
        for ordinal in ordinals:
            held(ledger, ordinal, 2)
        ledger.lease(ordinals, step)
        ledger.trained(step, step, 16, 0)
        assert ledger.entries <= 2
    ledger.check()
    assert ledger.tokens()["trained"] == 32_000
