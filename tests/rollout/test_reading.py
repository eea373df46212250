"""Turns read into content, reasoning and calls: by the folder's own format, by probing, and as text when malformed."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from agents.tool_agents import call_text
from rollout.families import folder, templates, tokenizer

from sao.envs.protocol import Message, ToolCall
from sao.rollout.chat import Renderer
from sao.rollout.reading import MOST_CALLS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}])
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + '(' + c.function.arguments | tojson + ')</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
needs_trl = pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")


def read(renderer: Renderer, text: str, prompt: str = "", tools: str = TOOLS) -> Message:
    encode = renderer._encode
    return renderer.read(encode(text), encode(prompt or "<|im_start|>assistant\n"), tools)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    path = tmp_path_factory.mktemp("chatml")
    tokenizer(CHATML + "{# <think> </think> <tool_call> #}").save_pretrained(path)
    return Renderer(path)


@pytest.mark.parametrize(
    ("written", "prompt", "content", "reasoning"),
    [
        (" the answer\n", "", " the answer\n", ""),
        ("<think>hm</think> the answer ", "", "the answer", "hm"),
        ("hm</think>\n\nb", "<|im_start|>assistant\n<think>\n", "b", "hm"),
        ("hm", "<|im_start|>assistant\n<think>\n", "", "hm"),
        ("<think>never ends", "", "", "never ends"),
        ("b", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "b", ""),
        ("b", "<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n", "b", ""),
        ("hm</think>b", "", "b", "hm"),
        ("<think>a</think>b<|im_start|>c", "", "bc", "a"),
        ("", "", "", ""),
    ],
)
def test_reasoning_is_read_apart(chatml: Renderer, written: str, prompt: str, content: str, reasoning: str) -> None:
    found = read(chatml, written, prompt)
    assert (found.content, found.reasoning, found.tool_calls) == (content, reasoning, ())


def test_text_without_markup_is_what_an_environment_sees(chatml: Renderer) -> None:
    text = ' 1 < 2\n\tè ``` { "name": 3 } '
    assert read(chatml, text + "<|im_end|>").content == chatml.decode(chatml._encode(text + "<|im_end|>")) == text


def test_calls_of_an_unknown_format_stay_text(chatml: Renderer) -> None:
    assert chatml.renders_tools and chatml.reader.calls == ""
    text = 'so <call>look({"city": "Oslo"})</call>'
    assert read(chatml, text) == Message("assistant", text)


def test_the_folders_own_format_comes_first(tmp_path: Path) -> None:
    made = tokenizer(CHATML)
    made.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call>(?P<name>\w+)\(",
                "close_pattern": r"\)</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    made.save_pretrained(tmp_path)
    renderer = Renderer(tmp_path)
    found = read(renderer, '<call>look({"city": "Oslo"})</call><|im_end|>')
    assert renderer.reader.calls == "own" and found.tool_calls == (ToolCall("look", '{"city": "Oslo"}'),)
    broken = "<call>look({city)</call><|im_end|>"
    assert read(renderer, broken) == Message("assistant", broken.removesuffix("<|im_end|>"))


GOOD = {
    "qwen3": 'so <tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen3_5_think": "so <tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "glm4moe": "so <tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
}


@needs_trl
@pytest.mark.parametrize("name", GOOD)
def test_text_before_between_and_behind_calls_is_content(tmp_path: Path, name: str) -> None:
    renderer = Renderer(folder(tmp_path, name))
    found = read(renderer, f"<think>hm</think>{GOOD[name]} and {GOOD[name]} done")
    assert found.tool_calls == (ToolCall("look", '{"city": "Oslo"}'),) * 2
    assert found.reasoning == "hm" and found.content.split() == ["so", "and", "so", "done"]


BAD = [
    '<tool_call>\n{"name": "look", "arguments": {"city": }}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"city": "Os',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"nome": "look"}\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    "<tool_call></tool_call>",
]


@needs_trl
@pytest.mark.parametrize("bad", BAD)
def test_a_malformed_call_is_text_and_nothing_of_the_turn_is_lost(tmp_path: Path, bad: str) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    for text in (bad, f"first {GOOD['qwen3']} then {bad} last"):
        found = read(renderer, f"<think>hm</think>{text}<|im_end|>")
        assert (found.content, found.tool_calls, found.reasoning) == (text.strip(), (), "hm")


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_2", "gptoss"])
def test_no_turn_takes_long_to_read_and_none_fails(tmp_path: Path, name: str) -> None:
    """Lists in lists, openings without a close, more calls than anyone makes."""
    renderer = Renderer(folder(tmp_path, name))
    call = call_text(renderer, ("look", {"city": "MARK"}))
    before, _, behind = call.partition("MARK")
    size = 50_000
    openings = "<tool_call>", "<parameter=city>", "<arg_key>city</arg_key><arg_value>", "[", '"', " ", "<think>"
    hostile = [before + opening * (size // len(opening)) for opening in openings]
    hostile += [call * (size // len(call)), call.replace('"MARK"', "[" * size), before + "x" * size + behind]
    for text in hostile:
        began = time.thread_time()
        found = read(renderer, text)
        assert time.thread_time() - began < 3 and len(found.tool_calls) <= MOST_CALLS
        for made in found.tool_calls:
            assert isinstance(json.loads(made.arguments), dict)


@needs_trl
def test_arguments_have_the_types_of_the_schema(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3_5_think"))
    city, days = (f"<parameter={name}>\n{{}}\n</parameter>\n" for name in ("city", "days"))
    call = f"<tool_call>\n<function=look>\n{city}{days}</function>\n</tool_call>"
    (found,) = read(renderer, call.format(75001, 7)).tool_calls
    assert json.loads(found.arguments) == {"city": "75001", "days": 7}
    (found,) = read(renderer, call.format(" a\nb ", "many")).tool_calls
    assert json.loads(found.arguments) == {"city": "a\nb", "days": "many"}


@needs_trl
def test_harmony_frames_every_part(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "gptoss"))
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for call in (
        'to=functions.look<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        '<|channel|>commentary to=functions.look json<|message|>{"city": "Oslo"}<|call|>',
    ):
        found = read(renderer, f"{thought} {call}", "<|start|>assistant")
        assert found == Message("assistant", "", (ToolCall("look", '{"city": "Oslo"}'),), reasoning="hm")
    said = read(renderer, f"{thought}<|channel|>final<|message|>b<|return|>", "<|start|>assistant")
    assert said == Message("assistant", "b", reasoning="hm")
    assert read(renderer, "just text", "<|start|>assistant").content == "just text"
    names = {index: name for name, index in renderer.template.marks.items()}
    assert [names[i] for i in renderer.stop_token_ids] == ["<|return|>", "<|call|>"]  # <|end|> ends a part of a turn


def test_ids_beyond_the_vocabulary_are_no_text(chatml: Renderer) -> None:
    ids = np.array([*chatml._encode("a"), chatml.vocab_size + 3], np.int32)
    assert chatml.read(ids, ids[:0]).content == "a"
