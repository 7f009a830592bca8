"""A reader that waits, with messages in bursts, beats, and pauses.

Real: `Predictor` with its rhythm.
"""

from __future__ import annotations

from aioshm.wait.costs import TYPICAL
from aioshm.wait.predictor import FAILURES, PROBE, STREAM_SPIN_NS, Predictor
from tools.simulate.world import World

_WAITS = 150


async def run(world: World) -> dict[str, int]:
    """Let a predictor decide some waits; return what they were."""
    chance = world.chance
    share = chance.choice([0.0, 0.1, 0.5])
    predictor = Predictor(may_spin=chance.random() < 0.9, crowded=chance.random() < 0.2, max_spin_cpu=share)
    now, vain, vain_in_row = 1_000_000_000, 0, 0
    at = now
    gap = 0
    for number in range(_WAITS):
        if number % 30 == 0:
            gap = chance.choice([500, 20_000, 300_000, 5_000_000, 200_000_000])
        plan = predictor.plan(number, at, now)
        world.check(plan.spin_ns >= 0 and plan.nap_ns >= 0, f"a wait of less than nothing: {plan}")
        most = max(STREAM_SPIN_NS, int(predictor.patience_ns), TYPICAL.spin_ns)
        world.check(plan.spin_ns <= 2 * most, f"a spin of {plan.spin_ns} ns")
        arrives = at + max(1, int(gap * world.between(0.5, 1.5))) if gap else at + 1
        arrives = max(arrives, now)
        window = plan.spin_ns or plan.nap_ns
        if window and not plan.wake_at_ns:
            hit = arrives - now <= window
            vain_in_row = 0 if hit else vain_in_row + 1
            vain += not hit
            predictor.spun(hit)
            world.check(
                vain_in_row <= FAILURES + 2 + number // PROBE, f"{vain_in_row} spins in vain, one after the other"
            )
        elif plan.wake_at_ns:
            predictor.woke(chance.randint(0, 50_000))
            predictor.watched(chance.random() < 0.5, chance.randint(0, 100_000))
            predictor.after_miss(max(now, plan.wake_at_ns))
        at = arrives
        now = arrives + chance.randint(0, 5_000)
    return {"waits": _WAITS, "spins in vain": vain}
