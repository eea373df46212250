"""The command line: `sao train`, `sao pretrain-value`, `sao eval`, `sao inspect`, `sao replay`, `sao doctor`, and for
more than one host `sao keys`, `sao broker`, `sao learner`, `sao generator`.

Exit codes: 0 done, 1 failed, 2 configuration or usage, 130 interrupted. Nothing heavy is imported before it is needed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sao import __version__
from sao.errors import ConfigError, Error, missing_package, printable


class Commands(TyperGroup):
    """The commands; errors that a user can mend are shown without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command."""
        from sao.storage import surroundings

        try:
            surroundings.prepare()
            return super().invoke(ctx)
        except ConfigError as error:
            for line in str(error).split("\n"):
                typer.secho(printable(f"error: {line}"), fg="red", err=True)
            raise typer.Exit(2) from None
        except Error as error:
            typer.secho(printable(f"error: {type(error).__name__}: {error}"), fg="red", err=True)
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            if (missing := missing_package(error, f"sao {ctx.invoked_subcommand}")) is None:
                raise
            typer.secho(printable(f"error: {missing}"), fg="red", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:  # nothing that a user could look at
                raise
            typer.secho(printable(f"error: {error.filename}: {error.strerror}"), fg="red", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    name="sao",
    cls=Commands,
    help="Asynchronous reinforcement learning for language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def expanded(text: str | Path) -> Path:
    """A path of the command line with `~` and `~USER` expanded, where a shell has left them (in quotes, after `=`)."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"the home folder of {text} is not known") from None


RunFile = Annotated[Path, typer.Argument(parser=expanded, metavar="RUN.toml", help="the run's configuration")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="overrides, values in TOML syntax")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check all, print configuration and commands, start nothing")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the run folder of this name")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest complete checkpoint in the run folder")]
Connect = Annotated[str, typer.Option(metavar="ENDPOINT", help="the broker: tcp://HOST:PORT")]
Keys = Annotated[
    Path | None, typer.Option(parser=expanded, metavar="DIR", help="folder of keys, where the broker uses them")
]
LocalModel = Annotated[
    Path | None, typer.Option(parser=expanded, metavar="MODEL_FOLDER", help="the model's path on this host")
]
LocalFolder = Annotated[
    Path | None, typer.Option(parser=expanded, metavar="RUN_FOLDER", help="the run's folder on this host")
]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="for the broker to answer")]


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="ray[:ADDRESS]", help="a cluster; default: this machine")
    ] = None,
) -> None:
    """Train: start broker, generators and learner here or on a cluster, and end them all when the run is over."""
    from sao import config
    from sao.runtime import train as runtime

    if overwrite and resume:
        raise ConfigError("--overwrite and --resume: the run is either replaced or goes on")
    resolved = config.load(run_file, overrides or [])
    if dry_run:
        typer.echo(runtime.describe(resolved, overwrite=overwrite, resume=resume))
    elif on is not None:
        if on.partition(":")[0] != "ray":
            raise ConfigError(f"--on: {on!r}, expected ray or ray:ADDRESS")
        from sao.runtime import ray_pool

        chosen = {"--overwrite": overwrite, "--resume": resume}
        raise typer.Exit(ray_pool.train(on, resolved, [flag for flag, given in chosen.items() if given]))
    else:
        raise typer.Exit(runtime.train(resolved, overwrite=overwrite, resume=resume))


@app.command(name="pretrain-value")
def pretrain_value(
    run_file: RunFile, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False
) -> None:
    """Train only a critic, on rollouts of the start policy, for `learner.critic_path` of a later run."""
    from sao import config
    from sao.runtime import train as runtime

    resolved = runtime.value_pretraining(config.load(run_file, overrides or []))
    if dry_run:
        typer.echo(runtime.describe(resolved, overwrite=overwrite))
    else:
        raise typer.Exit(runtime.train(resolved, overwrite=overwrite))


