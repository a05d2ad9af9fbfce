"""LMCV's pipeline, offline: prompts, evidence, replay, verdicts, in files shaped as TrueOpen/lmcv-experiments has them."""
