"""The exceptions of `sao`: one small hierarchy under `Error`.

The native core raises these same classes (see `rust/python/src/error.rs`).
"""


def printable(text: str) -> str:
    """Text from anywhere as a terminal may get it: a control character, which could move its cursor, is written out."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


class Error(Exception):
    """Base of every exception that `sao` raises on purpose."""


class ValidationError(Error, ValueError):
    """A trajectory, segment or array breaks its contract; the message names field, index and value."""


class WireError(Error, ValueError):
    """Bytes from outside are corrupt, truncated, oversized, of another version or not ours."""


class ClosedError(Error):
    """The object was closed, also while the caller was waiting on it."""


class DeadlineError(Error, TimeoutError):
    """A wait reached its deadline; the message names what was waited for and for how many seconds."""


class FullError(Error):
    """A bounded buffer has no room and its policy is to refuse."""


class LedgerError(Error):
    """A task would take an impossible step, or the token ledger does not close."""


class StorageError(Error):
    """A file that the run needs cannot be written or read; the message names the file and what the system says."""


class ConfigError(Error, ValueError):
    """The configuration is wrong; the message lists every fault with field, value and what was expected."""


class TransportError(Error):
    """A peer is unknown, gone or breaks the protocol."""


class WeightsError(Error):
    """A weight update is incomplete or its names, shapes or fingerprint differ; the old version stays."""


class EngineError(Error):
    """A generation engine failed or broke its contract (ids without log-probs, wrong lengths, ...)."""


class EnvironmentFailure(Error):
    """An environment could not be reset, stepped or scored; carries a reason code, never a reward."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class MissingPackageError(Error, ImportError):
    """A package that only an extra installs is not there; the message names the extra."""


EXTRAS = {  # what an extra of `pyproject.toml` installs, by the name under which it is imported
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "vllm": "vllm",
    "pyarrow": "envs",
    "reasoning_gym": "envs",
    "aiohttp": "agents",
    "tensorboard": "tracking",
    "matplotlib": "tracking",
    "prometheus_client": "tracking",
    "dygraphs": "tracking",
    "ray": "ray",
}


def missing_package(error: ModuleNotFoundError, what: str) -> MissingPackageError | None:
    """The error to raise in place of `error` when `what` needs a package of an extra; None for any other module."""
    package = (error.name or "").partition(".")[0]
    if (extra := EXTRAS.get(package)) is None:
        return None
    return MissingPackageError(f"{what} needs {package}, which is not installed: pip install 'sao[{extra}]'")


class LearnerError(Error):
    """Training cannot go on: too many steps skipped in a row, or ranks that do not agree."""


class CheckpointError(Error):
    """A checkpoint is incomplete, damaged, of another run, or cannot be written; the message names folder and file."""
