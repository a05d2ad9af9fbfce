"""What standing does to honest backends and to those that turn bad, simulated.

nulls      honest backends on the boundary of what standing allows them
fleet      the evidence of many backends at once
honest     how many of them are accused
evidence   recorded answers as outcomes
turning    a backend that turns bad, through `policies.standing` itself
rivals     other rules on the same answers
cheating   how many answers each cheat gets away with
predict    the same for given answers, in seconds
"""
