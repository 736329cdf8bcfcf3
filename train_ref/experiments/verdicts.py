"""Verdicts on a paper's claims that one row is above another."""

from __future__ import annotations

from collections.abc import Sequence

from train_ref.outcome import Outcome
from train_ref.settings import Verdict

REPRODUCED, PARTLY, NOT, NOT_RUN = "reproduced", "partly reproduced", "not reproduced", "not run"


def compared(outcome: Outcome, claim: str, pairs: Sequence[tuple[str, str]], measure: str) -> Verdict:
    """The second row of each pair is claimed to be higher. A pair counts as clear if the means differ by more
    than the larger of the two standard deviations."""
    clear, above, said = 0, 0, []
    pairs = [pair for pair in pairs if all(outcome.value(row, measure) for row in pair)]
    for lower, higher in pairs:
        low, high = outcome.value(lower, measure), outcome.value(higher, measure)
        assert low is not None
        assert high is not None
        gain = high.mean - low.mean
        above += gain > 0
        clear += gain > max(low.std, high.std)
        said.append(f"{lower.rpartition(': ')[2]} {low} → {higher.rpartition(': ')[2]} {high}")
    if not pairs:
        return Verdict(claim, NOT_RUN, "nothing of it has finished")
    return Verdict(claim, word(clear == len(pairs), above > 0), "; ".join(said))


def word(wholly: bool, partly: bool) -> str:
    return REPRODUCED if wholly else PARTLY if partly else NOT
