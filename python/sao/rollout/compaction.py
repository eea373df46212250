"""Context compaction (CompactionRL, arXiv 2607.05378, section 4.1): a rollout that outlives its window.

    h_t = (s, u, z_1..z_t), z_i = (a_i, o_i)                                                    (6)
    compact when  C - |h_t| < T, looked at when an observation has been appended                (7)
    S_t ~ pi( . | h_t + q_sum )                                                                 (8)
    h_t' = s + u_resume(S_t) + (z_(t-k+1)..z_t), k reduced if it does not fit                   (9)

The environment goes on as it is. Both texts are files: `prompts/*.txt`, or the run's own. What happens when something
does not fit is in `docs/explanation/compaction.md`; nothing that was sampled is lost or recorded twice.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from sao.config import Config
from sao.engines.base import Completion, Engine
from sao.envs.protocol import Message
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.chat import Renderer
from sao.rollout.recorder import Recorder
from sao.rollout.window import Window, joined
from sao.trajectory import Metadata

PLACE = "{summary}"


class Template(NamedTuple):
    """A text, and its name in the metadata of trajectories that were made with it."""

    name: str
    text: str

    @classmethod
    def load(cls, shipped: str, file: str | None, field_name: str) -> "Template":
        """The shipped one, or a file's; a file's name carries a digest. Raises `ConfigError`."""
        if file is None:
            return cls(
                shipped,
                (resources.files("sao.rollout") / "prompts" / f"{shipped}.txt").read_text(encoding="utf-8").strip(),
            )
        try:
            text = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{field_name}: {file}: {error}") from None
        return cls(f"{Path(file).name}#{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}", text)


def templates(config: Config) -> tuple[Template, Template]:
    """(summary request, resume message). Raises `ConfigError` when a file is missing or not usable."""
    part = config.compaction
    request = Template.load(part.prompt, part.prompt_file, "compaction.prompt_file")
    resume = Template.load(part.resume, part.resume_file, "compaction.resume_file")
    if not request.text:
        raise ConfigError(f"compaction.prompt_file: {part.prompt_file} is empty")
    if resume.text.count(PLACE) != 1:
        raise ConfigError(f"compaction.resume_file: {part.resume_file} must hold {PLACE} once")
    return request, resume


class Compactor:
    """The parts of compaction that all episodes share. request_tokens: what the summary request adds to a window.
    threshold_tokens: T of equation 7.

    Raises `ConfigError` when the lengths in `[compaction]` leave no room for the request, or a template is not usable.
    """

    def __init__(self, config: Config, renderer: Renderer, summariser: Engine | None = None) -> None:
        self.config, self.renderer, self.summariser = config.compaction, renderer, summariser
        if self.config.summariser is not None and summariser is None:
            raise ConfigError(f"compaction.summariser: {self.config.summariser}: no engine was started for it")
        self.context_tokens = config.sampling.context_tokens
        self.request, self.resume = templates(config)
        self.request_message = Message("user", self.request.text)
        self.request_tokens = self._request_tokens()
        self.threshold_tokens, faults = config.compaction_threshold(self.request_tokens)
        if faults:
            raise ConfigError("\n".join(faults))

    def _request_tokens(self) -> int:
        sizes = []
        for role in ("user", "tool"):
            before = (Message(role, "a"),)
            with suppress(EnvironmentFailure):  # a template that does not know the role
                plain = self.renderer.observation(before, None).size
                sizes.append(self.renderer.observation(joined(before, self.request_message), None).size - plain)
        if not sizes:
            raise ConfigError("compaction: the chat template takes neither a user nor a tool message after a turn")
        return max(sizes)


@dataclass
class Compaction:
    """The compactions of one episode, from its first messages on, which `window` holds."""

    shared: Compactor
    window: Window
    recorder: Recorder
    summaries: list[Completion] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = self.window.opening
        self.counts = {"rolled_back_steps": 0, "forgotten_steps": 0, "clipped_observations": 0}
        self.counts["interaction_tokens"] = self.window.ids.size

    async def observe(self, messages: Sequence[Message]) -> str | None:
        """Takes an observation and compacts if that is due. Returns why the rollout has to end here, or None.

        "compactions": one more than `max_compactions` is due; "summary_request": no room to ask for a summary;
        "empty_summary": nothing visible was written; "no_room": the summary leaves less than the threshold.
        """
        self.counts["interaction_tokens"] += self.window.observe(self._clip(messages))
        if self.window.room_tokens >= self.shared.threshold_tokens:
            return None
        if len(self.summaries) == self.shared.config.max_compactions:
            return "compactions"
        return await self._compact()

    def metadata(self) -> dict[str, Metadata]:
        """For `Trajectory.metadata`; lists are joined by commas, one entry a compaction."""
        shared = self.shared
        return {
            "compactions": len(self.summaries),
            "compaction_request": shared.request.name,
            "compaction_resume": shared.resume.name,
            "compaction_threshold_tokens": shared.threshold_tokens,
            "compaction_summariser": shared.config.summariser or "policy",
            "compaction_keeps_task_prompt": shared.config.keep_task_prompt,
            "summary_tokens": ",".join(str(summary.token_ids.size) for summary in self.summaries),
            "summary_stop_reasons": ",".join(summary.stop_reason for summary in self.summaries),
            "carried_steps": ",".join(map(str, self.carried)),
            **self.counts,
        }

    def _clip(self, messages: Sequence[Message]) -> Sequence[Message]:
        """An observation within its cap, and short enough that a summary of it can be asked for; if that is wanted."""
        shared, window = self.shared, self.window
        if not shared.config.clip:
            return messages
        size = window.behind(messages).size
        room = window.room_tokens - shared.request_tokens - shared.config.max_summary_tokens
        cap = shared.config.observation_cap_tokens
        for limit in sorted({min(cap, room), cap}):  # what the room does not allow is rolled back
            if size <= limit:
                return messages
            found = shared.renderer.cut(messages, limit, window.behind) if limit > 0 else None
            if found is not None:
                self.counts["clipped_observations"] += 1
                return found
        return messages

    async def _compact(self) -> str | None:
        shared, window = self.shared, self.window
        n_steps, most = len(window.steps), shared.config.max_summary_tokens
        for kept in range(n_steps, -1, -1):  # newest steps are rolled back until a whole summary fits behind the rest
            prompt = window.prompt(shared.request_message, kept)
            if prompt.size + most <= shared.context_tokens:
                break
        else:
            return "summary_request"
        name = f"summary-{len(self.summaries)}"
        segment = window.segment if shared.config.merge_summary and kept == n_steps else None
        completion, _ = await self.recorder.sample(prompt, most, segment, name, shared.summariser)
        self.summaries.append(completion)
        self.counts["rolled_back_steps"] += n_steps - kept
        text = shared.renderer.read(completion.token_ids, prompt).content.strip()
        if not text:
            return "empty_summary"
        opening = self._opening(text)
        for carry in range(min(shared.config.keep_steps, n_steps), -1, -1):
            if window.rebuilt_tokens(opening, carry) + shared.threshold_tokens <= shared.context_tokens:
                break
        else:
            return "no_room"
        self.carried.append(carry)
        self.counts["forgotten_steps"] += max(0, n_steps - kept - carry)
        window.rebuild(opening, carry=carry)
        return None

    def _opening(self, summary: str) -> tuple[Message, ...]:
        """System prompt and resume message; with `keep_task_prompt` the task's other messages between them."""
        resume = Message("user", self.shared.resume.text.replace(PLACE, summary))
        if self.shared.config.keep_task_prompt:
            return joined(self._first, resume)
        return (*takewhile(lambda message: message.role == "system", self._first), resume)
