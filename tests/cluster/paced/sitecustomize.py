"""On PYTHONPATH of a worker: it rests after each step, so that a test has time to disturb it on any machine, and the
processors are free meanwhile.
"""

import os
import sys

if "cellmill.train.worker" in sys.orig_argv and os.environ.get("REST_S"):
    import time

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ["REST_S"])))
