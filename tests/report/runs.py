"""Made-up runs in folders, as real ones leave them: records, recorded steps, a tokenizer of bytes and turn markers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from telemetry import records
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sao.config import save
from sao.telemetry.recording import write_step
from sao.telemetry.sinks import JsonLines, record
from sao.trajectory import SegmentBuilder, Termination, Trajectory, encode_frames

MARKERS = ("<|im_start|>", "<|im_end|>")
HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"> \x1b[31mred\x1b[0m \x00 "
    "</script><!-- ]]> {{policy}} $& \u202eback\u202c \U0001f600"
)
SYSTEM = "<|im_start|>system\nYou may call tools.<|im_end|>\n<|im_start|>user\nWhat does a pear cost?<|im_end|>\n"
TURN = "<|im_start|>assistant\n"
CALL = "<think>\nI look it up.\n</think>\n"
CALL += '<tool_call>\n{"name": "price", "arguments": {"of": "pear"}}\n</tool_call><|im_end|>'
RESULT = "\n<|im_start|>tool\n3 crowns<|im_end|>\n"


def tokenizer() -> Tokenizer:
    """Bytes and two markers: every text has ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return made


_TOKENIZER = tokenizer()


def rollout(ordinal: int, texts: list[tuple[str, str]], *, reward: float = 1.0, summary: str = "") -> Trajectory:
    """texts: (given, sampled) of each turn of the first segment; summary: of a second one."""
    made, segments = _TOKENIZER, []
    for kind, turns in (("execution", texts), ("summary", [(SYSTEM + TURN, summary)] if summary else [])):
        builder = SegmentBuilder(kind)
        for given, sampled in turns:
            builder.append_context(made.encode(given).ids)
            ids = made.encode(sampled).ids
            builder.append_sampled(ids, [-0.1] * len(ids), [(0, len(ids), ordinal % 5)])
        if turns:
            segments.append(builder.build())
    end = Termination("finished") if reward else Termination("truncated", "turn_limit")
    return Trajectory(
        id=ordinal.to_bytes(16, "big"),
        task_ordinal=ordinal,
        attempt=0,
        env="shop",
        segments=tuple(segments),
        reward=reward,
        termination=end,
        temperature=1.0,
        fingerprints={ordinal % 5: "0" * 32},
        timings_s={"generate": 1.0, "step": 0.5, "reset": 0.1},
        metadata={"drift": 0, "note": HOSTILE},
    )


def write_rollouts(folder: Path, step: int, rollouts: list[Trajectory]) -> None:
    """A recorded step of these, all of whose numbers can be told apart."""
    sizes = [segment.n_tokens for one in rollouts for segment in one.segments]
    mask = np.concatenate([segment.action_mask for one in rollouts for segment in one.segments])
    logprobs = np.concatenate([segment.logprobs for one in rollouts for segment in one.segments])
    n = len(mask)
    arrays = {
        "advantages": np.where(mask, np.linspace(-1, 1, n), 0).astype(np.float32),
        "values": np.where(mask, 0.25, 0).astype(np.float32),
        "targets": np.where(mask, 0.75, 0).astype(np.float32),
        "logprobs": (logprobs + np.float32(0.01)).astype(np.float32),
        "entropies": np.where(mask, 0.5, np.nan).astype(np.float32),
        "rollout_logprobs": logprobs,
        "lags": np.where(mask, 2, -1).astype(np.int32),
        "segment_offsets": np.concatenate([[0], np.cumsum(sizes)]),
        "trajectory_offsets": np.concatenate([[0], np.cumsum([len(one.segments) for one in rollouts])]),
    }
    frames = [frame for one in rollouts for frame in encode_frames(one)]
    write_step(folder / "trajectories", step, frames, arrays, {"compaction": {"train_summaries": True}})


def make(folder: Path, name: str, steps: int = 30, **settings: object) -> Path:
    """A run of this name with events, evaluations and four recorded rollouts: plain, hostile, cut short, compacted."""
    run, model = folder / name, folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    _TOKENIZER.save(str(model / "tokenizer.json"))
    run.mkdir()
    config = records.config(model={"path": str(model)}, run={"name": name, "steps": steps}, **settings)
    save(config, run / "config.json")
    sink = JsonLines(run / "metrics.jsonl")
    more = {
        "broker/tokens_sampled": 1000,
        "broker/lag_count/0": 3,
        "broker/lag_count/12": 1,
        "broker/busy_share/g0": 0.9,
    }
    more |= {"time/step_s": 1.5, "time/critic_s": 0.7, "time/policy_s": 0.5, "time/wait_s": 0.3}
    more |= {f"broker/survival_decile/{tenth}": 1 - tenth / 20 for tenth in range(10)}
    more |= {"broker/rollouts_dropped/agent_exit": 4, "broker/trained": 128 * steps}
    for happened in records.run(steps):
        if happened["kind"] == "step":
            at = happened["step"]
            sink.write({**happened, **more, "broker/tokens_sampled": 1000 * at, "time_s": happened["time_s"] + 30 * at})
        else:
            sink.write(happened)
        if happened.get("step") == 7:
            sink.write(record("event", {"level": "warning", "text": f"a process was killed {HOSTILE}"}))
    sink.write(
        record("end", {"exit_code": 0, "reason": "all steps done"}) | {"time_s": happened["time_s"] + 31 * steps}
    )
    sink.close()
    turns = [(SYSTEM + TURN, CALL), (RESULT + TURN, "It costs 3 crowns.<|im_end|>")]
    write_rollouts(
        run,
        steps,
        [
            rollout(1, turns),
            rollout(
                2,
                [(f"<|im_start|>user\n{HOSTILE}<|im_end|>\n{TURN}", HOSTILE), ("y" * (1 << 20) + RESULT + TURN, "no")],
                reward=0.0,
            ),
            rollout(3, turns[:1], reward=0.0),
            rollout(4, turns, summary="<think>short</think>A pear costs 3 crowns."),
        ],
    )
    return run
