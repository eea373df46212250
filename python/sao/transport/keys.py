"""CURVE keys in a folder: who may listen, who may join, and as what.

`NAME.key` holds a public key, `NAME.key_secret` both keys of a pair, in the certificate format of ZeroMQ's tools. The
broker and rank 0 of the learner listen, each with its own pair. A key called `learner`, `supervisor` or `generator`
may join in that role; a key of any other name joins as the generator of that name. A host needs the public keys of
`broker` and `learner`, and its own secret; the broker needs all public keys.
"""

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from sao.errors import ConfigError, Error

log = logging.getLogger(__name__)
DOMAIN: Final = "sao"
BROKER, LEARNER, SUPERVISOR, GENERATOR, VISITOR = "broker", "learner", "supervisor", "generator", "visitor"
ALWAYS: Final = (BROKER, LEARNER, SUPERVISOR)
PUBLIC, SECRET = ".key", ".key_secret"
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The pair of one side, and of one that connects the key that the listening side must have: Z85, 40 bytes each."""

    folder: Path
    name: str
    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""


class Gate(ThreadAuthenticator):
    """Answers handshakes of all sockets of `context`: the public keys in `folder` may connect, except for the broker's.

    The folder is read at every handshake. Who is let in is known by the name of its key (`User-Id`).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        super().__init__(context, log=log)
        self._folder, self._name = folder, ""
        self.configure_curve_callback(DOMAIN, self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key may come in."""
        try:
            check_folder(self._folder)
            others = (path for path in self._folder.glob(f"*{PUBLIC}") if path.stem != BROKER)
            self._name = next((path.stem for path in others if read_public(path) == key), "")
        except Exception as error:  # who cannot be judged stays outside; the gate stays there for the others
            log.error("a handshake could not be judged, nobody is let in: %s", error)
            return False
        if not self._name:
            log.warning("a peer with a key that is not in %s is refused", self._folder)
        return bool(self._name)

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The name of the key that `callback` has just let in."""
        return self._name


def write(folder: Path, names: Iterable[str] = ()) -> list[Path]:
    """Makes the pairs that `folder` lacks and returns the files written; files that are there are kept.

    `names`: generators with a key of their own; without any, all share the pair `generator`. The folder gets mode
    0700, files 0600. Raises `ConfigError` when it is open to others or a name is not fit for a file.
    """
    names = list(names) or [GENERATOR]
    wrong = [name for name in names if not FILE_NAME.fullmatch(name) or name in ALWAYS]
    if wrong:
        raise ConfigError(f"keys: {wrong[0]!r} is no name for a generator: letters, digits, . _ - and none of {ALWAYS}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)
    written: list[Path] = []
    for name in dict.fromkeys((*ALWAYS, *names)):
        if not any((folder / f"{name}{end}").exists() for end in (PUBLIC, SECRET)):
            files = [Path(file) for file in create_certificates(folder, name)]
            for file in files:
                file.chmod(0o600)  # nobody else could enter the folder meanwhile
            written += files
    return written


def server_keys(folder: str | Path | None, endpoint: str, name: str = BROKER) -> Keys | None:
    """The keys of the listening side `name`; None where no keys are used: without a folder, and over ipc.

    Raises `ConfigError` that names the file that is missing, open or broken.
    """
    if folder is None or endpoint.startswith("ipc://"):
        return None
    folder = Path(folder)
    check_folder(folder)
    return _read_pair(folder / f"{name}{SECRET}")


def client_keys(folder: str | Path | None, endpoint: str, role: str, name: str, server: str = BROKER) -> Keys | None:
    """The keys of a connecting side: its own pair (named like itself, else like its role; visitors: any) and the
    public key of `server`. None where no keys are used: without a folder, and over ipc.

    Raises `ConfigError` that names the file that is missing, open or broken.
    """
    if folder is None or endpoint.startswith("ipc://"):
        return None
    folder = Path(folder)
    check_folder(folder)
    wanted = [name, role] if role == GENERATOR else [role]
    if role == VISITOR:
        wanted = [name, GENERATOR, SUPERVISOR, LEARNER, *(path.stem for path in sorted(folder.glob(f"*{SECRET}")))]
    for own in wanted:
        if own != BROKER and (path := folder / f"{own}{SECRET}").exists():
            return replace(_read_pair(path), server=read_public(folder / f"{server}{PUBLIC}"))
    texts = " or ".join(f"{own}{SECRET}" for own in dict.fromkeys(wanted[:2]))
    raise ConfigError(f"keys: {folder} has no {texts}: {role} {name} cannot show who it is")


def may_join(key: str, role: str, name: str) -> bool:
    """Whether the owner of a key may join in this role under this name."""
    return role == VISITOR or key == role or (role == GENERATOR and key == name)


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` unless the folder exists and only this user may enter it."""
    check_private(folder, 0o700)
    if not folder.is_dir():
        raise ConfigError(f"keys: {folder} is not a folder")


def read_public(path: Path) -> bytes:
    """The public key in a certificate file."""
    return _certificate(path)[0]


def _read_pair(path: Path) -> Keys:
    check_private(path, 0o600)
    public, secret = _certificate(path)
    if secret is None:
        raise ConfigError(f"keys: {path} holds no secret key")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"keys: {path}: the public key does not belong to the secret one")
    return Keys(path.parent, path.stem, public, secret)


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"keys: {path} cannot be read: {error}") from None
    if any(key is not None and len(key) != 40 for key in (public, secret)):
        raise ConfigError(f"keys: {path}: a key must have 40 characters")
    return public, secret


def _error(text: str) -> Error:
    return ConfigError(f"keys: {text}")


def check_private(path: Path, mode: int, error: Callable[[str], Error] = _error) -> None:
    """Raises `error` unless the file or folder belongs to this user and permits nothing beyond `mode`."""
    try:
        status = path.stat()
    except OSError as reason:
        raise error(f"{path}: {reason.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise error(f"{path} must belong to this user with mode {mode:04o}, has {stat.S_IMODE(status.st_mode):04o}")
