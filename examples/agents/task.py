"""The task of these examples: what an item costs, which only the tool knows. Its place is taken by yours."""

import os
import random
import re

ITEMS = ("apple", "bread", "chair", "dress", "eraser", "fork", "glove", "hammer")


class Task:
    """The task of an episode; the same seed and split (SAO_SEED, SAO_SPLIT) are the same task."""

    def __init__(self) -> None:
        draw = random.Random(f"{os.environ['SAO_SPLIT']} {os.environ['SAO_SEED']}")
        self.item, self.price = draw.choice(ITEMS), draw.randrange(10, 100)
        self.question = f"What does the {self.item} cost?"
        self._asked = False

    def price_of(self, item: str) -> str:
        """What the tool answers."""
        self._asked = self._asked or item == self.item
        return str(self.price) if item == self.item else "unknown"

    def reward(self, answer: object) -> float:
        """1 if the last number of the answer is the price, and the tool was asked for it."""
        numbers = re.findall(r"\d+", str(answer))
        return float(self._asked and numbers[-1:] == [str(self.price)])
