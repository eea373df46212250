def score(answer: str, row: dict) -> float:
    """1 for the call that the row wants, half of it for a call of something else."""
    words, wanted = answer.split(), row["call"].split()
    return 1.0 if words == wanted else 0.5 * (words[:1] == wanted[:1])
