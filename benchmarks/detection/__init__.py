"""How well the checks detect cheating: answers recorded from real engines, and tables made from them.

record      answers of honest and cheating engines, and their replays, as arrays (needs vLLM; a GPU for some variants)
evidence    those arrays as evidence and replays
"""
