"""Who said what in a segment, by the markers of many templates; texts of tokens that are parts of characters."""

from __future__ import annotations

import numpy as np
import pytest
from report.runs import TURN, tokenizer
from tokenizers import AddedToken

from sao.report.conversation import blocks
from sao.telemetry.texts import Texts
from sao.trajectory import SegmentBuilder

TEMPLATES = {  # markers, (given, sampled), what is found
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nsystem of a user<|im_end|>\n<|im_start|>assistant\n",
            "A<|im_end|>",
        ),
        ["system text", "user text", "assistant header", "assistant text!"],
    ),
    "llama": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>ipython"
            "<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "A<|eot_id|>",
        ),
        ["user text", "ipython text", "assistant header", "assistant text!"],
    ),
    "roles as markers": (
        ("<|user|>", "<|observation|>", "<|assistant|>"),
        ("<|user|>Q<|observation|>R<|assistant|>", "A"),
        ["user text", "observation text", "assistant header", "assistant text!"],
    ),
    "no markers": ((), ("Q: what?\nA:", " that"), [" text", "assistant text!"]),
}


def segment(made, *turns):
    builder = SegmentBuilder()
    for given, sampled in turns:
        builder.append_context(made.encode(given).ids)
        ids = made.encode(sampled).ids
        builder.append_sampled(ids, [-1.0] * len(ids), [(0, len(ids), 0)])
    return builder.build()


def found(made, *turns):
    texts, given = Texts(made), segment(made, *turns)
    parts = blocks(given, texts, texts.pieces(given.token_ids))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == given.n_tokens
    assert all(given.action_mask[part.start : part.stop].all() == part.sampled for part in parts)
    return [f"{part.role} {part.part}{'!' if part.sampled else ''}" for part in parts]


@pytest.mark.parametrize("name", TEMPLATES)
def test_roles_are_read_from_markers(name):
    markers, turn, expected = TEMPLATES[name]
    made = tokenizer()
    made.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    if name == "llama":
        expected = ["user text", *expected[1:]]
        assert [part for part in found(made, turn) if part != " text"] == expected
    else:
        assert found(made, turn) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>a</think>b", ["reasoning", "text"]),
        ("a</think>b", ["reasoning", "text"]),  # which the prompt has opened
        ("a<think>b", ["text", "reasoning"]),
        ("<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>", ["call", "text", "call"]),
        ("<tool_call>" * 3000, ["call"]),
        ("<think>" + "<tool_call>" * 3000, ["reasoning"]),
        ("<function=f><parameter=x>1</parameter></function>", ["call"]),
        ("[TOOL_CALLS]f[ARGS]{}", ["call"]),
        ("plain", ["text"]),
        ("<", ["text"]),
    ],
)
def test_a_turn_is_parted_into_reasoning_calls_and_text(text, parts):
    got = found(tokenizer(), (TURN, text))
    assert got == ["assistant header", *(f"assistant {part}!" for part in parts)]


def test_the_texts_of_tokens_join_to_the_whole():
    made = tokenizer()
    text = "Straße \U0001f600 中文 \U0001f468\u200d\U0001f469 e\u0301"
    ids = made.encode(text).ids
    pieces = Texts(made).pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert Texts(made).pieces(ids[:-1])[-1] == "\ufffd", "half a character"
    assert Texts().pieces(np.array([5, 17])) == ["5 ", "17 "]
