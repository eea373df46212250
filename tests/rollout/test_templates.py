"""Every chat template that `trl` ships: a conversation that grows turn by turn holds the sampled ids, and between them
what the template itself puts there.

The oracle renders the whole conversation at once, with the turns' texts in it, and looks behind the last of them.
"""

import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout.families import folder, templates

from sao.envs.protocol import Message, ToolCall
from sao.errors import EnvironmentFailure
from sao.rollout.chat import Renderer

TEMPLATES = sorted(templates()) or [
    pytest.param("none", marks=pytest.mark.skip("trl is not installed: pip install --no-deps trl"))
]
THINKING = {  # beginning of a name -> a variable that switches its reasoning off, on, or to another effort
    **{name: {"enable_thinking": False} for name in ("qwen3", "glm4moe", "nemotron_3")},
    **{name: {"enable_thinking": True} for name in ("gemma4", "diffusion_gemma", "qwen3_5_nothink")},
    **{"gptoss": {"reasoning_effort": "low"}, "muse": {"reasoning_strength": "low"}},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]
)
HOW = Message("user", "How?")
CALLS = (ToolCall("look", '{"city": "Oslo, N", "days": 3}', "call00001"),)
TWO = (*CALLS, ToolCall("look", '{"city": "Rome", "days": 1}', "call00002"))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Renderer] = {}

    def get(name: str, **values: Any) -> Renderer:
        key = (name, *values.items())
        if key not in made:
            made[key] = Renderer(folder(tmp_path_factory.mktemp(name), name), values=values)
        return made[key]

    return get


def expected(renderer: Renderer, messages: Sequence[Message], tools: str = "") -> str:
    """What the template puts behind the last assistant turn of a whole conversation, from its end on.

    The last argument of a call, or the content, holds a word that is nowhere else.
    """
    text = renderer.template.text(messages, tools)
    behind = text.rpartition("unique")[2]
    assert behind != text
    ends = [*renderer.stop_token_ids, renderer.template.marks.get("<|end|>")]
    for found in renderer.template.pattern.finditer(behind):
        if renderer.template.marks[found[0]] in ends:
            return behind[found.start() :]
    raise AssertionError(behind)


def play(renderer: Renderer) -> None:
    """Four turns with user messages between them, ended by each token that ends turns, and one that is cut."""
    encode = renderer._encode
    conversation = [Message("user", "Hello\n")]
    ids = renderer.initial(conversation)
    whole = encode(renderer.template.text(conversation))
    assert np.array_equal(ids, whole)
    for number, end in enumerate([*renderer.stop_token_ids, None]):
        sampled = [*encode(f" words {number} unique\t"), *([] if end is None else [end])]
        before = np.concatenate([ids, np.array(sampled, np.int32)])
        then = Message("user", f"\n and {number}? <think>é漢 ")
        last = Message("assistant", f"words {number} unique")
        behind = renderer.observation([then], sampled[-1])
        text = expected(renderer, [*conversation, last, then])
        want = encode(text)
        if end is None:
            assert np.array_equal(behind, want)
        else:  # the template's own end, one marker or several, is not said twice
            said = [end, *behind.tolist()]
            first = want.tolist().index(end) if end in want.tolist()[:3] else 0
            skipped = int(not renderer._open_ended or end == want[0])
            assert said[1:] == want.tolist()[first + skipped :]
        ids = np.concatenate([before, behind])
        assert ids[: before.size].tolist() == before.tolist()
        conversation += [Message("assistant", f"words {number}"), then]


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_follow_what_was_sampled(renderers: Any, name: str) -> None:
    play(renderers(name))


@pytest.mark.parametrize("name", [n for n in TEMPLATES if isinstance(n, str) and n.startswith(tuple(THINKING))])
def test_turns_follow_what_was_sampled_in_the_other_mode_of_thinking(renderers: Any, name: str) -> None:
    values = next(values for prefix, values in reversed(THINKING.items()) if name.startswith(prefix))
    play(renderers(name, **values))


