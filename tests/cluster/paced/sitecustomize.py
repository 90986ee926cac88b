"""On PYTHONPATH of a worker: it rests after each step, so that a test has time to disturb it on any
machine, and the processors are free meanwhile. In every process of the run, a node that was lost is
noticed in 20 s instead of 60.
"""

import os
import sys

if "cellmill.train.worker" in sys.orig_argv and os.environ.get("REST_S"):
    import time

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ["REST_S"])))

if any(word.startswith(("cellmill", "submitit")) for word in sys.orig_argv):
    from cellmill.runs import lock

    lock.RENEW_S = 4.0
    lock.LEASE_S = 20.0
