"""The task: a tool knows the price of an item, and the answer is that price plus the postage. Standard library only.

user       What does the "red apple" cost, with 4 for postage?
assistant  price_of(item="red apple")
tool       5
assistant  9
"""

import hashlib
import random
import re

COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey", "gold", "plain", "pale", "dark")
THINGS = ("apple", "bread", "chair", "dress", "fork", "glove", "hammer", "kettle", "lamp", "mirror", "pencil", "shirt")
NUMBERS = range(13)
INSTRUCTIONS = "Answer by a number."
_PRICES = 7  # prices and postage are 0 to 6, so that a sum is one of NUMBERS
_HELD_OUT = 8  # one task in so many is only played in evaluations


class Shop:
    """The task of (seed, split), one of 7056, and what the tool knows. No task of one split is one of the other."""

    def __init__(self, seed: int, split: str) -> None:
        draw = random.Random(seed)
        while True:
            self.item = f"{draw.choice(COLOURS)} {draw.choice(THINGS)}"
            self.price, self.postage = draw.randrange(_PRICES), draw.randrange(_PRICES)
            digest = hashlib.sha256(f"{self.item} {self.price} {self.postage}".encode()).digest()
            if (digest[0] % _HELD_OUT == 0) == (split == "eval"):
                break
        self.question = f'What does the "{self.item}" cost, with {self.postage} for postage?'
        self.answer = str(self.price + self.postage)
        self._others, self._asked = random.Random(seed), False

    def price_of(self, item: str) -> str:
        """What the tool answers; other items have a price, too, which tells nothing."""
        if item == self.item:
            self._asked = True
            return str(self.price)
        colour, _, thing = item.partition(" ")
        return str(self._others.randrange(_PRICES)) if colour in COLOURS and thing in THINGS else "unknown"

    def reward(self, answer: object) -> float:
        """1 if the last number of the answer is right and the tool was asked for the item, else 0."""
        return float(self._asked and re.findall(r"\d+", str(answer))[-1:] == [self.answer])
