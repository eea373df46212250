"""Reasoning in the history: kept as sampled, or left out where the template leaves it out, in a segment of its own."""

import asyncio
import datetime
from pathlib import Path
from typing import Any

import pytest
from rollout.families import templates, tokenizer
from scripted import Reply, ScriptedEngine
from tiny_model import CHATML, make_tokenizer
from tokenizers import AddedToken

from sao.agents.request import ModelCall
from sao.agents.session import AgentSession
from sao.config import parse
from sao.engines.base import Request
from sao.envs.protocol import Message, StepResult
from sao.rollout.chat import Renderer
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Termination, Trajectory

THINKS = (  # drops the reasoning of turns before the last user message, as Qwen3 does
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > last.user %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Talk:
    """Answers each turn with the next of these messages, then ends."""

    reward_range, replayable = (0.0, 1.0), True

    def __init__(self, *roles: str) -> None:
        self.roles = list(roles)

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", "start"),)

    async def step(self, text: str) -> StepResult:
        if not self.roles:
            return StepResult((), 1.0, True)
        return StepResult((Message(self.roles.pop(0), f"more {len(self.roles)}"),), None, False)

    async def close(self) -> None: ...


def configured(path: Path, /, **sections: Any) -> Any:
    values: dict[str, Any] = {
        "model": {"path": str(path)},
        "env": {"name": "recall", "max_turns": 9},
        "sampling": {"max_response_tokens": 64, "context_tokens": 512},
    }
    for name, more in sections.items():
        values[name] = {**values.get(name, {}), **more}
    return parse(values)


def thinking(path: Path) -> tuple[Path, Renderer]:
    tokenizer(THINKS).save_pretrained(path)
    return path, Renderer(path)


def speaker(renderer: Renderer) -> ScriptedEngine:
    def say(request: Request, number: int) -> Reply:
        return Reply(renderer._encode(f"<think>why {number}</think>\n\nso {number}<|im_end|>").tolist())

    return ScriptedEngine(say)


def played(path: Path, renderer: Renderer, env: Talk, /, **sections: Any) -> tuple[Trajectory, list[str]]:
    """The trajectory, and the prompts as text."""
    engine = speaker(renderer)
    recorder = Recorder(engine, renderer, configured(path, **sections), Assignment(0, 0, 1, "train"), 3)
    done = asyncio.run(run_episode(recorder, env))
    return done, [renderer._tokenizer.decode(request.prompt_ids.tolist()) for request in engine.requests]


def test_kept_reasoning_is_one_segment(tmp_path: Path) -> None:
    done, prompts = played(*thinking(tmp_path), Talk("tool", "user"))
    assert len(done.segments) == 1 and prompts[2].count("why") == 2


def test_the_template_leaves_reasoning_out_at_a_user_message_and_a_segment_begins(tmp_path: Path) -> None:
    path, renderer = thinking(tmp_path)
    done, prompts = played(path, renderer, Talk("tool", "user", "tool", "user"), model={"reasoning": "template"})
    # Tool results keep it, a user's message drops it: three segments of two, two and one turns.
    assert [text.count("<think>") for text in prompts] == [0, 1, 0, 1, 0]
    assert [segment.action_mask.sum() for segment in done.segments] == [28, 28, 14]
    assert done.metadata["reasoning_left_out"] == 2
    for segment, prompt in zip(done.segments, (prompts[1], prompts[3], prompts[4]), strict=True):
        ids = segment.token_ids.tolist()
        assert renderer._tokenizer.decode(ids).startswith(prompt)
    # What the policy saw is what a server shows it: the conversation as the template writes it.
    turns = [Message("assistant", f"so {n}", reasoning=f"why {n}") for n in range(2)]
    conversation = [Message("user", "start"), turns[0], Message("tool", "more 3"), turns[1], Message("user", "more 2")]
    assert prompts[2] == renderer.template.text(conversation)


def test_every_sampled_token_is_trained_once_in_both_modes(tmp_path: Path) -> None:
    path, renderer = thinking(tmp_path)
    for mode in ("keep", "template"):
        done, _ = played(path, renderer, Talk(*["tool", "user"] * 3), model={"reasoning": mode})
        sampled = [i for s in done.segments for i in s.token_ids[s.action_mask].tolist()]
        said = "".join(f"<think>why {n}</think>\n\nso {n}<|im_end|>" for n in range(7))
        assert renderer._tokenizer.decode(sampled) == said


def test_compaction_carries_steps_that_the_template_has_written(tmp_path: Path) -> None:
    """A window that is rebuilt from steps whose sampled ids it does not hold any more."""
    path, renderer = thinking(tmp_path)
    compaction = {"enabled": True, "keep_steps": 2, "max_summary_tokens": 40, "observation_cap_tokens": 40}
    for name, text in (("prompt_file", "sum up"), ("resume_file", "so far: {summary}")):
        (path / name).write_text(text)
        compaction[name] = str(path / name)
    done, prompts = played(
        path,
        renderer,
        Talk(*["tool", "user"] * 4),
        model={"reasoning": "template"},
        sampling={"context_tokens": 260, "max_response_tokens": 40},
        compaction=compaction,
        env={"max_turns": 20},
    )
    assert done.termination.kind == "finished" and done.metadata["compactions"] >= 1
    resumed = [text for text in prompts if "so far: so" in text]
    assert resumed and resumed[0].count("<|im_start|>tool") + resumed[0].count("<|im_start|>user") >= 3
    sampled = sum(int(segment.action_mask.sum()) for segment in done.segments)
    assert sampled == sum(
        renderer._encode(f"<think>why {n}</think>\n\nso {n}<|im_end|>").size for n in range(len(prompts))
    )


def test_agents_that_drop_reasoning_get_what_the_template_shows(tmp_path: Path) -> None:
    path, renderer = thinking(tmp_path)

    async def talk(mode: str) -> tuple[Trajectory, list[str]]:
        engine = speaker(renderer)
        config = configured(path, model={"reasoning": mode}, env={"name": "agent", "args": {"command": ["true"]}})
        session = AgentSession(Recorder(engine, renderer, config, Assignment(0, 0, 1, "train"), 3), (0.0, 1.0))
        messages: tuple[Message, ...] = (Message("user", "start"),)
        for role in ("tool", "user", "tool", "end"):
            said = await session.complete(ModelCall(messages))
            messages += (Message("assistant", said.text), Message(role, "more"))
        prompts = [renderer._tokenizer.decode(request.prompt_ids.tolist()) for request in engine.requests]
        return session.trajectory(Termination("truncated", "max_turns"), 0.0), prompts

    done, prompts = asyncio.run(talk("keep"))
    assert len(done.segments) == 1 and [text.count("<think>") for text in prompts] == [0, 1, 2, 3]
    done, prompts = asyncio.run(talk("template"))
    assert [text.count("<think>") for text in prompts] == [0, 1, 0, 1] and len(done.segments) == 2
    assert done.metadata["agent_rewritten"] == 0


# -- summaries

OPENS = CHATML.replace(
    "'\n' + message['content']", "'\n' + ('<think>' if message['role'] == 'assistant' else '') + message['content']"
)
OPENS = OPENS.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize(
    ("template", "turn", "summary"),
    [(OPENS, "r </think> b", "r </think> h g"), (CHATML, "b", "<think> r </think> h g")],
    ids=["opened by the template", "opened by the policy"],
)
def test_of_a_summary_what_stands_behind_its_reasoning_goes_on(
    tmp_path: Path, template: str, turn: str, summary: str, special: bool
) -> None:
    made = make_tokenizer(template)
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text in ("<think>", "</think>")])
    made.save_pretrained(tmp_path)
    renderer, ids = Renderer(tmp_path), made.get_vocab()
    (tmp_path / "request").write_text("s u m")
    (tmp_path / "resume").write_text("k {summary} z")
    config = configured(
        tmp_path,
        sampling={"max_response_tokens": 8, "context_tokens": 96},
        compaction={
            **{"enabled": True, "keep_steps": 0, "max_summary_tokens": 12, "observation_cap_tokens": 24},
            **{"prompt_file": str(tmp_path / "request"), "resume_file": str(tmp_path / "resume")},
        },
    )
    asked: list[list[int]] = []

    def say(request: Request, number: int) -> Reply:
        asked.append(request.prompt_ids.tolist())
        words = summary if "summary" in request.id else turn
        return Reply([ids[word] for word in [*words.split(), "<|im_end|>"]])

    class Long(Talk):
        async def step(self, text: str) -> StepResult:
            self.roles.append("tool")
            if len(self.roles) == 6:
                return StepResult((), 1.0, True)
            return StepResult((Message("tool", "0 1 2 3 4 5 6 7 8 9"),), None, False)

    recorder = Recorder(ScriptedEngine(say), renderer, config, Assignment(0, 0, 1, "train"), 3)
    done = asyncio.run(run_episode(recorder, Long()))
    assert done.termination.kind == "finished" and done.metadata["compactions"]
    resumed = [made.convert_ids_to_tokens(window) for window in asked if ids["k"] in window]
    assert resumed and all(words[words.index("k") + 1 : words.index("z")] == ["h", "g"] for words in resumed)


