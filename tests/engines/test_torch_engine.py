"""The torch engine against a plain forward pass of the same model, and under everything that happens to it in a run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import make_folder, make_model

from sao.engines import decoder
from sao.engines.base import Completion, Request
from sao.engines.torch_engine import TorchEngine, load_model
from sao.errors import ClosedError, ConfigError, EngineError, WeightsError
from sao.rollout.recorder import check_completion
from sao.transport.weights import WeightsRef, publish

TOLERANCE = 1e-4


def request(session: str, prompt: np.ndarray, new: int = 8, *, id: str | None = None, **more: object) -> Request:
    values: dict = {"temperature": 1.0, "stop_token_ids": (), "seed": None} | more
    return Request(id or f"{session}/{prompt.size}", session, prompt.astype(np.int32), new, **values)


def reference(model: torch.nn.Module, prompt: np.ndarray, completion: Completion, temperature: float) -> np.ndarray:
    """Log-probs of the completion by one plain forward pass over everything, without any cache."""
    ids = np.concatenate([prompt, completion.token_ids]).astype(np.int64)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits / (temperature or 1.0), -1)
    at = np.arange(prompt.size - 1, ids.size - 1)
    return scores[at, ids[prompt.size :]].numpy()


def compare(models: dict[int, torch.nn.Module], asked: Request, completion: Completion) -> float:
    """Largest difference over the tokens, each against the weights of its own version."""
    check_completion(asked, completion)
    worst = 0.0
    for start, stop, version in completion.version_spans.tolist():
        expected = reference(models[version], asked.prompt_ids, completion, asked.temperature)
        worst = max(worst, float(np.abs(expected - completion.logprobs)[start:stop].max()))
    return worst


async def started(folder: Path, slots: int = 4, context: int = 64, seed: int = 7) -> TorchEngine:
    engine = TorchEngine(folder, slots=slots, context_tokens=context, seed=seed)
    await engine.start()
    return engine


def prompts(rng: np.random.Generator, n: int, low: int, high: int) -> list[np.ndarray]:
    return [rng.integers(3, 48, int(rng.integers(low, high))).astype(np.int32) for _ in range(n)]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_logprobs_match_a_plain_forward_pass_over_many_turns_and_reused_slots(tmp_path: Path, heads: int) -> None:
    folder = make_folder(tmp_path, num_key_value_heads=heads)
    models = {0: load_model(folder)}
    rng = np.random.default_rng(heads)

    async def episode(engine: TorchEngine, name: str, prompt: np.ndarray, temperature: float) -> list:
        seen = []
        for turn in range(4):
            asked = request(name, prompt, int(rng.integers(1, 9)), id=f"{name}/{turn}", temperature=temperature)
            completion = await engine.generate(asked)
            seen.append((asked, completion))
            observation = rng.integers(3, 48, int(rng.integers(1, 6))).astype(np.int32)
            prompt = np.concatenate([prompt, completion.token_ids, observation])
        await engine.release(name)
        return seen

    async def main() -> list:
        engine = await started(folder, slots=5)
        begun = [
            episode(engine, f"s{i}", prompt, temperature)
            for i, (prompt, temperature) in enumerate(
                zip(prompts(rng, 16, 1, 12), [1.0, 0.5, 2.0, 0.0] * 4, strict=True)
            )
        ]
        seen = [pair for pairs in await asyncio.gather(*begun) for pair in pairs]
        stats = engine.stats()
        await engine.close()
        assert stats.sampled_tokens == sum(completion.token_ids.size for _, completion in seen)
        assert stats.running == stats.waiting == 0 and stats.busy_s > 0
        return seen

    seen = asyncio.run(main())
    assert len(seen) == 64
    assert max(compare(models, *pair) for pair in seen) < TOLERANCE
    assert all(completion.stop_reason == "length" for _, completion in seen)


def test_a_turn_that_does_not_extend_the_cached_ids_is_computed_anew_from_where_it_differs(tiny_model: Path) -> None:
    models = {0: load_model(tiny_model)}

    async def main() -> float:
        engine = await started(tiny_model)
        prompt = np.arange(3, 20, dtype=np.int32)
        first = request("s", prompt, id="1")
        changed = prompt.copy()
        changed[5] = 40
        pairs = [(asked, await engine.generate(asked)) for asked in (first, request("s", changed, id="2"))]
        shorter = request("s", prompt[:4], id="3")
        pairs.append((shorter, await engine.generate(shorter)))
        await engine.close()
        return max(compare(models, *pair) for pair in pairs)

    assert asyncio.run(main()) < TOLERANCE


def test_weights_change_in_flight_and_each_token_is_of_the_version_it_carries(tiny_model: Path, tmp_path: Path) -> None:
    models = {0: load_model(tiny_model), 1: make_model(1), 2: make_model(2)}
    refs = [publish(dict(models[v].named_parameters()), tmp_path, v) for v in (1, 2)]
    rng = np.random.default_rng(0)

    async def main() -> list[tuple[Request, Completion]]:
        engine = await started(tiny_model, slots=6, context=256)
        # Turn one under version 0, so that sessions hold keys of old weights when version 1 comes.
        first = [request(f"s{i}", prompt, 4, id=f"a{i}") for i, prompt in enumerate(prompts(rng, 6, 2, 20))]
        done = await asyncio.gather(*(engine.generate(asked) for asked in first))
        second = [
            request(asked.session, np.concatenate([asked.prompt_ids, completion.token_ids]), 150, id=f"b{i}")
            for i, (asked, completion) in enumerate(zip(first, done, strict=True))
        ]
        running = [asyncio.ensure_future(engine.generate(asked)) for asked in second]
        for ref in refs:
            before = engine.stats().sampled_tokens
            while engine.stats().sampled_tokens < before + 60:
                await asyncio.sleep(0.001)
            await engine.update_weights(ref)
            assert (engine.version, engine.fingerprint) == (ref.version, ref.fingerprint)
        pairs = list(zip([*first, *second], [*done, *await asyncio.gather(*running)], strict=True))
        await engine.close()
        return pairs

    pairs = asyncio.run(main())
    assert max(compare(models, *pair) for pair in pairs) < TOLERANCE
    long = [completion for asked, completion in pairs if asked.id.startswith("b")]
    assert all(completion.version_spans[:, 2].tolist() == [0, 1, 2] for completion in long)
    assert all(completion.fingerprints[2] == refs[1].fingerprint for completion in long)
    # The versions really differ: scored under another version the tokens do not fit.
    asked, completion = pairs[-1]
    wrong = reference(models[0], asked.prompt_ids, completion, 1.0)
    assert np.abs(wrong - completion.logprobs).max() > 0.1


def test_a_shared_prefix_is_never_read_across_twenty_updates(tiny_model: Path, tmp_path: Path) -> None:
    prompt = np.arange(3, 30, dtype=np.int32)

    async def main() -> float:
        engine = await started(tiny_model, slots=2)
        worst = 0.0
        for version in range(1, 21):
            model = make_model(version)
            await engine.update_weights(publish(dict(model.named_parameters()), tmp_path, version))
            asked = request("same", prompt, 3, id=str(version))
            worst = max(worst, compare({version: model}, asked, await engine.generate(asked)))
        await engine.close()
        return worst

    assert asyncio.run(main()) < TOLERANCE


def test_requests_that_come_while_weights_change_are_all_served_and_hold_up_no_update(
    tiny_model: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    models = {version: make_model(seed=version + 1) for version in range(1, 13)}
    refs = [publish(dict(model.named_parameters()), tmp_path, version, keep=20) for version, model in models.items()]
    models[0] = load_model(tiny_model)

    async def ask(engine: TorchEngine, name: str, prompt: np.ndarray) -> tuple[Request, Completion]:
        await asyncio.sleep(float(rng.random()) * 0.004)
        asked = request(name, prompt, 4)
        completion = await engine.generate(asked)
        await engine.release(name)
        return asked, completion

    async def main() -> list[tuple[Request, Completion]]:
        engine = await started(tiny_model)
        pairs = []
        for ref in refs:
            begun = [ask(engine, f"{ref.version}/{i}", prompt) for i, prompt in enumerate(prompts(rng, 6, 2, 9))]
            _, *answers = await asyncio.wait_for(asyncio.gather(engine.update_weights(ref), *begun), 30)
            assert engine.version == ref.version
            # On a busy machine all six may have ended before the weights changed; this one comes after it.
            pairs += [*answers, await ask(engine, f"{ref.version}/after", prompts(rng, 1, 2, 9)[0])]
        await engine.close()
        return pairs

    pairs = asyncio.run(main())
    assert len(pairs) == 84
    assert {span[2] for _, done in pairs for span in done.version_spans.tolist()} >= set(range(1, 13))
    assert max(compare(models, *pair) for pair in pairs) < TOLERANCE


def test_long_prompts_are_prefilled_in_parts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 64)
    models = {0: load_model(tiny_model)}
    rng = np.random.default_rng(3)

    async def main() -> float:
        engine = await started(tiny_model, slots=8, context=400)
        asked = [request(f"s{i}", prompt, 5) for i, prompt in enumerate(prompts(rng, 12, 1, 380))]
        done = await asyncio.gather(*(engine.generate(one) for one in asked))
        await engine.close()
        return max(compare(models, *pair) for pair in zip(asked, done, strict=True))

    assert asyncio.run(main()) < TOLERANCE


def test_the_context_is_never_exceeded(tiny_model: Path) -> None:
    async def main() -> list[Completion]:
        engine = await started(tiny_model, context=32)
        sizes = (28, 31, 32, 40)
        done = [await engine.generate(request("s", np.full(size, 5), 20, id=str(size))) for size in sizes]
        await engine.close()
        return done

    done = asyncio.run(main())
    assert [completion.token_ids.size for completion in done] == [4, 1, 0, 0]
    assert [completion.stop_reason for completion in done] == ["length", "length", "context", "context"]


def test_the_stop_token_ends_the_completion_and_is_part_of_it(tiny_model: Path) -> None:
    stops = tuple(range(10, 30))

    async def main() -> list[tuple[Request, Completion]]:
        engine = await started(tiny_model)
        asked = [request(f"s{i}", np.array([3, 4, 5 + i]), 40, stop_token_ids=stops) for i in range(12)]
        pairs = list(zip(asked, await asyncio.gather(*(engine.generate(one) for one in asked)), strict=True))
        await engine.close()
        return pairs

    pairs = asyncio.run(main())
    assert any(completion.stop_reason == "stop" for _, completion in pairs)
    for asked, completion in pairs:
        check_completion(asked, completion)
        if completion.stop_reason == "stop":
            assert int(completion.token_ids[-1]) in stops and completion.logprobs.size == completion.token_ids.size


def test_a_seed_draws_the_same_tokens_alone_and_in_company(tiny_model: Path) -> None:
    asked = request("s", np.array([3, 4, 5]), 30, seed=11)

    async def main() -> list[list[int]]:
        engine = await started(tiny_model, slots=8)
        alone = await engine.generate(asked)
        await engine.release("s")
        others = [engine.generate(request(f"o{i}", np.array([6, 7, i + 3]), 9)) for i in range(7)]
        company, *_ = await asyncio.gather(engine.generate(asked), *others)
        await engine.close()
        return [alone.token_ids.tolist(), company.token_ids.tolist()]

    alone, company = asyncio.run(main())
    assert alone == company


def test_engines_of_different_seeds_draw_differently_and_of_equal_seeds_alike(tiny_model: Path) -> None:
    async def draw(seed: int) -> list[int]:
        engine = await started(tiny_model, seed=seed)
        completion = await engine.generate(request("s", np.array([3, 4, 5]), 30))
        await engine.close()
        return completion.token_ids.tolist()

    drawn = [asyncio.run(draw(seed)) for seed in (1, 2, 3, 4, 1)]
    assert drawn[0] == drawn[4]
    assert len({tuple(ids) for ids in drawn}) == 4


def test_samples_follow_the_reported_distribution(tiny_model: Path) -> None:
    """Chi-square of 4000 first tokens against exp(log-prob), at temperature 2."""
    n, prompt = 4000, np.array([3, 4, 5])

    async def main() -> list[Completion]:
        engine = await started(tiny_model, slots=200)
        done = await asyncio.gather(
            *(engine.generate(request(f"s{i % 200}-{i}", prompt, 1, temperature=2.0)) for i in range(n))
        )
        await engine.close()
        return done

    done = asyncio.run(main())
    counts = np.bincount([int(completion.token_ids[0]) for completion in done], minlength=48)
    with torch.inference_mode():
        logits = load_model(tiny_model)(input_ids=torch.tensor(prompt)[None]).logits[0, -1]
    expected = n * torch.softmax(logits / 2.0, -1).double().numpy()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    wanted[-1] = max(wanted[-1], 1e-9)
    assert ((observed - wanted) ** 2 / wanted)[wanted >= 1].sum() < 48 + 5 * np.sqrt(2 * 48)


def test_an_update_that_does_not_fit_leaves_the_old_weights(tiny_model: Path, tmp_path: Path) -> None:
    good = dict(make_model(3).named_parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    cases = {
        "missing": {key: value for key, value in good.items() if key != name},
        "transposed": good | {name: good[name][:32]},
        "unknown": good | {"extra.weight": torch.zeros(2)},
        "untied": good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1},
        "older": good,
    }
    refs = {}
    for case, tensors in cases.items():
        (tmp_path / case).mkdir()
        refs[case] = publish(tensors, tmp_path / case, 0 if case == "older" else 1)
    fits = publish(good | {"lm_head.weight": good["model.embed_tokens.weight"]}, tmp_path, 1)
    refs["torn"] = WeightsRef(1, fits.path, "0" * 32)
    (tmp_path / "other").mkdir()
    other = publish(dict(make_model(4).named_parameters()), tmp_path / "other", 1)
    prompt = np.array([3, 4, 5])

    async def main() -> None:
        engine = await started(tiny_model)
        before = await engine.generate(request("start", prompt, 8, seed=1))
        for case, ref in refs.items():
            with pytest.raises(EngineError if case == "older" else WeightsError):
                await engine.update_weights(ref)
            after = await engine.generate(request(case, prompt, 8, seed=1))
            assert engine.version == 0 and after.token_ids.tolist() == before.token_ids.tolist()
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
        await engine.update_weights(fits)
        await engine.update_weights(fits)  # again: nothing to do
        with pytest.raises(EngineError, match="already serves version 1"):
            await engine.update_weights(other)
        assert engine.fingerprint == fits.fingerprint
        await engine.close()

    asyncio.run(main())


def test_nan_weights_fail_the_request_and_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    bad = {name: torch.full_like(value, float("nan")) for name, value in make_model(1).named_parameters()}
    good = make_model(2)
    prompt = np.arange(3, 20, dtype=np.int32)

    async def main() -> float:
        engine = await started(tiny_model, slots=3)
        await engine.update_weights(publish(bad, tmp_path, 1))
        for name in "abc":
            with pytest.raises(EngineError, match="bad_logprob"):
                await engine.generate(request(name, prompt, 8))
        await engine.update_weights(publish(dict(good.named_parameters()), tmp_path, 2))
        asked = [request(name, prompt[:4], 8, id=f"{name}2") for name in "abc"]
        done = await asyncio.gather(*(engine.generate(one) for one in asked))
        await engine.close()
        return max(compare({2: good}, *pair) for pair in zip(asked, done, strict=True))

    assert asyncio.run(main()) < TOLERANCE


def test_requests_that_make_no_sense_are_refused_and_hurt_nobody(tiny_model: Path) -> None:
    async def main() -> None:
        engine = await started(tiny_model)
        fine = asyncio.ensure_future(engine.generate(request("fine", np.array([3]), 40)))
        await asyncio.sleep(0)  # it is in flight
        for wrong in (
            request("s", np.array([48])),
            request("s", np.array([-1])),
            request("s", np.empty(0)),
            request("s", np.array([3]), 0),
            request("s", np.array([3]), temperature=float("nan")),
            request("s", np.array([3]), temperature=-1.0),
            request("fine", np.array([3]), id="second of its session"),
        ):
            with pytest.raises(EngineError):
                await engine.generate(wrong)
        assert (await fine).token_ids.size == 40
        await engine.close()

    asyncio.run(main())


def test_release_cancel_and_close_end_requests_in_flight(tiny_model: Path) -> None:
    async def main() -> None:
        engine = await started(tiny_model, slots=2, context=512)
        released = asyncio.ensure_future(engine.generate(request("released", np.array([3]), 500)))
        cancelled = asyncio.ensure_future(engine.generate(request("cancelled", np.array([3]), 500)))
        waiting = asyncio.ensure_future(engine.generate(request("waiting", np.array([3]), 500)))
        while engine.stats().sampled_tokens < 10:
            await asyncio.sleep(0.001)
        assert engine.stats().waiting == 1
        await engine.release("released")
        completion = await released
        assert completion.stop_reason == "abort" and completion.token_ids.size > 0
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        again = await engine.generate(request("cancelled", np.array([3, 4]), 3, id="again"))
        assert again.token_ids.size == 3
        late = asyncio.ensure_future(engine.generate(request("late", np.array([3]), 500)))
        await asyncio.sleep(0.02)
        await engine.close()
        await engine.close()
        for future in (waiting, late):
            with pytest.raises(ClosedError):
                await future
        with pytest.raises(ClosedError):
            await engine.generate(request("after", np.array([3])))

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torch-engine")]


def test_more_sessions_than_slots_are_all_served(tiny_model: Path) -> None:
    models = {0: load_model(tiny_model)}

    async def main() -> float:
        engine = await started(tiny_model, slots=3)
        asked = [request(f"s{i}", np.array([3, 4, 5 + i % 20]), 5) for i in range(20)]
        done = await asyncio.gather(*(engine.generate(one) for one in asked))
        # Idle sessions gave up their slots to others; coming back costs a prefill, not correctness.
        more = [
            request(one.session, np.concatenate([one.prompt_ids, completion.token_ids]), 5, id=f"{one.session} again")
            for one, completion in zip(asked, done, strict=True)
        ]
        done += await asyncio.gather(*(engine.generate(one) for one in more))
        await engine.close()
        return max(compare(models, *pair) for pair in zip([*asked, *more], done, strict=True))

    assert asyncio.run(main()) < TOLERANCE


def test_a_fault_of_the_model_reaches_every_caller(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = await started(tiny_model)

        def broken(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._decoder, "_forward", broken)
        for name in "ab":
            with pytest.raises(EngineError, match="out of memory"):
                await engine.generate(request(name, np.array([3])))
        await engine.close()

    asyncio.run(main())


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        await TorchEngine(tmp_path / "none", slots=1, context_tokens=8, seed=0).start()

    with pytest.raises(ConfigError, match=r"none has no config\.json"):
        asyncio.run(main())
