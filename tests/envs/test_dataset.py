"""`dataset`: rows from every kind of file, splits, rewards of functions and commands, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sao.envs import registry
from sao.envs.protocol import Message
from sao.errors import ConfigError, EnvironmentFailure

ROWS = [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(200)]
ROOT = Path(__file__).parents[2]


def right(answer: str, row: dict[str, Any]) -> float:
    return float(answer == row["answer"])


async def later(answer: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return right(answer, row)


def raises(answer: str, row: dict[str, Any]) -> float:
    raise ZeroDivisionError("oh")


def leaves(answer: str, row: dict[str, Any]) -> float:
    raise SystemExit(3)


async def leaves_later(answer: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    raise SystemExit(3)


async def never(answer: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(60)
    return 0.0


def no_number(answer: str, row: dict[str, Any]) -> Any:
    return {"nan": float("nan"), "text": "1", "large": 2.0, "none": None}[answer]


def one_argument(answer: str) -> float:
    return 0.0


def lines(path: Path, rows: Any = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def make(path: Path, reward: Any = f"{__name__}:right", **args: Any) -> Any:
    return registry.make("dataset", path=str(path), reward=reward, **args)


def play(env: Any, seed: int, answer: str | None = None, split: str = "train") -> tuple[Any, float]:
    async def main() -> tuple[Any, float]:
        first = await env.reset(seed, split)
        wanted = first[-1].content.removeprefix("what is ").removesuffix("?") if answer is None else answer
        result = await env.act(Message("assistant", wanted, reasoning="hm"))
        assert result.done
        return first, result.reward

    return asyncio.run(main())


def written(folder: Path, kind: str) -> Path:
    if kind == "jsonl":
        return lines(folder / "rows.jsonl")
    if kind == "json":
        (folder / "rows.json").write_text(json.dumps(ROWS))
        return folder / "rows.json"
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    (folder / "dataset_info.json").write_text("{}")
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        (folder / "data").mkdir()
        parquet.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
        parquet.write_table(table.slice(0, 5), folder / "data" / "test-00000-of-00001.parquet")
    else:
        for split, rows in (("train", table), ("test", table.slice(0, 5))):
            (folder / split).mkdir()
            with pyarrow.ipc.new_stream(folder / split / "data-00000-of-00001.arrow", table.schema) as file:
                file.write_table(rows)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_rows_of_every_kind_are_played(tmp_path: Path, kind: str) -> None:
    env = make(written(tmp_path, kind))
    found = {seed: play(env, seed) for seed in range(30)}
    assert all(reward == 1.0 for _, reward in found.values())
    assert len({first for first, _ in found.values()}) > 20 and play(env, 3) == found[3]
    assert play(env, 3, "wrong")[1] == 0.0
    held_out = {play(env, seed, split="eval")[0] for seed in range(200)}
    trained = {play(env, seed)[0] for seed in range(300)}
    if kind in ("jsonl", "json"):
        assert 5 < len(held_out) < 60 and not held_out & trained
    else:
        assert len(held_out) == 5  # those of the files that are held out


def test_prompts_may_be_messages_and_have_a_system_message(tmp_path: Path) -> None:
    rows = [
        {
            "q": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        }
    ]
    env = make(
        lines(tmp_path / "x.jsonl", rows), prompt="q", system="s", eval_path=str(lines(tmp_path / "y.jsonl", rows))
    )
    first = asyncio.run(env.reset(0, "train"))
    assert [(message.role, message.content) for message in first] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_rewards_of_async_functions_and_of_commands(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl")
    assert play(make(path, f"{__name__}:later"), 0)[1] == 1.0
    program = tmp_path / "grade.py"
    program.write_text(
        "import json, sys\ngiven = json.load(sys.stdin)\nprint('grading')\n"
        "print(float(given['answer'] == given['row']['answer']))\n"
    )
    env = make(path, [sys.executable, str(program)])
    assert play(env, 0)[1] == 1.0 and play(env, 0, "no")[1] == 0.0


@pytest.mark.parametrize(
    ("reward", "answer", "reason"),
    [
        (f"{__name__}:raises", "x", "scorer_error"),
        (f"{__name__}:no_number", "nan", "bad_reward"),
        (f"{__name__}:no_number", "text", "bad_reward"),
        (f"{__name__}:no_number", "large", "bad_reward"),
        (f"{__name__}:no_number", "none", "bad_reward"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "x", "scorer_error"),
        (f"{sys.executable} -c 'print(\"well\")'", "x", "scorer_error"),
        (f"{sys.executable} -c 'print(\"nan\")'", "x", "bad_reward"),
        (f"{sys.executable} -c 'import time; time.sleep(60)'", "x", "timeout"),
        (["sh", "-c", "sleep 60 & sleep 60"], "x", "timeout"),
        (f"{__name__}:leaves", "x", "scorer_error"),
        (f"{__name__}:leaves_later", "x", "scorer_error"),
        (f"{__name__}:never", "x", "timeout"),
    ],
)
def test_a_reward_that_fails_is_a_failure(tmp_path: Path, reward: str, answer: str, reason: str) -> None:
    env = make(lines(tmp_path / "x.jsonl"), reward, timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        play(env, 0, answer)
    assert caught.value.reason == reason
    assert time.monotonic() - began < 20, "what a command has started does not hold it up"


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ('{"prompt": "a"}\nnonsense\n', {}, r"rows.jsonl, row 2: not JSON"),
        ("[1]\n", {}, r"row 1: \[1\], expected an object"),
        ('{"question": "a"}\n', {}, "row 1: no field 'prompt'; it has question"),
        ('{"prompt": 3}\n', {}, "row 1: 3, expected text or a list of messages"),
        ('{"prompt": [{"role": "robot", "content": "a"}]}\n', {}, "row 1: .*expected a Message of role"),
        ('{"prompt": [{"content": "a"}]}\n', {}, "row 1: .*expected a Message of role"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", {}, "row 1: not JSON"),
        ('{"prompt": " "}\n', {}, "row 1: its last message is empty"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}\n', {}, "row 1: its last message is of the assistant"),
        ("", {}, "no rows to train on"),
        ('{"prompt": "a"}\n', {"reward": "no_such_module:f"}, "reward: 'no_such_module:f' does not import"),
        ('{"prompt": "a"}\n', {"reward": f"{__name__}:nothing"}, "does not import: AttributeError"),
        ('{"prompt": "a"}\n', {"reward": f"{__name__}:one_argument"}, "expected a function of .answer, row."),
        ('{"prompt": "a"}\n', {"reward": "no-such-program x"}, "neither 'module:function' nor a program"),
        ('{"prompt": "a"}\n', {"reward_range": [1]}, "reward_range: .1., expected two numbers"),
        ("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)), {"reward_range": [1, 0]}, "expected low < high"),
        ('{"prompt": "a"}\n', {"reward_range": 5}, "reward_range: 5, expected two numbers"),
        ('{"prompt": "a"}\n', {"reward_range": "01"}, "reward_range: '01', expected two numbers"),
        ('{"prompt": "a"}\n', {"reward": 5}, "reward: 5, expected 'module:function', a command"),
        ('{"prompt": "a"}\n', {"reward": [5]}, "reward: .5., expected 'module:function', a command"),
        ('{"prompt": "a"}\n', {"system": 5}, "system: 5, expected text"),
        ('{"prompt": "a"}\n', {"timeout_s": 0}, "timeout_s: 0"),
        ('{"prompt": "a"}\n', {}, "1 rows are too few to hold some out; give eval_path"),
        ('{"prompt": "a"}\n', {"reward": "unbalanced 'quote"}, "reward: .*No closing quotation"),
        ('{"prompt": "a"}\n', {"reward": ":f"}, "':f' does not import"),
        ('{"prompt": "a"}\n', {"reward": ".x:f"}, "'.x:f' does not import"),
        ('{"prompt": "a"}\n', {"eval_path": "/nowhere"}, "eval_path: /nowhere: not there"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, args: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make(path, **args)


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError", "TypeError"])
def test_a_module_that_fails_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / f"fails_{error}.py").write_text(f"raise {error}('oh')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"does not import: {error}: oh"):
        make(lines(tmp_path / "x.jsonl"), f"fails_{error}:f")


def test_files_beside_the_rows_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "more.json").mkdir()
    for name in (".cache/x.jsonl", "tokenizer_config.json", "config.json", "cache-1.arrow", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert play(make(tmp_path), 0)[1] == 1.0
    with pytest.raises(ConfigError, match=r"path: 3, expected a path"):
        registry.make("dataset", path=3, reward=f"{__name__}:right")


def test_one_row_in_a_json_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(ROWS[3], indent=1))
    lines(tmp_path / "test.jsonl")
    assert play(make(tmp_path), 0)[0][0].content == ROWS[3]["prompt"]


def test_damaged_tables_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such files in it"):
        make(tmp_path)
    pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"x.parquet: not readable"):
        make(tmp_path)


def test_the_readme_shows_the_files_of_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, language in (("run.toml", "toml"), ("reward.py", "python")):
        assert f"```{language}\n{(ROOT / 'examples' / 'dataset' / name).read_text()}```" in readme
