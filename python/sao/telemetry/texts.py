"""The texts of token ids, for people: nothing that is trained on is read from them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

_LONGEST = 8  # tokens that together are one character, at most


class Texts:
    """The texts of a model's tokens; ids as numbers where its tokenizer is gone."""

    def __init__(self, tokenizer: Any = None) -> None:
        """tokenizer: of the library `tokenizers`."""
        self._tokenizer = tokenizer
        # Of words that the tokenizer split at blanks, and of numbers.
        self._gap = " " if tokenizer is None or tokenizer.decoder is None else ""
        added = tokenizer.get_added_tokens_decoder() if tokenizer is not None else {}
        self.special = {number: token.content for number, token in added.items()}

    @classmethod
    def of(cls, run_folder: Path) -> Self:
        """The texts of the model that a run's `config.json` names."""
        try:
            config: dict[str, Any] = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
            from tokenizers import Tokenizer  # of the extra `train`

            return cls(Tokenizer.from_file(str(Path(config["model"]["path"]) / "tokenizer.json")))
        except Exception:  # no run folder, no model any more, no library: ids do as well
            return cls()

    def pieces(self, ids: NDArray[Any] | Sequence[int]) -> list[str]:
        """The text of each token. Of several that are one character, the first has it and the others have none."""
        found = [self._piece(int(token)) for token in ids]
        for start, piece in enumerate(found):
            if piece.endswith("\ufffd"):
                for stop in range(start + 2, min(start + _LONGEST, len(found)) + 1):
                    whole = self._decoded(tuple(map(int, ids[start:stop])))
                    if "\ufffd" not in whole:
                        found[start:stop] = [whole, *[""] * (stop - start - 1)]
                        break
        return found

    def _piece(self, token: int) -> str:
        text = self._decoded((token,))
        return text if text.isspace() else text + self._gap

    @lru_cache(1 << 18)  # noqa: B019 - of one run, which is looked at once
    def _decoded(self, ids: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text
