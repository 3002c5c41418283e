from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fuzz.simulation.histories import NUMBERS, POLICIES, WEIGHTS, Play

NUMBER = st.integers(0, (1 << 16) - 1)


class LedgerMachine(RuleBasedStateMachine):
    """The same actions as in the random histories, chosen and shrunk by Hypothesis."""

    @initialize(tight=st.integers(0, 1), policy=st.integers(0, len(POLICIES) - 1), store=st.integers(0, 2))
    def begin(self, tight: int, policy: int, store: int) -> None:
        self.game = Play(tight, policy, store)
        for uid in range(3):
            self.game.join(uid, uid)

    @rule(
        kind=st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)]),
        numbers=st.tuples(*[NUMBER] * NUMBERS),
    )
    def act(self, kind: str, numbers: tuple[int, ...]) -> None:
        self.game.do((kind, numbers))

    @invariant()
    def what_can_be_seen_agrees(self) -> None:
        if hasattr(self, "game"):
            self.game.observe()

    def teardown(self) -> None:
        if hasattr(self, "game"):
            self.game.finish()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=10,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
