"""LMCV's pipeline, offline: prompts, evidence, replay, verdicts, in files shaped as its own tools have them."""
