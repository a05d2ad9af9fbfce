"""Workers: evidence in, verdicts out.

All keys, rq's too, share one hash tag, so that a Redis cluster keeps them on one node and its transactions and scripts
work. rq reads its prefix once, when it is imported, so it is set here, before anything of this package can import rq.
"""

import os
import sys

TAG = "{countersign}"
RQ_PREFIX = TAG + ":rq"

os.environ["RQ_KEY_PREFIX"] = RQ_PREFIX
if "rq.defaults" in sys.modules and sys.modules["rq.defaults"].RQ_KEY_PREFIX != RQ_PREFIX:
    raise ImportError("verifier_pool must be imported before rq, whose keys would else have another prefix")
