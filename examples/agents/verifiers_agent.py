"""A taskset of verifiers 0.4 as it is: `prices.py`, played by verifiers' own chat loop through its `eval` client."""

import asyncio
import os

import verifiers.v1 as vf

config = vf.SingleAgentEnvConfig(
    taskset=vf.TasksetConfig(id="prices"),
    agent=vf.AgentConfig(harness=vf.HarnessConfig(id="null"), runtime=vf.SubprocessConfig()),
)
client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")


async def main() -> None:
    """Plays an episode, and prints its reward as the last line."""
    env = vf.SingleAgentEnv(config)
    async with env.serving():
        (task,) = env.taskset
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext(os.environ["SAO_MODEL"], client))
    if not episode.ok:  # no reward: what failed is not the policy
        raise SystemExit(str([trace.errors for trace in episode.traces] or episode.errors))
    print(episode.traces[0].reward)


asyncio.run(main())