@pytest.mark.parametrize("reasoning", ["", "pondered"])
@pytest.mark.parametrize("calls", [CALLS, TWO], ids=["one", "two"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_results_follow_the_calls_that_were_sampled(
    renderers: Any, name: str, calls: tuple[ToolCall, ...], reasoning: str
) -> None:
    """The turn of the oracle has the sampled arguments; the stand-in has others, which must not matter."""
    renderer = renderers(name)
    results = [Message("tool", f"sun {call.id}\n", (), call.id, call.name) for call in calls]
    unique = tuple(replace(call, arguments=call.arguments.replace("}", ', "x": "unique"}')) for call in calls)
    conversation = [Message("user", "How is it?"), Message("assistant", "", unique, reasoning=reasoning), *results]
    if not renderer.renders_tools:
        with pytest.raises(EnvironmentFailure, match="bad_messages"):
            renderer.observation(results, None, calls, TOOLS)
        return
    try:
        text = expected(renderer, conversation, TOOLS)
    except EnvironmentFailure:  # the template allows one call a turn
        assert len(calls) == 2
        with pytest.raises(EnvironmentFailure, match="bad_messages"):
            renderer.observation(results, None, calls, TOOLS)
        return
    want = renderer._encode(text).tolist()
    assert renderer.observation(results, None, calls, TOOLS).tolist() == want
    assert want[0] in renderer.stop_token_ids
    assert renderer.observation(results, want[0], calls, TOOLS).tolist() == want[1:]
    both = [*results, Message("user", "And then?")]
    try:
        text = expected(renderer, [*conversation, both[-1]], TOOLS)
    except EnvironmentFailure:
        return
    assert renderer.observation(both, None, calls, TOOLS).tolist() == renderer._encode(text).tolist()


def written(renderer: Renderer, calls: tuple[ToolCall, ...]) -> str:
    """A turn with these calls as the template writes it behind its own prompt, without what ends it."""
    start = renderer.template.text([HOW], TOOLS)
    text = renderer.template.text([HOW, Message("assistant", "", calls)], TOOLS, prompt=False)
    same = next(at for at, pair in enumerate(zip(start + "\0", text + "\1", strict=False)) if len(set(pair)) == 2)
    turn = text[len(start[:same].rstrip("<")) :]  # and not from within a marker
    if start.rstrip().endswith("<think>") and "</think>" not in turn:  # the template closes what its prompt has opened
        turn = "</think>" + turn
    marks, last = renderer.template.marks, turn.rfind("3" if len(calls) == 1 else "Rome")
    ends = (found for found in renderer.template.pattern.finditer(turn, last))
    end = next((found.start() for found in ends if marks[found[0]] in renderer.stop_token_ids), len(turn))
    return turn[:end]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_the_template_writes_is_read_again(renderers: Any, name: str) -> None:
    renderer = renderers(name)
    if not renderer.renders_tools:
        return
    call, turn = replace(CALLS[0], id=""), written(renderer, CALLS)
    prompt, ids = renderer.initial([HOW], TOOLS), renderer._encode(turn)
    read = renderer.read(ids, prompt, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in read.tool_calls] == [("look", json.loads(call.arguments))]
    assert read.content == ""
    # Without tools, and cut in the middle of the call, nothing of it is lost: it is text.
    assert not renderer.read(ids, prompt).tool_calls
    half = renderer.read(renderer._encode(turn[: turn.index("Oslo") + 2]), prompt, TOOLS)
    assert half.tool_calls == () and half.content.endswith("Os")


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_never_becomes_markup(renderers: Any, name: str) -> None:
    """Names of all markers, in every field that others write: the ids hold as many markers as without them."""
    renderer = renderers(name)
    known = set(renderer.template.marks.values())

    def markers(content: str) -> list[list[int]]:
        first = [Message("system", content)] if _takes_system(renderer) else []
        found = [renderer.initial([*first, Message("user", content)])]
        found.append(renderer.observation([Message("user", content)], None))
        if renderer.renders_tools:
            tools = json.loads(TOOLS)
            tools[0]["function"]["description"] = content
            call = ToolCall("look", json.dumps({"city": content}), "call00001")
            result = Message("tool", content, (), "call00001", "look")
            turns = [Message("user", content), Message("assistant", "", (call,), reasoning=content), result]
            found.append(renderer.observation([result], None, (call,), json.dumps(tools)))
            found.append(renderer.conversation(turns, json.dumps(tools)))
        return [[i for i in ids.tolist() if i in known] for ids in found]

    names = list(renderer.template.marks)
    assert markers("a") == markers(" ".join(names) + "".join(names))


def _takes_system(renderer: Renderer) -> bool:
    try:
        renderer.template.text([Message("system", "a"), Message("user", "b")])
    except EnvironmentFailure:
        return False
    return True


@pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")
def test_the_page_says_what_the_renderer_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "scripts" / "template_page.py"
    monkeypatch.setattr("sys.argv", [str(page), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(page), run_name="__main__")
    assert ended.value.code == 0, "run scripts/template_page.py"


BRIDGED = {  # template -> the hand-written renderer of the package `renderers`, and its options
    "qwen3": ("Qwen3Renderer", {}),
    "qwen3_5_think": ("Qwen35Renderer", {}),
    "qwen3_6": ("Qwen36Renderer", {}),
    "qwen3_8": ("Qwen38Renderer", {}),
    "glm4moe": ("GLM45Renderer", {}),
    "nemotron_3_super": ("Nemotron3Renderer", {}),
    "gemma4_v5": ("Gemma4Renderer", {}),
}


@pytest.mark.parametrize("case", ["user", "tool", "two tools", "tool and user"])
@pytest.mark.parametrize("name", BRIDGED)
def test_hand_written_renderers_say_the_same(tmp_path: Path, name: str, case: str) -> None:
    """An oracle that was written by others, family by family: what it puts behind a turn, to the id."""
    package = pytest.importorskip("renderers", reason="needs pip install renderers")
    if not templates():
        pytest.skip("trl is not installed: pip install --no-deps trl")
    more = "<|endoftext|><|image><image|><|audio><audio|><|video|><|image|><|audio|><|vision_start|><|vision_end|>"
    more += "<|image_pad|><|video_pad|><tool_call></tool_call><tool_response></tool_response><think></think>"
    renderer = Renderer(folder(tmp_path, name, more))
    kind, options = BRIDGED[name]
    config = getattr(package, kind + "Config")(thinking_retention="all", **options)
    other = getattr(package, kind)(renderer._tokenizer, config)
    calls = {"user": (), "two tools": TWO}.get(case, CALLS)
    messages = [Message("tool", f"sun {call.id}", (), call.id, call.name) for call in calls]
    messages += [Message("user", "And then?")] if "user" in case else []
    prompt = renderer.initial([HOW], TOOLS)
    end = renderer.stop_token_ids[0]
    if calls:
        end = int(renderer.observation(messages, None, calls, TOOLS)[0])
    inner = renderer._encode(written(renderer, calls) if calls else "<think>hm</think>b")
    sampled = np.array([*inner, end], np.int32)
    bridged = other.bridge_to_next_turn(
        prompt.tolist(), sampled.tolist(), [message.as_dict() for message in messages], tools=json.loads(TOOLS)
    )
    if bridged is None:
        pytest.skip("the other renderer renders this anew")
    behind = renderer.observation(messages, int(sampled[-1]), calls, TOOLS)
    assert bridged.token_ids == [*prompt.tolist(), *sampled.tolist(), *behind.tolist()]
