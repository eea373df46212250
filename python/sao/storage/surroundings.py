"""What a process finds around it: the variables that a program of others gets from us, and what our own need to work.

An agent's program is not ours: of our environment it gets the variables on a list, so that no key or token is among
them. Our own processes get all of it, and what libraries write to a home folder goes elsewhere where that cannot be
written.
"""

import getpass
import os
import resource
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from sao.errors import ConfigError

FOR_AGENTS: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "JAVA_HOME", "NODE_PATH", "CUDA_VISIBLE_DEVICES"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
)
"""Variables that an agent's program inherits; `*` stands for any end."""

# Where libraries write beside their work, which is in the home folder otherwise: Hugging Face, vLLM, matplotlib, W&B
# and fontconfig by XDG_*, and those that know only their own variable.
_CACHES: Final = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "TRITON_HOME": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba",
}
_FILES: Final = 1 << 16  # open files to ask for, where the limit can be raised


def inherited(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The part of an environment that an agent's program gets: `FOR_AGENTS`, and further names or patterns."""
    patterns = (*FOR_AGENTS, *more)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, one) for one in patterns)}


def open_streams() -> None:
    """Opens stdin, stdout and stderr where they were closed, or the next file to be opened would take their place; what
    an output's encoding lacks is escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open as long as we are
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def prepare() -> None:
    """Sets what this process and its children need where the system lacks it: a name of the user, a home and folders
    for caches that can be written, room for open files. Raises `ConfigError` when nothing temporary can be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry for this user, as in a container with --user
        os.environ["LOGNAME"] = os.environ["USER"] = str(os.getuid())
    temporary = temporary_folder()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - raises nothing where there is none
    if home.is_absolute() and os.access(home, os.W_OK | os.X_OK):
        return
    caches = temporary / f"sao-caches-{os.getuid()}"
    with suppress(FileExistsError):
        caches.mkdir(mode=0o700)
    status = caches.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        caches = Path(tempfile.mkdtemp(prefix="sao-caches-"))  # somebody else's
    if not home.is_absolute() or not home.is_dir():
        os.environ["HOME"] = str(caches)
    elif (kept := home / ".cache" / "huggingface").is_dir():
        os.environ.setdefault("HF_HOME", str(kept))  # what is there can be read
    for name, folder in _CACHES.items():
        os.environ.setdefault(name, str(caches / folder))


def temporary_folder() -> Path:
    """The folder for temporary files. Raises `ConfigError` where none can be written."""
    found = None
    with suppress(FileNotFoundError):
        found = Path(tempfile.gettempdir())
    asked = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    if found is None or (found == Path.cwd() and str(found) not in asked):  # the last resort of Python
        said = f"{asked[0]} and /tmp" if asked else "/tmp"
        raise ConfigError(f"TMPDIR: {said} cannot be written; set TMPDIR to a folder that can")
    return found
