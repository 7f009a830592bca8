"""A front end with engines as actors, in a process of its own: ``python ray_front_end.py [CLUSTER]``."""

from __future__ import annotations

import sys
import time

import ray_targets as targets


def main(cluster: str | None) -> None:
    import ray

    from aioshm.engine import CoreEngineActorManager

    # Without a cluster, it has one of its own.
    own = {
        "address": "local",
        "num_cpus": 1,
        "num_gpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80_000_000,
    }
    options = {"address": cluster} if cluster else own
    options["log_to_driver"] = False
    with CoreEngineActorManager(targets.leave, 1, 1, args=([None],), ray_options=options) as manager:
        print(manager.actors[0].pid, flush=True)
        if cluster:
            time.sleep(targets.LONG_S)
    print("connected" if ray.is_initialized() else "left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
