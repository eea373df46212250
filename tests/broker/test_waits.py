"""A stall has a name: whatever the run waits for is in the snapshot, with how long it has been and may be."""

from __future__ import annotations

import threading
from pathlib import Path

from broker.peers import Generator, Learner, Watcher, broker
from waiting import until

from sao.transport import messages as m


def test_every_wait_is_named_with_its_limit(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 5}, eval={"every_steps": 0}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()

        def waits() -> list[str]:
            return list(watcher.snapshot()["waits"])

        def there(text: str) -> bool:
            return any(text in line for line in waits())

        assert waits() == ["broker: a learner to join", "broker: a generator to join"]
        generator = Generator(endpoint, cfg, "g0", slots=2)
        generator.hold = True
        generator.start()
        until(lambda: there("g0: the end of 2 rollouts, task 0 attempt 0 for 0 s of transport.rollout_timeout_s = "))
        learner = Learner(endpoint, cfg).join()
        until(lambda: waits() == [line for line in waits() if line.startswith("g0:")])
        asked = threading.Thread(target=learner.take)
        asked.start()
        batch = cfg.learner.batch_trajectories
        until(
            lambda: there(
                f"learner: a batch of {batch} trajectories, for 0 s (0 ready, 2 running, 0 to be started again)"
            )
        )
        generator.hold = False
        for task in [generator.held.popleft() for _ in range(2)]:
            generator._answer(task)
        generator.client.call(m.Slots(8, generator.received))
        asked.join(20)
        assert not asked.is_alive()
        until(lambda: there(f"broker: the learner's commit of lease 1 with {batch} trajectories"))
        generator.client._thread.join(0)
        for peer in (generator, learner):
            peer.client.close()
        until(lambda: there("broker: a learner to join"))
