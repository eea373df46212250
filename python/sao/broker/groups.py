"""Groups of rollouts of the same task, for estimators that compare them: a group is trained as a whole or not at all.

Rollouts with ordinals k * size ... (k + 1) * size - 1 are group k and get the same task seed. A learner's request is
answered with whole groups, in the order in which they became complete; until then their rollouts wait (the barrier that
single-rollout training does without). A member that fails is played again. One that fails for good, or whose trajectory
cannot be trained on, ends its group: what the others have sampled is dropped as `group_incomplete`.
"""

from __future__ import annotations

from collections import defaultdict

from sao.broker.tasks import Task, TaskBook

INCOMPLETE = "group_incomplete"


class Groups:
    """The groups among the unfinished tasks of a book; with size 1 every task is a group."""

    def __init__(self, size: int, book: TaskBook) -> None:
        self.size, self._book = size, book

    def members(self, ordinal: int) -> list[Task]:
        """The unfinished tasks of the group of `ordinal`, itself included."""
        first = ordinal // self.size * self.size
        found = (self._book.live.get(member) for member in range(first, first + self.size))
        return [task for task in found if task is not None]

    def ready(self, n: int) -> list[int] | None:
        """The `n` ordinals of the groups that were complete first; `None` when there are fewer."""
        groups: dict[int, list[Task]] = defaultdict(list)
        for task in self._book.live.values():
            if task.state == "ready":
                groups[task.ordinal // self.size].append(task)
        whole = [tasks for tasks in groups.values() if len(tasks) == self.size]
        whole.sort(key=lambda tasks: (max(task.finished for task in tasks), tasks[0].ordinal))
        ordinals = [task.ordinal for tasks in whole for task in sorted(tasks, key=lambda task: task.ordinal)]
        return ordinals[:n] if len(ordinals) >= n else None

    def broken(self) -> list[Task]:
        """Unfinished tasks whose group has lost a member, as a killed broker may leave them."""
        lost = []
        for task in self._book.live.values():
            first = task.ordinal // self.size * self.size
            issued = range(first, min(first + self.size, self._book.next_ordinal))
            if any(member not in self._book.live for member in issued):
                lost.append(task)
        return lost