@app.command(name="eval")
def evaluate(
    model_folder: Annotated[Path, typer.Argument(parser=expanded, metavar="MODEL_FOLDER", help="the model to measure")],
    run_file: RunFile,
    overrides: Overrides = None,
) -> None:
    """Measure a model folder: held-out success in the run's environment, in this process."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of packages; read when those are imported
    from sao import config
    from sao.runtime import evaluate as runtime

    typer.echo(runtime.evaluate(config.load(run_file, [*(overrides or []), *_model(model_folder)])))


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(parser=expanded, metavar="RUN_OR_FILE", help="a run folder, or a recorded step of one")
    ],
    trajectory: Annotated[
        str | None, typer.Option(metavar="ID", help="one trajectory: its id, the beginning of it, or its number")
    ] = None,
    step: Annotated[int | None, typer.Option(help="recorded step; default: the newest")] = None,
    colour: Annotated[str, typer.Option(help="tokens by: mask, advantage, ratio or version")] = "mask",
) -> None:
    """Show recorded trajectories: all of a step, or one as its segments, token by token."""
    from rich.console import Console

    from sao.telemetry import inspection

    inspection.show(path, Console(), step=step, trajectory=trajectory, colour=colour)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(parser=expanded, metavar="RUN", help="folder of the run")],
) -> None:
    """Show a run that was started elsewhere as `sao train` shows it, until it ends. It only reads the folder."""
    from sao.storage.ownership import OWNER, owner
    from sao.telemetry.live import SteadyConsole
    from sao.telemetry.watch import watch as follow

    def running() -> bool:
        return (run / OWNER).exists() and owner(run) != 0

    typer.echo(follow(run, SteadyConsole(), running))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(parser=expanded, metavar="RUN...", help="folders of runs")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", parser=expanded, metavar="FILE", help="default: report.html in the run's folder, or here"
        ),
    ] = None,
    megabytes: Annotated[
        float, typer.Option("--megabytes", min=0, metavar="N", help="room for the recorded rollouts in the file")
    ] = 8,
) -> None:
    """Write a page on one run or several: curves, time, configuration and rollouts. It opens from disk in a browser."""
    from sao.report import page

    target = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    typer.echo(page.write(runs, target, room_bytes=int(megabytes * (1 << 20))))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(parser=expanded, metavar="RUN", help="folder of the run")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="a recorded step")],
) -> None:
    """Make a recorded step again, from the checkpoint before it; exit code 1 unless every bit is the same."""
    from sao.runtime import replay as runtime

    text, same = runtime.replay(run, step)
    typer.echo(text)
    raise typer.Exit(0 if same else 1)


@app.command()
def bench(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC", help="buffer, pack, advantage, wire, transport or weights; default: all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer repetitions, smaller largest sizes")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", parser=expanded, metavar="FILE", help="write rows and machine here too")
    ] = None,
) -> None:
    """Measure the parts on this machine: latency percentiles and throughput, at three sizes each."""
    from sao.measure import report

    report.show(topics or [], quick=quick, json_file=json_file)


@app.command()
def doctor(
    connect: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="ask the broker there how its run stands")
    ] = None,
    keys: Keys = None,
) -> None:
    """Show what this installation has and lacks, and remove what killed runs left behind."""
    from sao.runtime import doctor as runtime

    raise typer.Exit(0 if (runtime.show() if connect is None else runtime.show_run(connect, keys)) else 1)


@app.command(name="check-model")
def check_model(
    model_folder: Annotated[
        Path, typer.Argument(parser=expanded, metavar="MODEL_FOLDER", help="the model to look at", show_default=False)
    ],
    overrides: Overrides = None,
    run_file: Annotated[
        Path | None,
        typer.Option("--run", parser=expanded, metavar="RUN.toml", help="the run that it is for; else the defaults"),
    ] = None,
) -> None:
    """Try whether a model can be sampled from and trained here: files, template, rows, engine against learner."""
    from sao import config
    from sao.runtime import doctor, model_check

    ours = [*(overrides or []), *_model(model_folder)]
    resolved = config.load(run_file, ours) if run_file else config.parse({"env": {"name": "lookup"}}, ours)
    raise typer.Exit(0 if doctor.show_findings(model_check.findings(resolved)) else 2)


@app.command(name="keys")
def write_keys(
    folder: Annotated[Path, typer.Argument(parser=expanded, metavar="[DIR]", help="folder of the keys")] = Path("keys"),
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a generator with a key of its own; repeat it")
    ] = None,
) -> None:
    """Make CURVE keys for hosts that may join a run; keys that are there are kept."""
    from sao.transport import keys

    for path in keys.write(folder, name or []):
        typer.echo(path)
    typer.echo(f"the broker's host needs all of {folder}, a generator's broker.key, learner.key and its own secret")


@app.command()
def broker(
    target: Annotated[
        Path,
        typer.Argument(
            parser=expanded, metavar="RUN.toml|RUN_FOLDER", help="a run to begin, or the folder of one to go on with"
        ),
    ],
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run of RUN.toml, if it has begun")] = False,
) -> None:
    """Serve a run to learner and generators that are started elsewhere, to its end."""
    from sao.runtime import hosts

    raise typer.Exit(hosts.broker(target, overrides or [], overwrite=overwrite, resume=resume))


@app.command()
def learner(
    connect: Connect,
    overrides: Overrides = None,
    keys: Keys = None,
    model: LocalModel = None,
    folder: LocalFolder = None,
    resume: Resume = False,
    wait: Wait = 60.0,
) -> None:
    """Run the learner of a run whose broker is elsewhere; under torchrun, one rank of it."""
    from sao.runtime import hosts

    host = hosts.Host(connect, keys, wait, folder, [*(overrides or []), *_model(model)])
    raise typer.Exit(hosts.learner(host, resume=resume))


@app.command()
def generator(
    connect: Connect,
    name: Annotated[str, typer.Option(metavar="NAME", help="unique in the run")],
    overrides: Overrides = None,
    keys: Keys = None,
    model: LocalModel = None,
    folder: LocalFolder = None,
    wait: Wait = 60.0,
) -> None:
    """Run a generator of a run whose broker is elsewhere; more may join and leave at any time."""
    from sao.runtime import hosts

    host = hosts.Host(connect, keys, wait, folder, [*(overrides or []), *_model(model)])
    raise typer.Exit(hosts.generator(host, name))


def _model(path: Path | None) -> list[str]:
    from sao.config import toml_override

    return [] if path is None else [toml_override("model.path", str(path))]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(f"sao {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    from sao.storage import surroundings

    if sys.getfilesystemencoding() != "utf-8":  # a locale of long ago: paths and texts are UTF-8 all the same
        begin = [sys.executable, "-m", "sao.cli"]
        os.execve(begin[0], [*begin, *sys.argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
    surroundings.open_streams()
    if os.getpid() == 1:  # of a container: the kernel drops a SIGTERM that has no handler, also before a run begins
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
