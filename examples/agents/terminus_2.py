"""Terminal-bench's agent terminus-2 as it is, in a terminal (tmux) on this machine."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from task import Task

base_url, model = os.environ["OPENAI_BASE_URL"], f"openai/{os.environ['SAO_MODEL']}"
task = Task()


class Folder(BaseEnvironment):
    """A folder of this machine. What the model runs is not shut in: on your tasks take one of harbor's containers."""

    @staticmethod
    def type() -> str:
        return "folder"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    download_file, download_dir = upload_file, upload_dir

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> ExecResult:
        hidden = {name: value for name, value in os.environ.items() if not name.endswith("_KEY")}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_shell(
            command, stdout=pipe, stderr=pipe, cwd=cwd or self.environment_dir, env=hidden | (env or {})
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)


async def main() -> None:
    """Plays an episode, and prints its reward as the last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TMUX_TMPDIR"] = name  # a server of its own, which the end of the folder ends
        (folder / "prices").write_text(f"{task.item} {task.price_of(task.item)}\n")
        place = Folder(folder, "folder", "episode", TrialPaths(folder / "logs"), EnvironmentConfig())
        agent = Terminus2(folder, model, api_base=base_url, record_terminal_session=False)
        try:
            await agent.setup(place)
            wanted = f"{task.question} The file prices says it. Write the number into the file answer."
            await agent.run(wanted, place, AgentContext())
        finally:
            await place.exec("tmux kill-server")
        answer = folder / "answer"
        print(task.reward(answer.read_text() if answer.is_file() else ""))


asyncio.run(main())