# -- the clock, and variables

CLOCK = "<|im_start|>system\n{{ strftime_now('%d %H') }}<|im_end|>\n" + CHATML


def test_the_clock_of_a_template_stands_still(tmp_path: Path) -> None:
    make_tokenizer(CLOCK).save_pretrained(tmp_path)
    first = Renderer(tmp_path, date=datetime.date(2026, 11, 30))
    assert "\n30 00<|im_end|>" in first.template.text([Message("user", "a")])
    later, plain = Renderer(tmp_path, date=datetime.date(2026, 12, 1)), [Message("user", "a")]
    assert first.observation(plain, None).tolist() == later.observation(plain, None).tolist()
    today = datetime.date.today().strftime("%d")
    assert f"\n{today} 00" in Renderer(tmp_path).template.text(plain)


def test_a_template_of_its_own_and_variables(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text(CHATML + "{% if deep %}{{ 'd e e p' }}{% endif %}")
    model = configured(
        tmp_path, model={"chat_template": str(tmp_path / "own.jinja"), "chat_template_kwargs": {"deep": True}}
    )
    text = Renderer.of(model.model).template.text([Message("user", "a")])
    assert text.endswith("<|im_start|>assistant\nd e e p")


@pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")
def test_a_variable_switches_thinking_off(tmp_path: Path) -> None:
    from rollout.families import folder

    path = folder(tmp_path, "qwen3")
    on, off = Renderer(path), Renderer(path, values={"enable_thinking": False})
    head = [renderer.template.text([Message("user", "a")]) for renderer in (on, off)]
    assert "<think>" not in head[0] and head[1].endswith("<think>\n\n</think>\n\n")
