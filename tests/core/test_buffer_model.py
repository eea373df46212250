"""The buffer against a plain list, with random operations."""

from __future__ import annotations

from core.buffer_tools import conserved
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sao import _core
from sao.errors import DeadlineError, FullError


class Model(RuleBasedStateMachine):
    """Random operations on the buffer and on a plain list."""

    policy = "block"
    max_trajectories, max_bytes = 5, 60

    def __init__(self) -> None:
        super().__init__()
        self.buffer = _core.Buffer(self.max_trajectories, self.max_bytes, self.policy)
        self.ready: list[tuple[int, int, int, int]] = []  # number, bytes, version, task
        self.leased: list[tuple[_core.Lease, tuple[int, int, int, int]]] = []
        self.next = 0

    def held_bytes(self) -> int:
        return sum(entry[1] for entry in self.ready) + sum(entry[1] for _, entry in self.leased)

    def has_room(self, size: int) -> bool:
        return len(self.ready) + len(self.leased) < self.max_trajectories and self.held_bytes() + size <= self.max_bytes

    @rule(size=st.integers(0, 50), version=st.integers(0, 6), task=st.integers(-1, 3))
    def put(self, size: int, version: int, task: int) -> None:
        header = b"%06d" % self.next
        entry = (self.next, size + 6, version, task)
        expected: list[int] = []
        while not self.has_room(entry[1]) and self.ready and self.policy.startswith("drop"):
            key = (lambda e: e[0]) if self.policy == "drop_oldest" else (lambda e: (e[2], e[0]))
            victim = min(self.ready, key=key)
            self.ready.remove(victim)
            expected.append(victim[3])
        try:
            result = self.buffer.put(header, bytes(size), min_version=version, timeout_s=0.0, task=task)
        except (DeadlineError, FullError):
            assert not self.has_room(entry[1])
            return
        assert self.has_room(entry[1])
        assert result == expected
        self.ready.append(entry)
        self.next += 1

    @rule(n=st.integers(1, 3))
    def take(self, n: int) -> None:
        leases = self.buffer.try_take(n)
        assert len(leases) == (n if len(self.ready) >= n else 0)
        for lease in leases:
            entry = self.ready.pop(0)
            assert (int(bytes(lease.header)), lease.min_version) == (entry[0], entry[2])
            self.leased.append((lease, entry))

    @rule(asked=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), waits=st.booleans())
    def take_tasks(self, asked: list[int], waits: bool) -> None:
        first = [next((entry for entry in self.ready if entry[3] == task), None) for task in asked]
        try:
            leases = self.buffer.take(asked, 0.0) if waits else self.buffer.try_take(asked)
        except DeadlineError as error:
            leases = []
            assert f"that of task {asked[first.index(None)]} is missing" in str(error)
        if None in first:
            assert leases == []
            return
        assert [lease.task for lease in leases] == asked
        for lease, entry in zip(leases, first, strict=True):
            assert entry is not None
            assert (int(bytes(lease.header)), lease.min_version) == (entry[0], entry[2])
            self.ready.remove(entry)
            self.leased.append((lease, entry))

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), how=st.sampled_from(["commit", "give_back", "forget"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        lease, entry = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        if how != "forget":
            getattr(lease, how)()
        if how != "commit":
            self.ready = sorted([*self.ready, entry])

    @rule(keep_from=st.integers(0, 6))
    def advance(self, keep_from: int) -> None:
        old = sorted((v, i, task) for i, _, v, task in self.ready if v < keep_from)
        assert self.buffer.advance(6, keep_from) == [task for _, _, task in old]
        self.ready = [entry for entry in self.ready if entry[2] >= keep_from]

    @invariant()
    def agrees(self) -> None:
        stats = self.buffer.stats()
        assert (stats["trajectories"], stats["leased"]) == (len(self.ready), len(self.leased))
        assert stats["bytes"] == self.held_bytes() <= self.max_bytes
        assert conserved(self.buffer)
        held = sorted([*self.ready, *(entry for _, entry in self.leased)])
        assert self.buffer.snapshot()["task"].tolist() == [entry[3] for entry in held]


class OldestModel(Model):
    policy = "drop_oldest"


class StalestModel(Model):
    policy = "drop_stalest"


class RejectModel(Model):
    policy = "reject"


for machine in (Model, OldestModel, StalestModel, RejectModel):
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    globals()[f"Test{machine.__name__}"] = case
del machine, case
