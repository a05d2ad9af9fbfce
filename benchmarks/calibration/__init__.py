"""`countersign calibrate`: how far an honest backend's answers lie from the reference's replay.

plan      which answers are asked for, in which order: conditions, temperatures, lengths, kinds of prompt
prompts   what is asked
asking    requests to the trusted backends, through the proxy's own code
replaying the answers replayed, as a worker would
archive   a folder that keeps all of it, so that measuring can be continued and a profile fitted again
fitting   from answers and replays to a profile
report    what was found, in a table
servers   whether the backends are what they are declared to be
command   the command line
"""
