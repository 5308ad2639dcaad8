"""Run under the clock of tests/soak/clock.c: at each place given, the wall clock jumps an hour ahead, back and ahead while requests
with a deadline of some minutes run. Prints what came of it."""

import json
import sys
import time

from maga_transformer import _core
from simulation import World

PARAMS = _core.SamplingParams(max_new_tokens=6, seed=0)


def load(world: World, harness) -> bool:
    """Whether all outputs are right."""
    prompts = [[i, 1, 2, 3, 4, 5] for i in range(4)]
    requests = [harness.submit(prompt, PARAMS, sequences=2, timeout_seconds=600.0) for prompt in prompts]
    outputs = harness.run()
    return all(
        outputs[request, stream].tokens == world.simulate(prompt, PARAMS, stream).tokens
        for request, prompt in zip(requests, prompts, strict=True)
        for stream in range(2)
    )


def ahead() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


told = {}
for place in sys.argv[1:]:
    world, before = World(pages=24), ahead()
    right = load(world, world.engine(fault=f"clock:{place}:3"))
    told[place] = {"right": right, "hours": round((ahead() - before) / 3600)}
print(json.dumps(told))
