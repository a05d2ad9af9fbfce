"""Whether anything is lost when everything dies: real processes, killed at random times, and a ledger at the end.

Proxies, workers and reference processes run as an operator runs them, on a real Valkey with an append-only file, in
front of a scripted backend that writes down every request it serves. All of them but the backend are killed with
SIGKILL again and again, and the network between them is cut or swallows everything, while clients go on asking.
Then the ledger compares what was sent, accepted, judged and counted (`benchmarks.chaos.ledger`).
"""
