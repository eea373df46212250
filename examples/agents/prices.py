"""A taskset of verifiers 0.4 with a tool. verifiers imports it by its name, and starts it as the server of the tool."""

import verifiers.v1 as vf
from task import Task


class Prices(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def price_of(self, item: str) -> str:
        """The price of an item."""
        return Task().price_of(item)


class PriceTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        from prices import Prices  # by a name that its own process can import

        return [Prices(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        task = Task()
        if any("price_of" in str(node.message) for node in trace.nodes):
            task.price_of(task.item)
        return task.reward(trace.last_reply)


class PriceTasks(vf.Taskset[PriceTask, vf.TasksetConfig]):
    def load(self) -> list[PriceTask]:
        return [PriceTask(vf.TaskData(prompt=Task().question), self.config.task)]


__all__ = ["PriceTasks"]

if __name__ == "__main__":
    Prices.run()
