"""A reader that waits, with messages in bursts, beats, and pauses.

Real: `Policy`.
"""

from __future__ import annotations

from aioshm.wait.policy import FAILURES, NAPS, PARK, PROBE, STREAM_SPIN_NS, YIELDING_SPIN_NS, Policy, WaitMode
from tools.simulate.world import World

_WAITS = 150


async def run(world: World) -> dict[str, int]:
    """Let a policy decide some waits; return what they were."""
    chance = world.chance
    share = chance.choice([0.0, 0.1, 0.5])
    policy = Policy(
        may_spin=chance.random() < 0.9,
        crowded=chance.random() < 0.2,
        in_threads=chance.random() < 0.2,
        max_spin_cpu=share,
    )
    now, vain, vain_in_row = 1_000_000_000, 0, 0
    at = now
    gap = 0
    for number in range(_WAITS):
        if number % 30 == 0:
            gap = chance.choice([500, 20_000, 300_000, 5_000_000, 200_000_000])
        arrives = at + max(1, int(gap * world.between(0.5, 1.5))) if gap else at + 1
        arrives = max(arrives, now)
        step = policy.begin(number, at, now)
        steps = 0
        while step is not PARK and arrives > step.until_ns:
            world.check(step.until_ns > 0, f"a step without an end: {step}")
            steps += 1
            world.check(steps < 2 * NAPS + 4, "a wait that never parks")
            if step.mode is WaitMode.SPIN:
                spin_ns = step.until_ns - now
                world.check(spin_ns <= max(STREAM_SPIN_NS, 4 * YIELDING_SPIN_NS), f"a spin of {spin_ns} ns")
                vain += 1
                vain_in_row += 1
                world.check(
                    vain_in_row <= FAILURES + 2 + number // PROBE, f"{vain_in_row} spins in vain, one after the other"
                )
            now = max(now, step.until_ns) + chance.randint(0, 50_000)
            step = policy.missed(now)
        if step.mode in (WaitMode.SPIN, WaitMode.NAP):  # either shows that messages come soon
            vain_in_row = 0
        at = arrives
        now = max(now, arrives) + chance.randint(0, 5_000)
        policy.hit(now, woken=step.mode in (WaitMode.SLEEP, WaitMode.PARK))
    return {"waits": _WAITS, "spins in vain": vain}
