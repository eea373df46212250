"""Configuration: each kind of fault is refused before anything starts, naming field, value and what was expected."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao import config
from sao.config.explain import MOVED
from sao.errors import ConfigError

MINIMAL = '[env]\nname = "e"\n[model]\npath = "m"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def faults(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides)
    return [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]


def test_defaults_are_the_values_of_the_papers(tmp_path):
    c = config.load(write(tmp_path, MINIMAL))
    assert (c.algorithm.eps_low, c.algorithm.eps_high, c.algorithm.lambda_alpha) == (0.3, 5.0, 1.5)
    assert (c.learner.critic_passes, c.learner.critic_warmup_steps) == (2, 10)
    assert (c.learner.policy_lr, c.learner.critic_lr) == (1e-6, 5e-6)
    assert c.learner.critic_frozen == "attention" and c.algorithm.skip_observations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[learner]\npolcy_lr = 1e-6", "learner.polcy_lr: unknown key; did you mean policy_lr?"),
        ("[learner]\npolicy-lr = 1e-6", "learner.policy-lr: unknown key; did you mean policy_lr?"),
        ("[learner]\nmax_lag = 2", "learner.max_lag: unknown key; it belongs to [staleness]"),
        ("[run]\nlearnr = 2", "run.learnr: unknown key"),
        ("[generator]\nengines = 4", "generator.engines: unknown key; use generator.count: a generator has one engine"),
        ("[run]\nmax_lagg = 2", "run.max_lagg: unknown key; did you mean max_lag of [staleness]?"),
        ("[learnr]\nranks = 1", "learnr: unknown section; did you mean learner?"),
        ("[run]\nsteps = 0", "run.steps: must be greater than or equal to 1 (got 0); optimizer steps"),
        ("[run]\nsteps = '3'", "run.steps: must be a valid integer (got '3')"),
        ("[run]\nsteps = true", "run.steps: must be a valid integer (got True)"),
        ("[run]\nsteps = 3.0", "run.steps: must be a valid integer (got 3.0)"),
        ("[run]\nname = '..'", "run.name: must match"),
        ("[run]\nname = 'a/b'", "run.name: must match"),
        ("[run]\ntarget_success = 1.5", "run.target_success: must be less than or equal to 1 (got 1.5)"),
        ("[sampling]\ntop_p = 0.9", "sampling.top_p: must be greater than or equal to 1 (got 0.9); must be 1"),
        ("[sampling]\ntop_k = 50", "sampling.top_k: must be 0 (got 50)"),
        (
            "[sampling]\nrepetition_penalty = 1.1",
            "sampling.repetition_penalty: must be less than or equal to 1 (got 1.1)",
        ),
        ("[sampling]\ntemperature = 0", "sampling.temperature: must be greater than 0 (got 0"),
        ("[sampling]\ntemperature = nan", "sampling.temperature: must be"),
        ("[generator]\nengine = 'sglang'", "generator.engine: must be 'torch', 'vllm' or 'scripted' (got 'sglang')"),
        ("[algorithm]\nlambda_policy = 1.5", "algorithm.lambda_policy: must be less than or equal to 1 or 'adaptive'"),
        ("[algorithm]\neps_low = 1.0", "algorithm.eps_low: must be less than 1 (got 1.0)"),
        ("[learner]\nbetas = [0.9, 1.0]", "learner.betas.1: must be less than 1 (got 1.0)"),
        ("[learner]\nranks = 0", "learner.ranks: must be greater than or equal to 1 (got 0); torchrun processes"),
        ("[transport]\nbind = 'tcp://0.0.0.0:5555'", "transport.bind: tcp://0.0.0.0:5555 is not a loopback address"),
        ("[transport]\nbind = 'tcp://*:5555'", "transport.bind: tcp://*:5555 is not a loopback address"),
        ("[transport]\nbind = 'tcp://127.0.0.1:70000'", "transport.bind: port 70000 is not in 0..65535"),
        ("[generator]\nagents_bind = '[::]:0'", "generator.agents_bind: [::] is not a loopback address"),
        ("[transport]\nheartbeat_s = 8", "transport.peer_timeout_s: 15.0 must exceed 2 * heartbeat_s = 16.0"),
        ("[learner]\ncritic_warmup_steps = 200", "learner.critic_warmup_steps: 200 leaves no policy step"),
        ("[sampling]\nmax_response_tokens = 2048", "sampling.max_response_tokens: 2048 must be below"),
        ("[learner]\nrow_tokens = 1024", "learner.row_tokens: 1024 must be at least sampling.context_tokens = 2048"),
        ("[buffer]\nmax_trajectories = 8", "buffer.max_trajectories: 8 must be at least learner.batch_trajectories"),
        ("[run]\ntarget_success = 0.9\n[eval]\nevery_steps = 0", "run.target_success: 0.9 needs held-out evaluation"),
        (
            "attention = 'flash_attention_2'",
            "model.attention: flash_attention_2 needs model.dtype = bfloat16 (got float32)",
        ),
    ],
)
def test_each_kind_of_fault_is_named(tmp_path, text, expected):
    found = faults(tmp_path, MINIMAL + text)
    assert len(found) == 1 and found[0].startswith(expected), found


def test_required_fields_are_named(tmp_path):
    found = faults(tmp_path, "[model]\n")
    assert [line.split(":")[0] for line in found] == ["model.path", "env.name"]


def test_all_faults_are_listed_at_once_also_those_that_compare_fields(tmp_path):
    text = """
    [run]
    steps = 0
    [sampling]
    max_response_tokens = 5000
    top_p = 0.5
    [transport]
    bind = "tcp://10.0.0.1:5"
    heartbeat_s = 30
    [learner]
    critic-lr = 1.0
    """
    fields = {line.split(":")[0] for line in faults(tmp_path, text)}
    assert fields == {
        "run.steps",
        "sampling.top_p",
        "learner.critic-lr",
        "model.path",
        "env.name",
        "transport.bind",
        "transport.peer_timeout_s",
        "sampling.max_response_tokens",
    }


def test_broken_toml_has_line_and_column(tmp_path):
    assert "line 2, column 9" in faults(tmp_path, "[run]\nsteps = = 3\n")[0]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        config.load(tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        config.load(binary)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2"])
def test_loopback_addresses_need_no_permission(tmp_path, host):
    text = MINIMAL + f"[transport]\nbind = 'tcp://{host}:5555'"
    assert config.load(write(tmp_path, text)).transport.bind.endswith(":5555")


def test_a_remote_address_needs_permission(tmp_path):
    text = MINIMAL + "[transport]\nbind = 'tcp://10.0.0.1:5555'\nallow_remote = true"
    assert config.load(write(tmp_path, text)).transport.allow_remote
    text = MINIMAL + "[transport]\nbind = 'tcp://10.0.0.1:5555'\nkeys = 'keys'\nweights_bind = 'tcp://*:5556'"
    assert config.load(write(tmp_path, text)).transport.keys == "keys"


def test_overrides(tmp_path):
    path = write(tmp_path, MINIMAL + "[run]\nsteps = 50\n")
    c = config.load(
        path,
        [
            "run.steps=30",
            "run.name=a1",
            "run.dir=/tmp/some where",
            "learner.policy_lr=2e-5",
            "learner.deterministic=true",
            'env.args={size=3,words=["x"]}',
            "algorithm.lambda_policy=0.9",
            "learner.betas=[0.8,0.9]",
        ],
    )
    assert (c.run.steps, c.run.name, c.run.dir) == (30, "a1", "/tmp/some where")
    assert c.learner.policy_lr == 2e-5 and c.learner.deterministic and c.learner.betas == (0.8, 0.9)
    assert c.env.args == {"size": 3, "words": ["x"]} and c.algorithm.lambda_policy == 0.9
    assert c.folder == Path("/tmp/some where/a1")


def test_a_key_of_the_run_file_can_be_unset(tmp_path):
    path = write(tmp_path, MINIMAL + "[run]\ntarget_success = 0.5\n[algorithm]\ncross_segment = 'chained'\n")
    c = config.load(path, ["run.target_success=none", "algorithm.cross_segment=none", "env.args.a=none"])
    assert c.run.target_success is None
    assert c.algorithm.cross_segment == "none" and c.env.args["a"] == "none", "words that mean something"
    (fault,) = faults(tmp_path, MINIMAL, ("run.steps=none",))
    assert "run.steps: must be a valid integer (got 'none')" in fault


def test_two_faults_of_one_field_are_both_told(tmp_path):
    text = "[generator]\ncount = 2\nagents_bind = '10.0.0.1:8000'\n"
    port, address = faults(tmp_path, MINIMAL + text)
    assert port.startswith("generator.agents_bind: port 8000 is for one generator")
    assert address.startswith("generator.agents_bind: 10.0.0.1 is not a loopback address")


def test_an_override_that_looks_like_a_date_stays_text(tmp_path):
    assert config.load(write(tmp_path, MINIMAL), ["run.name=2026-01-31"]).run.name == "2026-01-31"


@pytest.mark.parametrize("item", ["run.steps", "=3", "run.=3", ".steps=3", "run.steps.x=1"])
def test_malformed_overrides(tmp_path, item):
    text = MINIMAL + "[run]\nsteps = 50\n"
    assert item in faults(tmp_path, text, (item,))[0].replace(repr(item), item)


def test_an_override_of_an_unknown_key_is_refused(tmp_path):
    assert faults(tmp_path, MINIMAL, ("run.step=3",)) == ["run.step: unknown key; did you mean steps?"]


def test_what_is_saved_is_read_back_equal(tmp_path):
    c = config.load(write(tmp_path, MINIMAL), ["learner.betas=[0.8,0.9]", "run.target_success=0.9"])
    config.save(c, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == c
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        config.load(tmp_path / "config.json")


def test_training_and_evaluation_do_not_share_what_can_be_changed(tmp_path):
    first, second = (config.load(write(tmp_path, MINIMAL), ["eval.temperature=0"]) for _ in range(2))
    assert first.eval.temperature == 0 and first.sampling.temperature == 1
    assert first.env.args is not second.env.args
    with pytest.raises(Exception, match="frozen"):
        first.sampling.temperature = 0.0


def test_keys_that_moved_are_gone_and_what_to_use_instead_is_there():
    keys = {
        f"{name}.{key}" for name, outer in config.Config.model_fields.items() for key in outer.annotation.model_fields
    }
    for old, instead in MOVED.items():
        assert old not in keys
        assert keys & set(re.findall(r"[a-z_]+\.[a-z_]+", instead)), f"{old}: {instead!r} names no key"


def test_every_field_is_described():
    bare = [
        f"{section}.{name}"
        for section, outer in config.Config.model_fields.items()
        for name, field in outer.annotation.model_fields.items()
        if not field.description
    ]
    assert bare == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.dictionaries(st.sampled_from([*config.Config.model_fields, "other"]), JSON, max_size=5)


@given(SECTIONS)
def test_no_input_gives_anything_but_a_config_or_its_faults(data):
    try:
        parsed = config.parse(data)
    except ConfigError as error:
        assert str(error)
    else:
        json.dumps(parsed.model_dump(mode="json"))
