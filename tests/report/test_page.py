"""`sao report`: one file, opened in a real browser; every control is used, and nothing of a stranger's text runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from report import runs
from report.browser import Browser
from typer.testing import CliRunner

from sao.cli import app
from sao.errors import ConfigError, StorageError
from sao.report import course, page

TABS = ("course", "time", "config", "rollouts")
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [runs.make(folder, "first"), runs.make(folder, "second", 20, learner={"policy_lr": 1e-4})]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def written(two: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page on both runs."""
    return page.write(two, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser: Browser, written: Path) -> Iterator[Browser]:
    browser.resize(1280)
    browser.dark(False)
    browser.errors.clear()
    browser.open(written)
    yield browser
    assert browser.errors == []
    assert browser.run("document.title") == "sao report"


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)")
    return found


def choose(browser: Browser, selector: str, value: str) -> None:
    """Sets a field as a person does."""
    browser.run(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
        " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


@needs_browser
def test_curves_of_two_runs_lie_on_one_another_and_can_be_zoomed(opened: Browser) -> None:
    titles = texts(opened, "#panels h3")
    assert "success rate" in titles and "explained variance" in titles and len(titles) == 8
    assert opened.run("charts[0].plot.numRows()") == 30
    first = opened.run("charts[0].plot.getOption('labels').length")
    opened.click("#runs input")
    assert opened.run("charts[0].plot.getOption('labels').length") < first
    opened.click("#runs input")
    for axis, last in (("tokens", 30000), ("minutes", 15), ("step", 30)):
        choose(opened, "#axis", axis)
        assert opened.run("charts[0].plot.xAxisExtremes()[1]") == pytest.approx(last, rel=0.1)
    choose(opened, "#smooth", "1")
    opened.run("charts[0].plot.updateOptions({dateWindow: [5, 9]})")
    assert opened.run("charts.every(({plot}) => plot.xAxisRange()[0] === 5)"), "the others follow"
    opened.click("#unzoom")
    assert opened.run("charts[0].plot.xAxisRange()[1]") > 20
    assert any("a process was killed" in text for text in texts(opened, "#events div"))
    findings = texts(opened, ".finding")
    assert any("Does the critic learn?" in text and "0.40" in text for text in findings)
    assert any("4 agent_exit" in text for text in findings)


@needs_browser
def test_time_and_configuration_are_there(opened: Browser) -> None:
    opened.click("[data-tab=time]")
    assert texts(opened, "#strips h3") == ["learner, % of its time", "g0, % of its time"] * 2
    assert texts(opened, "#bars .row")[:3] == ["090", "1230", "shortest100"], "by lag, then by length"
    opened.click("[data-tab=config]")
    assert [text for text in texts(opened, "#keys tbody tr td:first-child")] == [
        "run.name",
        "run.steps",
        "learner.policy_lr",
    ]
    opened.click("#differences")
    assert len(texts(opened, "#keys tbody tr")) > 100


@needs_browser
def test_the_table_of_rollouts_is_filtered_and_sorted(opened: Browser) -> None:
    opened.click("[data-tab=rollouts]")
    assert texts(opened, "#count") == ["4 of 4 rollouts"]
    for selector, value, left in (("#reward-to", "0.5", 2), ("#reward-to", "", 4), ("#only-end", "turn_limit", 2)):
        choose(opened, selector, value)
        assert texts(opened, "#count") == [f"{left} of 4 rollouts"]
    choose(opened, "#only-end", "")
    names = [text.rstrip(" ▾▴") for text in texts(opened, "#table th")]
    for column, name in enumerate(names):
        seen = []
        for _ in range(2):
            opened.run(f"document.querySelectorAll('#table th button')[{column}].click()")
            seen.append(texts(opened, f"#table td:nth-child({column + 1})"))
        assert sorted(seen[0]) == sorted(seen[1]), name
        if len(set(seen[0])) == 4:
            assert seen[0] == seen[1][::-1], name
    choose(opened, "#only-step", "99")
    assert texts(opened, "#table tbody tr") == []
    choose(opened, "#only-step", "")
    choose(opened, "#of-run", "1")
    assert texts(opened, "#count") == ["4 of 4 rollouts"]


@needs_browser
def test_a_rollout_is_a_conversation_and_each_token_says_its_numbers(opened: Browser) -> None:
    opened.click("[data-tab=rollouts]")
    opened.run("[...document.querySelectorAll('#table tbody tr')].find((r) => r.cells[1].textContent === '4').click()")
    opened.until("document.querySelector('.token')")
    heads = [re.sub(r" · \d+ tokens", "", text) for text in texts(opened, ".who")]
    turn = ["policy, reasoning", "policy", "policy, tool call", "policy", "tool", "policy"]
    assert heads == ["system", "user", *turn, "system", "user", "summary, reasoning", "summary"]
    assert len(texts(opened, ".cut")) == 2
    opened.point(".block.call .token")
    said = texts(opened, "#pointer")[0]
    for part in ("value 0.25", "target 0.75", "ratio 1.01", "entropy 0.5", "version 4", "lag 2", "advantage 0.99"):
        assert part in said, said
    for name in opened.run("[...document.getElementById('colour').options].map((one) => one.value)"):
        choose(opened, "#colour", name)
        coloured = opened.run("[...document.querySelectorAll('.token')].filter((one) => one.style.background).length")
        assert (coloured > 0) == (name != "none"), name
    given, sampled = (
        opened.run(f"getComputedStyle(document.querySelector({one!r})).color") for one in (".given", ".sampled")
    )
    assert given != sampled


@needs_browser
def test_a_strangers_text_is_text(opened: Browser) -> None:
    opened.click("[data-tab=rollouts]")
    opened.run("[...document.querySelectorAll('#table tbody tr')].find((r) => r.cells[1].textContent === '2').click()")
    opened.until("document.querySelector('.token')")
    given = "".join(texts(opened, ".block.given span:not(.who)"))
    sampled = "".join(texts(opened, ".token"))
    for shown in (given, sampled):
        assert runs.HOSTILE.replace("\x00", "\x00") in shown.replace("\ufffd", "\x00")
    more = "[...document.querySelectorAll('.block button')]"
    assert opened.run(f"{more}.length") >= 1, "a long one is cut"
    opened.run(f"{more}.forEach((one) => one.click())")
    assert (
        opened.run("Math.max(...[...document.querySelectorAll('.block')].map((one) => one.textContent.length))")
        > 1_000_000
    )
    opened.click("details summary")
    assert not opened.run("document.querySelector('main img, main script')")


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(opened: Browser, dark: bool) -> None:
    opened.resize(400, 800)
    opened.dark(dark)
    for tab in TABS:
        opened.click(f"[data-tab={tab}]")
        assert opened.run("document.documentElement.scrollWidth") <= 400, tab
    opened.click("#table td")
    opened.until("document.querySelector('.token')")
    assert opened.run("document.documentElement.scrollWidth") <= 400


@needs_browser
def test_two_thousand_rollouts_are_added_as_they_are_wanted(browser: Browser, tmp_path: Path) -> None:
    run = runs.make(tmp_path, "many")
    turns = [(runs.SYSTEM + runs.TURN, runs.CALL)]
    batch = [runs.rollout(i, turns) for i in range(200)]
    for step in range(1, 11):
        runs.write_rollouts(run, step, batch)
    browser.errors.clear()
    browser.open(page.write([run], tmp_path / "report.html", room_bytes=400_000))
    browser.click("[data-tab=rollouts]")
    assert texts(browser, "#count") == ["2004 of 2004 rollouts"]
    assert len(texts(browser, "#table tbody tr")) == 200
    browser.click("#more")
    assert len(texts(browser, "#table tbody tr")) == 400
    assert "there was no room" in texts(browser, "#notes")[0]
    lacking = browser.run("DATA.runs[0].rows.findIndex((_, i) => !document.getElementById(`rollout-0-${i}`))")
    browser.run(f"show(0, {lacking})")
    browser.until("document.querySelector('#conversation .note')")
    assert browser.errors == []


def test_the_file_names_nothing_outside_of_itself(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]* src|<link|url\(|@import", text) == []
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'") and policy.count("'sha256-") == 2 and "unsafe-eval" not in policy
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: .*config\.json"):
        page.write([tmp_path], tmp_path / "report.html")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")]).exit_code != 0
    with pytest.raises(ConfigError, match="9 runs, expected 1 to 8"):
        page.write([tmp_path / str(n) for n in range(9)], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


ODD = (
    {"config.json": "[]"},
    {"config.json": '{"run": {"name": "x", "seed": NaN}}'},
    {"metrics.jsonl": '{"kind": "step", "time_s": 1}\n'},
    {"metrics.jsonl": '{"kind": "step", "time_s": 1, "step": 1, "broker/survival_decile/0": NaN}\n'},
    {"metrics.jsonl": '{"kind": "eval", "time_s": 1, "success": 1}\n'},
)


@pytest.mark.parametrize("files", ODD)
def test_what_no_run_writes_is_refused_by_name(tmp_path: Path, files: dict[str, str]) -> None:
    run = runs.make(tmp_path, "odd")
    for name, text in files.items():
        (run / name).write_text(text)
    with pytest.raises(ConfigError):
        page.write([run], tmp_path / "report.html")


def test_odd_lines_and_a_place_that_is_none_are_no_faults_of_the_run(tmp_path: Path) -> None:
    run = runs.make(tmp_path, "odd")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('7\n[]\n{"kind": "step"}\n{"kind": "step", "time_s": 5, "step": 31, "broker/lag_count/x": 1}\n{"ki')
    text = page.write([run, run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count('"name":"odd"') == 1, "a run that is named twice is one"
    with pytest.raises(StorageError, match="cannot be written"):
        page.write([run], run / "config.json" / "report.html")


def test_many_steps_are_taken_together() -> None:
    column = [float(n) for n in range(9001)]
    (thin,) = course._thinned({"x": column}).values()
    assert len(thin) == 1801 and thin[0] == 2.0 and thin[-1] == 9000.0
    assert course._thinned({"x": column[:2000]}) == {"x": column[:2000]}
    assert course._thinned({"x": [None] * 5000})["x"][0] is None


def test_the_command_writes_beside_the_run(two: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(two[0])])
    assert done.exit_code == 0 and (two[0] / "report.html").is_file()
    done = CliRunner().invoke(app, ["report", *map(str, two), "--out", str(tmp_path / "both.html"), "--megabytes", "0"])
    assert done.exit_code == 0 and "rollout-0-0" not in (tmp_path / "both.html").read_text().partition("<script>")[0]


def test_a_run_without_a_step_or_a_rollout_has_a_page(tmp_path: Path) -> None:
    run = runs.make(tmp_path, "early")
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(run / "trajectories")
    text = page.write([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no step yet" in text
