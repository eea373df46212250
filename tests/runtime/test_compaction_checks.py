"""What is wrong with `[compaction]` is found before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout.compacting import configured
from runtime.test_preflight import faults

from sao.config import Config, parse
from sao.errors import ConfigError
from sao.runtime import preflight

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "env": {"name": "lookup"},
    "sampling": {"max_response_tokens": 100, "context_tokens": 1000},
    "compaction": {"enabled": True, "observation_cap_tokens": 200, "max_summary_tokens": 300},
}


def config(**compaction: Any) -> Config:
    return parse(BASE | {"compaction": BASE["compaction"] | compaction})


def test_the_threshold_holds_a_response_an_observation_the_request_and_a_summary() -> None:
    assert config(threshold_tokens=601).compaction.threshold_tokens == 601
    with pytest.raises(ConfigError) as caught:
        config(threshold_tokens=600)
    for part in ("600 must be at least", "max_response_tokens = 100", "_cap_tokens = 200", "summary_tokens = 300"):
        assert part in str(caught.value)
    assert config(threshold_tokens=600, clip=True)
    assert config(threshold_tokens=600, enabled=False), "what is off is not checked"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"threshold_tokens": 1000}, "threshold_tokens: 1000 must be below sampling.context_tokens = 1000"),
        ({"max_summary_tokens": 900}, r"threshold_tokens: 1201 \(from the caps\) must be below"),
        ({"merge_summary": True, "train_summaries": False}, "train_summaries: false needs summaries in rows of their"),
        ({"max_compactions": 0}, "max_compactions: .*greater than or equal to 1"),
        ({"keep_steps": -1}, "keep_steps: .*greater than or equal to 0"),
        ({"prompt": "summary_v9"}, "prompt: must be 'summary_v1'"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"compaction.{message}"):
        config(**changed)


def test_the_scripted_engine_has_no_summariser() -> None:
    with pytest.raises(ConfigError, match=r"compaction.summariser: the scripted engine has no model"):
        parse(
            BASE | {"generator": {"engine": "scripted"}, "compaction": BASE["compaction"] | {"summariser": "elsewhere"}}
        )


def test_preflight_counts_the_request_with_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """Three words: 6 + 12 + 3 + 6 without the markup, which only a generator knows."""
    assert not list(preflight.compaction(configured(tiny_model, tmp_path, threshold_tokens=27)))
    (found,) = preflight.compaction(configured(tiny_model, tmp_path, threshold_tokens=26))
    assert "26 must be at least" in found and "the summary request = 3" in found
    assert not list(preflight.compaction(configured(tiny_model, tmp_path, threshold_tokens=26, clip=True)))
    (found,) = preflight.compaction(configured(tiny_model, tmp_path, context=27))
    assert "must be below sampling.context_tokens = 27" in found


def test_preflight_names_texts_and_summariser(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "resume.txt").write_text("no place for it")
    overrides = [
        "compaction.enabled=true",
        "compaction.max_summary_tokens=99",
        f"compaction.summariser='{tmp_path}/gone'",
    ]
    found = faults(run_file, *overrides, f"compaction.resume_file='{tmp_path}/resume.txt'")
    assert found[0] == f"compaction.summariser: {tmp_path}/gone is not a folder"
    assert found[1] == f"compaction.resume_file: {tmp_path}/resume.txt must hold {{summary}} once"
    assert faults(run_file, *overrides[:2], "compaction.prompt_file='/no/such'")[0].startswith(
        "compaction.prompt_file: /no/such: "
    )
