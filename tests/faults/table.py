"""Every combination that is tried: each class of files that a run writes, with each fault that its disk may have."""

from __future__ import annotations

from tests.faults.harness import SHORT, SLOW, Fault

ONCE, FOR_EVER = 1, 0
SHARED = "/dev/shm/sao-"  # the folder of the weights, in which safetensors writes under names of its own


def _writes(files: str, path: str, learner: str = "plain", nth: int = 1, phase: str = "start") -> list[Fault]:
    """A file that is written: full, failing, over quota, read-only, short and slow."""
    kinds = [("ENOSPC", ONCE), ("ENOSPC", FOR_EVER), ("EIO", ONCE), ("EIO", FOR_EVER), ("EDQUOT", ONCE)]
    kinds += [("EROFS", FOR_EVER), (SHORT, FOR_EVER)]
    return [Fault(files, path, "write", kind, times, nth, learner, phase=phase) for kind, times in kinds]


def _renames(files: str, path: str, learner: str = "plain", phase: str = "start") -> list[Fault]:
    kinds = [("EIO", ONCE), ("ENOSPC", FOR_EVER), ("EROFS", FOR_EVER)]
    return [Fault(files, path, "rename", kind, times, 1, learner, phase=phase) for kind, times in kinds]


def _syncs(files: str, path: str, learner: str = "plain", nth: int = 1) -> list[Fault]:
    kinds = [("EIO", ONCE), ("EIO", FOR_EVER), ("ENOSPC", ONCE), ("EDQUOT", FOR_EVER), (SLOW, 4)]
    return [Fault(files, path, "fsync", kind, times, nth, learner) for kind, times in kinds]


def _opens(files: str, path: str, learner: str = "plain", nth: int = 1) -> list[Fault]:
    kinds = [("ENOSPC", ONCE), ("EROFS", FOR_EVER), ("EDQUOT", FOR_EVER)]
    return [Fault(files, path, "open", kind, times, nth, learner) for kind, times in kinds]


def _locks(files: str, path: str) -> list[Fault]:
    return [Fault(files, path, "flock", kind, FOR_EVER) for kind in ("ENOLCK", "ENOSYS", "EOPNOTSUPP")]


TABLE = [
    # journal: the ledger and what it needs
    *_writes("journal", "/journal/"),
    *_writes("journal", "/journal/", nth=30),
    *_syncs("journal", "/journal", nth=1),
    *_syncs("journal", "/journal", nth=4),
    *_renames("journal", "/journal/"),
    *_opens("journal", "/journal/"),
    Fault("journal", "/journal", "mkdir", "ENOSPC", FOR_EVER),
    Fault("journal", "/journal/", "write", "ENOSPC", 3, 20),
    *[
        Fault("journal", "/journal/", "truncate", kind, times, phase="resume")
        for kind, times in (("EIO", 1), ("EROFS", 0))
    ],
    *_writes("journal", "/journal/", phase="resume"),
    # checkpoints, the exported model in them
    *_writes("checkpoint", "/checkpoints/", "torch"),
    *_writes("exported model", "/.step-4.part/.tmp", "torch"),
    *_syncs("checkpoint", "/checkpoints/", "torch"),
    *_renames("checkpoint", "/checkpoints/", "torch"),
    *_opens("checkpoint", "/checkpoints/", "torch"),
    *[
        Fault("checkpoint", "/checkpoints", "mkdir", kind, times, learner="torch")
        for kind, times in (("ENOSPC", 1), ("EROFS", 0))
    ],
    Fault("checkpoint", "/checkpoints/", "mmap", "ENODEV", FOR_EVER, learner="torch", phase="resume"),
    Fault("checkpoint", "/checkpoints/", "unlink", "EIO", FOR_EVER, learner="torch"),
    # weights for the generators
    *_writes("weights", SHARED, "torch", nth=2),  # the first is its owner's
    *_renames("weights", "weights-", "torch"),
    *_opens("weights", SHARED, "torch", nth=2),
    Fault("weights", SHARED, "truncate", "ENOSPC", ONCE, learner="torch"),
    Fault("weights", SHARED, "truncate", "EDQUOT", FOR_EVER, learner="torch"),
    Fault("weights", "weights-", "mmap", "ENOMEM", ONCE, learner="torch", engine="torch"),
    Fault("weights", "weights-", "mmap", "EIO", 2, 2, learner="torch", engine="torch"),
    # trajectories that are kept
    *_writes("trajectories", "/trajectories", "torch"),
    *_renames("trajectories", "/trajectories", "torch"),
    Fault("trajectories", "/trajectories", "mkdir", "EROFS", FOR_EVER, learner="torch"),
    # a critic that is pretrained
    *[
        Fault("critic", path, call, kind, times, learner="torch", command="pretrain-value")
        for path, call, kind, times in (
            ("/.critic.tmp/", "write", "ENOSPC", ONCE),
            ("/.critic.tmp/", "write", "EIO", FOR_EVER),
            ("/.critic.tmp", "rename", "EDQUOT", ONCE),
            ("/.critic.tmp", "mkdir", "EROFS", FOR_EVER),
        )
    ],
    # telemetry
    *_writes("metrics", "metrics.jsonl"),
    *_writes("metrics", "metrics.jsonl", nth=4),
    *_opens("metrics", "metrics.jsonl"),
    Fault("metrics", "metrics.jsonl", "write,truncate", "EIO", FOR_EVER, nth=4),
    *_writes("TensorBoard", "/tensorboard/"),
    *_opens("TensorBoard", "/tensorboard/"),
    Fault("TensorBoard", "/tensorboard", "mkdir", "EROFS", FOR_EVER),
    *_writes("curves", "curves.png"),
    *_opens("curves", "curves.png"),
    # the run's own facts
    *_writes("config.json", "config.json"),
    *_opens("config.json", "/r/.config.json"),
    *_renames("config.json", "/r/config.json"),
    *_writes("models.json", "models.json"),
    *_writes("starts", "/.starts", phase="resume"),
    *_renames("starts", "/.starts", phase="resume"),
    Fault("run folder", "/r", "mkdir", "ENOSPC", FOR_EVER),
    Fault("run folder", "/r", "mkdir", "EROFS", FOR_EVER),
    # logs of the processes
    *_writes("log", "/logs/"),
    *_opens("log", "/logs/"),
    Fault("log", "/logs", "mkdir", "EDQUOT", FOR_EVER),
    # locks, owners, sockets
    *_locks("lock", "/r"),
    *_locks("owner", "/.owner"),
    *_writes("owner", "owner"),
    *_renames("owner", "owner"),
    *_opens("owner", "owner"),
    *[Fault("sockets", "/sao-", "mkdir", kind, times) for kind, times in (("ENOSPC", 1), ("EROFS", 0), ("EDQUOT", 0))],
    *[Fault("sockets", "/broker", "bind", kind, times) for kind, times in (("ENOSPC", 0), ("EROFS", 0))],
]
